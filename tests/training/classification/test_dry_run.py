"""`--dry-run` of a classifier: its parameters, its memory, and what is not on this machine."""

import json

import pytest

from megatron import backend

backend.install()

from megatron.training.arguments import parse_args
from megatron.training.dry_run import run_dry
from tests.training.classification.vision_helper import SMALL, defaults, write_images


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher's environment, as on a laptop."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def dry(capsys, tmp_path, flags: str) -> tuple[int, str, str, dict]:
    file = tmp_path / "dry.json"
    args = parse_args(f"{SMALL} {flags} --dry-run-json {file}".split(), defaults=defaults())
    status = run_dry(args, "pretrain_vision_classify.py")
    return status, *capsys.readouterr(), json.loads(file.read_text()) if file.exists() else {}


def test_a_job_that_is_right(capsys, tmp_path):
    """Patches and classes are in the sum of parameters; data that are elsewhere are a warning."""
    status, out, err, found = dry(
        capsys, tmp_path, "--data-path TRAIN VALID --pipeline-model-parallel-size 2 --dry-run 4"
    )
    assert (status, err) == (0, "")
    assert "warning: data TRAIN is not on this machine" in out and "warning: data VALID is not" in out
    parameters = [rank["num_parameters"] for rank in found["memory"]]
    layer = 12 * 32**2 + 13 * 32
    assert parameters == [2 * layer + (16 + 1 + 5 + 1) * 32, 2 * layer + 2 * 32 + 33 * 3]


def test_epochs_need_the_data(capsys, tmp_path):
    """Their number of samples decides the length; with them the dry run knows it."""
    flags = "--epochs 4 --dry-run 1"
    args = SMALL.replace("--train-iters 10", "")
    for path, expected in (("none.npz", 1), (write_images(tmp_path / "a.npz", 20), 0)):
        namespace = parse_args(f"{args} --data-path {path} {flags}".split(), defaults=defaults())
        assert run_dry(namespace, "pretrain_vision_classify.py") == expected
        _, err = capsys.readouterr()
        assert ("file none.npz does not exist" in err) is bool(expected)
    assert (namespace.train_iters, namespace.eval_interval, namespace.eval_iters) == (10, 3, 0)
