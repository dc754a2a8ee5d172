"""Checkouts of Megatron-LM for these tests: one written for them, and the user's where MEGATRON_LM names one.

`write` makes a checkout with `megatron/training` (the folder `checkout` beside this file) and `pretrain_small.py`;
megatron.core is the installed one. `launch` starts a job in it.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(__file__).with_name("checkout")
LOSS = re.compile(r"iteration +(\d+)/ +\d+ .*lm loss: (\S+) .*grad norm: (\S+) ")


def write(folder: Path, *, num_values: int = 8, without: Iterable[str] = ()) -> Path:
    """Make a checkout of `folder` and return it.

    Args:
        num_values: how many values `train_step` returns, as it differs between versions: 7 or 8.
        without: names to take out of `training.py` and `arguments.py` (they get another one).
    """
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    package = folder / "megatron" / "training"
    training = package / "training.py"
    assert "TUPLE = 8" in training.read_text()
    training.write_text(training.read_text().replace("TUPLE = 8", f"TUPLE = {num_values}"))
    for name in without:
        found = 0
        for file in (training, package / "arguments.py"):
            text, count = re.subn(rf"\b{name}\b", f"another_{name}", file.read_text())
            file.write_text(text)
            found += count
        assert found, f"there was no {name}"
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
    return _run(["-m", "megatron.pipeline.dropin", script, *arguments], num_ranks, cwd, variables)


def start(
    script: Path | str, *arguments: object, num_ranks: int = 0, cwd: Path, **variables: str
) -> subprocess.CompletedProcess:
    """Run a script as a user does who needs no launcher of ours."""
    return _run([script, *arguments], num_ranks, cwd, variables)


def _run(words: list, num_ranks: int, cwd: Path, variables: dict[str, str]) -> subprocess.CompletedProcess:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", num_ranks, "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    return subprocess.run(
        [sys.executable, *map(str, torchrun if num_ranks else ()), *map(str, words)],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def losses(output: str) -> list[tuple[int, str, str]]:
    """(iteration, loss, gradient norm) as their log prints them."""
    return [(int(iteration), loss, norm) for iteration, loss, norm in LOSS.findall(output)]
