"""What a user reads who looks at the end of the screen: torchrun's summary, after a failure of any kind."""

import os
import signal

import pytest

from tests.reliability import launch


@pytest.mark.full
def test_an_error_of_all_ranks_is_the_root_cause(tmp_path):
    """The sentence stands once where it is found, and once in the launcher's summary, which has nothing else to say."""
    outcome = launch.train(
        2, "--train-iters", 2, "--load", tmp_path, "--exit-on-missing-checkpoint", directory=tmp_path
    )
    sentence = (
        f"pretrain_gpt.py: error: --load {tmp_path} holds no checkpoint, and --exit-on-missing-checkpoint is given"
    )
    assert outcome.status != 0 and sentence in outcome.root_cause
    assert outcome.output.count(sentence) == 2


@pytest.mark.full
def test_a_wrong_command_line_is_the_root_cause(tmp_path):
    """Also where it is found before torch is imported."""
    outcome = launch.train(2, "--train-iters", 2, "--num-layer", 3, directory=tmp_path)
    assert "--num-layer is not a known flag; did you mean --num-layers?" in outcome.root_cause


@pytest.mark.full
def test_ctrl_c_ends_a_job_without_a_traceback_of_its_ranks(tmp_path):
    """One line of rank 0, and the directory is free for the next job."""
    flags = ["--train-iters", 10**6, "--save", "checkpoints", "--metrics-file", "metrics.jsonl"]
    with launch.Job(launch.training_command(2, *flags), directory=tmp_path) as job:
        launch.wait_for_iteration(job, tmp_path / "metrics.jsonl", 2)
        assert list((tmp_path / "checkpoints").glob(".owner_*"))
        before = job.output
        os.killpg(job.process.pid, signal.SIGINT)
        outcome = job.wait()
    said = outcome.output.removeprefix(before)
    assert outcome.status != 0 and not outcome.leftovers
    assert said.count("pretrain_gpt.py: ended by SIGINT") >= 1
    assert "stops: " not in said and "KeyboardInterrupt" not in said
    assert list((tmp_path / "checkpoints").iterdir()) == []
