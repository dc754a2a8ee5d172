"""examples/library: a script of plain torch that trains, stops and goes on."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def job(*flags: str) -> dict[int, str]:
    """What two ranks print: step -> the rest of its line; 0: the validation loss."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [*command, str(ROOT / "examples/library/train.py"), *flags],
        env=environment, check=True, timeout=240, capture_output=True, text=True,
    )  # fmt: skip
    steps = {int(number): rest for number, rest in re.findall(r"^step (\d+): (.*)$", result.stdout, re.MULTILINE)}
    (validation,) = re.findall(r"^validation loss (.*)$", result.stdout, re.MULTILINE)
    return {**steps, 0: validation}


@pytest.mark.full  # its parts: tests/pipeline/library
def test_it_trains_and_goes_on_where_it_stopped(tmp_path):
    """Under 2bw the loss falls; a run in two pieces prints what a run in one prints, validation included."""
    whole = job("--steps", "12")
    assert list(whole) == [*range(1, 13), 0]
    losses = [float(re.match(r"loss ([0-9.]+)", whole[step])[1]) for step in range(1, 13)]
    assert min(losses[6:]) < losses[0] - 0.2
    first = job("--steps", "6", "--save", str(tmp_path))
    assert {**first, **job("--steps", "12", "--load", str(tmp_path))} == whole
