"""What a run says at its start: evaluations that it has no data for, and another order of samples."""

import argparse

import pytest

from tests import workers
from tests.trainer.data.small_data import write_dataset
from tests.trainer.run.run_case import train


def noted(has_split: str, given: str = "", split: str | None = "969, 30, 1", **values: object) -> list[str]:
    """`has_split`: of v(alidation) and t(est), which have data."""
    from megatron.trainer.run.evaluation import without_data

    values = {"eval_iters": 2, "eval_interval": 1, "skip_train": False, **values}
    there = (True, "v" in has_split, "t" in has_split)
    return without_data(argparse.Namespace(has_split=there, split=split, given=given.split(), **values))


def test_notes():
    """Of validation and test, where the split means them to have data; of none that somebody has left out."""
    assert noted("vt") == noted("", eval_iters=0) == noted("v", split="99,1,0") == noted("", split=None) == []
    few = "--split 969, 30, 1 leaves them no document, so"
    assert noted("v") == [f"there are no test data: {few} nothing is tested at the end"]
    assert noted("t") == [f"there are no validation data: {few} the run evaluates nothing"]
    for split in (None, "100,0,0"):  # said by hand that there are none
        assert noted("", "eval_interval", split) == ["there are no validation data, so the run evaluates nothing"]


@pytest.mark.parametrize(
    ("given", "flags"),
    [("eval_interval", "--eval-interval 1"), ("eval_iters eval_interval", "--eval-interval 1 --eval-iters 2")],
)
def test_asked_for_by_name(given, flags):
    """What the flags ask for and the data cannot give is refused."""
    with pytest.raises(ValueError, match=f"^{flags}: there are no validation data, so nothing is evaluated; give more"):
        noted("t", given)
    with pytest.raises(ValueError, match=r"^--skip-train evaluates, and there are no .*; give --valid-data-path$"):
        noted("", given, None, skip_train=True)


def test_a_resumed_run_with_another_seed(tmp_path):
    """The log says that the order of samples changes, and from what to what."""
    train(1, f"--train-iters 2 --save {tmp_path}")
    lines = {seed: train(1, f"--train-iters 2 --load {tmp_path} --seed {seed}")[0]["lines"] for seed in (1234, 7)}
    said = {
        seed: [line for line in each if "or their order from the first on, are others" in line]
        for seed, each in lines.items()
    }
    assert not said[1234] and len(said[7]) == 1 and "was saved with --seed 1234 (now 7): " in said[7][0]


def test_ten_documents(tmp_path):
    """The usual split leaves none of ten documents for validation: a run that is to evaluate does not begin, and one
    that nobody told to says that it will not."""
    prefix = write_dataset(tmp_path / "text", documents=10)
    flags = f"--data-path {prefix} --train-iters 1"
    with pytest.raises(workers.WorkerError, match="--eval-iters 2: there are no validation data, so nothing is eval"):
        train(1, f"{flags} --eval-interval 1 --eval-iters 2")
    (result,) = train(1, f"{flags} --eval-iters 0")
    assert not any("validation data" in line for line in result["lines"])
