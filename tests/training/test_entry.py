"""How a job ends: status, one sentence, signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron.training.signals import StopSignal
from tests.training.arguments_helper import words

PROGRAM = str(Path(__file__).parents[2] / "pretrain_gpt.py")


def run(*extra: str, rank: str | None = None) -> tuple[subprocess.CompletedProcess, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if rank is not None:
        environment.update(RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank)
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, PROGRAM, *words(), *extra], capture_output=True, text=True, timeout=120, env=environment
    )
    return done, time.monotonic() - start


def test_wrong_command_line_is_printed_by_rank_0_only():
    """Status 2 on every rank, the sentence on rank 0 alone, before torch is imported."""
    first, seconds = run("--num-layer", "3", rank="0")
    assert first.returncode == 2 and seconds < 20
    assert first.stderr == "pretrain_gpt.py: error: --num-layer is not a known flag; did you mean --num-layers?\n"
    other, _ = run("--num-layer", "3", rank="1")
    assert (other.returncode, other.stderr) == (2, "")


def test_missing_data_is_one_sentence():
    """What is found after start-up is one sentence with status 2, too, without a traceback."""
    done, _ = run("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "./none")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "pretrain_gpt.py: error: --tokenizer-model ./none does not exist"
    assert "Traceback" not in done.stderr


def test_signal_is_a_wish():
    """SIGTERM is noted and passed on; the process lives."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        stop, told = StopSignal().install(), []
        stop.on_receipt = lambda: told.append(True)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received and told == [True]
    finally:
        signal.signal(signal.SIGTERM, before)
