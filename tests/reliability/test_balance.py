"""A balanced run that loses a rank in the middle of a move."""

import re
from pathlib import Path

import pytest

from tests.reliability import launch

PROGRAM = Path(__file__).with_name("killed_in_a_move.py")
END = 10.0  # seconds from the kill to the end of the job
SAVED, LAST = 4, 8
MOVES = 3  # that arrive at either end of the only pair, in each batch of 8 over 4 stages


@pytest.mark.full  # that a rank killed in a move is named: tests/pipeline/runtime/failure/test_failure_guard.py
@pytest.mark.parametrize(("rank", "schedule"), [(3, "bpipe"), (0, "flush")], ids=["its acceptor", "its evictor"])
def test_killed_in_a_move_and_resumed(tmp_path, rank, schedule):
    """kill -9 of one end while the other sends: all others end within 10 s and name it, and the run goes on from its
    checkpoint, balanced again or not, with the losses that it had before it was killed."""
    flags = ["--global-batch-size", 8, "--train-iters", LAST]
    flags += ["--save", "checkpoints", "--load", "checkpoints", "--save-interval", SAVED]
    in_iteration_7 = {"KILLED_RANK": str(rank), "KILLED_IN_MOVE": str(6 * MOVES + 2)}
    balanced = [*flags, "--pipeline-schedule", "bpipe", "--metrics-file", "first.jsonl"]
    command = launch.training_command(4, *balanced, program=PROGRAM)
    with launch.Job(command, directory=tmp_path, **in_iteration_7) as job:
        outcome = job.wait()
        killed = re.search(r"killed at ([\d.]+)", outcome.output)
        assert killed and launch.now() - float(killed[1]) < END, outcome.output
    assert outcome.status != 0 and not outcome.leftovers
    told = dict(re.findall(r"^rank (\d) .*stops: (.*)$", outcome.output, flags=re.MULTILINE))
    assert sorted(told) == [str(other) for other in range(4) if other != rank], outcome.output
    assert len(set(told.values())) == 1
    assert re.match(rf"rank {rank} \(stage {rank}\) ended without an error message", told.popitem()[1]), outcome.output
    before = launch.losses(tmp_path / "first.jsonl")
    assert sorted(before) == list(range(1, 7)), "it was killed in iteration 7"

    flags += ["--pipeline-schedule", schedule, "--metrics-file", "second.jsonl"]
    launch.train(4, *flags, directory=tmp_path).assert_succeeded()
    after = launch.losses(tmp_path / "second.jsonl")
    assert sorted(after) == list(range(SAVED + 1, LAST + 1))
    assert [after[iteration] for iteration in (5, 6)] == [before[iteration] for iteration in (5, 6)]
