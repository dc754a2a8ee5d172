"""Two jobs with one `--save` directory: a requeued job while the one before it is not quite dead.

One that was killed is followed at once: test_resume.py.
"""

import json

import pytest

from tests.reliability import launch
from tests.reliability.test_bad_input import assert_only_whole_checkpoints

SAVING = ["--save", "checkpoints", "--load", "checkpoints", "--save-interval", 20]
FLAGS = ["--pipeline-schedule", "2bw", *SAVING, "--override-opt_param-scheduler"]


def job(directory, iterations, metrics="metrics.jsonl"):
    command = launch.training_command(2, *FLAGS, "--train-iters", iterations, "--metrics-file", metrics)
    return launch.Job(command, directory=directory)


@pytest.mark.full
def test_the_second_job_is_refused_and_the_first_goes_on(tmp_path):
    """The second names the first, which stands still meanwhile, and whose checkpoints stay whole. Should
    somebody else take the directory, the first ends at its next save and writes nothing."""
    folder = tmp_path / "checkpoints"
    with job(tmp_path, 10**6) as first:
        launch.wait_for_iteration(first, tmp_path / "metrics.jsonl", 1)
        owner = first.workers()[0]
        with first.standing_still(), job(tmp_path, 10, metrics="other.jsonl") as second:
            outcome = second.wait()
        outcome.assert_failed_clearly("error: --save checkpoints is in use by another job", f"process {owner} on")
        assert outcome.output.count("is in use by another job") == 2, "once by the job, once in the launcher's summary"
        mark = json.loads((folder / ".owner_1").read_text())
        seen = max(launch.metrics(tmp_path / "metrics.jsonl"))
        launch.wait_for_iteration(first, tmp_path / "metrics.jsonl", seen + 25)  # a save later
        (folder / ".owner_2").write_text(json.dumps({**mark, "token": "0", "process": 5, "host": "elsewhere"}))
        outcome = first.wait()
    outcome.assert_failed_clearly("cannot save the checkpoint", "process 5 on elsewhere", "taken the directory over")
    assert (folder / ".owner_2").exists() and not (folder / ".owner_1").exists()
    (folder / ".owner_2").unlink()
    assert_only_whole_checkpoints(folder)
