"""Checkouts of Megatron-LM for these tests: one written for them, and the user's where MEGATRON_LM names one.

`write` makes a checkout with `megatron/training` (the folder `checkout` beside this file) and `pretrain_small.py`;
megatron.core is the installed one. `launch` starts a job in it as a user does; `fork` starts the same ranks where it is
not the start that is tested.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests import workers

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(__file__).with_name("checkout")
LOSS = re.compile(r"iteration +(\d+)/ +\d+ .*lm loss: (\S+) .*grad norm: (\S+) ")


def write(folder: Path, *, num_values: int = 8) -> Path:
    """Make a checkout of `folder` and return it.

    Args:
        num_values: how many values `train_step` returns, as it differs between versions: 7 or 8.
    """
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    training = folder / "megatron" / "training" / "training.py"
    assert "TUPLE = 8" in training.read_text()
    training.write_text(training.read_text().replace("TUPLE = 8", f"TUPLE = {num_values}"))
    return folder


def real_checkout() -> Path:
    """The user's checkout; the test is skipped where there is none."""
    named = os.environ.get("MEGATRON_LM")
    if not named:
        pytest.skip("needs a checkout of Megatron-LM; name one: MEGATRON_LM=/path/to/Megatron-LM")
    return Path(named)


def environment(**variables: str) -> dict[str, str]:
    """Of a job: this project on the path, one thread a rank."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **variables}


def launch(
    script: Path | str, *arguments: object, num_ranks: int = 0, cwd: Path, **variables: str
) -> subprocess.CompletedProcess:
    """Run a script through `-m megatron.pipeline.dropin`, by torchrun on `num_ranks`; 0: without torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", num_ranks, "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    words = [*(torchrun if num_ranks else ()), "-m", "megatron.pipeline.dropin", script, *arguments]
    return python(*words, cwd=cwd, **variables)


def python(*words: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run the interpreter with these words, in an environment as a job has."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def fork(
    script: Path | str, *arguments: object, num_ranks: int, cwd: Path, through_launcher: bool = True, **variables: str
) -> subprocess.CompletedProcess:
    """`launch` without torchrun, on ranks that have torch and megatron.core imported: a job takes a quarter of the
    time. Not `through_launcher`: as a user starts a script that installs the schedules itself.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has one for its ranks
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    variables |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    words = [*(["megatron.pipeline.dropin"] if through_launcher else []), str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(num_ranks)]
        ranks = [
            workers.fork(_rank, words, cwd, variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, files)
            for rank, files in enumerate(outputs)
        ]
        try:
            _wait(ranks, time.monotonic() + 300)
        finally:
            for each in ranks:
                each.kill()
                each.join()
        said = ["".join(file.read_text() for file in files) for files in zip(*outputs, strict=True)]
    return subprocess.CompletedProcess(words, max(abs(each.exitcode) for each in ranks), *said)


def _wait(ranks: list[BaseProcess], deadline: float) -> None:
    """Until all have ended, or one has failed and the others had the time to say so."""
    while (alive := [each.sentinel for each in ranks if each.exitcode is None]) and time.monotonic() < deadline:
        wait(alive, deadline - time.monotonic())
        if any(each.exitcode for each in ranks):
            deadline = min(deadline, time.monotonic() + 10 * workers.GRACE_S)


def _rank(words: list[str], folder: Path, variables: dict[str, str], files: tuple[Path, Path]) -> None:
    """Of `python -m`, or of a script: its arguments, its path and its output."""
    os.environ.update(environment(**variables))
    os.chdir(folder)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), number)
    sys.argv, sys.path[:0] = words, [str(folder)]
    (runpy.run_path if words[0].endswith(".py") else runpy.run_module)(words[0], run_name="__main__")


def losses(output: str) -> list[tuple[int, str, str]]:
    """(iteration, loss, gradient norm) as their log prints them."""
    return [(int(iteration), loss, norm) for iteration, loss, norm in LOSS.findall(output)]
