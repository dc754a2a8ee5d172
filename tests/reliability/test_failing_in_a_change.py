"""A rank that fails in what others wait for, while the pipeline changes, cannot go back alone: it ends the job."""

import re
from pathlib import Path

import pytest

from tests.reliability import launch
from tests.reliability.failing_in_a_change import PATIENCE, WENT_WRONG

END = 10.0  # seconds from when its patience is over to the end of the job
CHANGES = [
    "--train-iters", 4, "--untie-embeddings-and-output-weights", "--elastic-pipeline", "--freeze-interval", 2,
    "--elastic-schedule", "1",
]  # fmt: skip


@pytest.mark.full
def test_it_is_named(tmp_path):
    """On both ranks, with its own error, soon: not with a timeout of the others, which comes after minutes."""
    program = Path(__file__).with_name("failing_in_a_change.py")
    command = launch.training_command(2, *CHANGES, program=program)
    with launch.Job(command, directory=tmp_path) as job:
        outcome = job.wait()
        ended = launch.now()
    (wrong,) = re.findall(rf"{WENT_WRONG} ([\d.]+)", outcome.output)
    assert ended - float(wrong) < PATIENCE + END, outcome.output
    outcome.assert_failed_clearly("rank 1", "stops: rank 1", "failed", "OSError: [Errno 24] Too many open files")
    outcome.assert_failed_clearly("rank 0", "stops: rank 1", "failed", "OSError: [Errno 24] Too many open files")
