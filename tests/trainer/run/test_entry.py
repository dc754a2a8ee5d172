"""How a job ends: status, one sentence, signals."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron.pipeline.runtime.failure.errors import KEEPS_SURVIVORS, OnThisRank, is_ended_with_node
from megatron.trainer import ranks as ranks_module
from megatron.trainer.ranks import StopSignal
from megatron.trainer.run import entry
from tests.trainer.arguments.command_line import argv

PROGRAM = str(Path(__file__).parents[3] / "pretrain_gpt.py")


def run(*extra: str, rank: str | None = None) -> tuple[subprocess.CompletedProcess, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if rank is not None:
        environment.update(RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank)
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, PROGRAM, *argv(), *extra], capture_output=True, text=True, timeout=120, env=environment
    )
    return done, time.monotonic() - start


@pytest.mark.full
def test_wrong_command_line_is_printed_by_rank_0_only():
    """Status 2 on every rank, the sentence on rank 0 alone, before torch is imported."""
    with ThreadPoolExecutor() as both:  # at once
        (first, seconds), (other, _) = both.map(lambda rank: run("--num-layer", "3", rank=rank), "01")
    assert first.returncode == 2 and seconds < 20
    assert first.stderr == "pretrain_gpt.py: error: --num-layer is not a known flag; did you mean --num-layers?\n"
    assert (other.returncode, other.stderr) == (2, "")


def test_without_torch_a_run_and_a_dry_run_are_refused_in_one_sentence(tmp_path):
    """A plan is made where torch is not installed; its script says so there."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    path = os.pathsep.join([str(tmp_path), str(Path(PROGRAM).parent)])
    for more, why in (
        (("--dry-run", "2"), "--dry-run builds what megatron.core makes"),
        ((), "pretrain_gpt.py trains"),
    ):
        done = subprocess.run(
            [sys.executable, PROGRAM, *argv(), *more], capture_output=True, text=True, timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"pretrain_gpt.py: error: torch is not installed, and {why}")
        assert "; pip install '.[core]'" in line


def test_missing_data_is_one_sentence(tmp_path):
    """What is found after start-up is one sentence with status 2, too, without a traceback. No group outlives the
    program: threads of a process group abort the interpreter's end now and then, and status 2 becomes 134."""
    told = "atexit.register(lambda: print('groups:', torch.distributed.is_initialized()))"
    code = f"import atexit, runpy, sys, torch; {told}; runpy.run_path(sys.argv[0], run_name='__main__')"
    code = f"import sys; sys.argv.pop(0); {code}"
    wrong = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "none")]
    done = subprocess.run(
        [sys.executable, "-c", code, PROGRAM, *argv(), *wrong], capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(PROGRAM).parent)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "groups: False\n"), done.stderr
    assert done.stderr.splitlines()[-1] == f"pretrain_gpt.py: error: --tokenizer-model {tmp_path}/none does not exist"
    assert "Traceback" not in done.stderr


def test_error_of_a_rank_that_finds_no_others_is_told(capsys, monkeypatch):
    """Every such rank tells its own, unless the launcher has ended the job because rank 0 told it."""
    stop = StopSignal()
    monkeypatch.setattr(entry, "ERROR_PATIENCE", 0.1)
    monkeypatch.setenv("RANK", "5")
    assert entry._end_alone("prog", OnThisRank("no job"), stop) == 2
    assert capsys.readouterr().err == "prog: error: rank 5: no job\n"
    stop.received = True
    assert entry._end_alone("prog", OnThisRank("no job"), stop) == 2
    assert capsys.readouterr().err == ""


def test_signal_is_a_stop_request():
    """SIGTERM is noted and passed on; the process lives."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        stop, told = StopSignal().install(), []
        stop.on_receipt = lambda: told.append(True)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received and told == [True]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_torchruns_signal_to_the_rest_of_a_node_is_no_stop_request(monkeypatch):
    """Its agent, here this process, ends the other ranks when one is lost: this one is lost, too, and the job goes on.
    Our launcher ends nobody because of another."""
    monkeypatch.setattr(os, "getppid", os.getpid)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv(KEEPS_SURVIVORS, raising=False)
    ranks = [subprocess.Popen(["sleep", "600"], env={**os.environ, "RANK": str(rank)}) for rank in range(2)]
    try:
        assert not is_ended_with_node()
        with monkeypatch.context() as wrapped:  # a script stands between the agent and the program
            wrapped.setattr(os, "getppid", lambda: ranks[0].pid)
            assert not is_ended_with_node()
        ranks[1].kill()
        os.waitid(os.P_PID, ranks[1].pid, os.WEXITED | os.WNOWAIT)
        assert is_ended_with_node()
        ranks[1].wait()
        assert is_ended_with_node()
        with monkeypatch.context() as wrapped:
            wrapped.setattr(os, "getppid", lambda: ranks[0].pid)
            assert is_ended_with_node()
        monkeypatch.setenv(KEEPS_SURVIVORS, "1")
        assert not is_ended_with_node()
    finally:
        ranks[0].kill()
        ranks[0].wait()
    stop, ended = StopSignal(), []
    monkeypatch.setattr(ranks_module, "end_at_once", ended.append)
    stop.means_loss = lambda: True
    stop.received = True  # a second signal, behind a stop request
    stop._handle(signal.SIGTERM, None)
    assert ended == []
    stop.received = False
    stop._handle(signal.SIGTERM, None)
    assert ended == ["its launcher ends all ranks of a node of which one is lost"]


def test_what_is_freed_is_kept_before_training_begins(monkeypatch):
    """The C library is told so before anything is built."""
    from megatron import backend

    backend.install()  # before what imports megatron.core
    from megatron.trainer.run import pretraining

    happened = []
    monkeypatch.setattr(pretraining, "pretrain", lambda args, program, stop, **_: happened.append(program))
    monkeypatch.setattr(backend, "keep_freed_memory", lambda: happened.append("kept"))
    monkeypatch.setattr(sys, "argv", [PROGRAM, *argv()])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert entry.run("pretrain_gpt.py", lambda: "trained") == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert happened == ["kept", "trained"]
