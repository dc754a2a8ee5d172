"""Checkpoints of runs that freeze layers: stopped anywhere and gone on, at the same depth and at another, with either
optimizer; and what is refused.
"""

import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.trainer.checkpoint.directory import MANIFEST
from megatron.trainer.checkpoint.loader import CHECKSUMS_ENTRY
from tests import workers
from tests.trainer.changes.freezing_cases import FREEZES, assert_unmoved, train_watched
from tests.trainer.run.run_case import data_flags, joined_weights, train

CASES = {
    "flush": "--freeze-alpha 0.4",
    "2bw, bf16": "--pipeline-schedule 2bw --bf16 --freeze-schedule 1,2,3",
    "fp16": "--fp16 --initial-loss-scale 1048576 --loss-scale-window 3 --hysteresis 1 --freeze-schedule 1,3",
    "thawed, 2bw, bf16": (
        "--eval-iters 1 --eval-interval 2 --freeze-watch-validation -0.99 --pipeline-schedule 2bw --bf16"
        " --freeze-schedule 1,3"
    ),
    "SGD": "--pipeline-schedule 2bw --optimizer sgd --freeze-schedule 1,2,3",
    "distributed": (
        "--pipeline-model-parallel-size 1 --use-distributed-optimizer --bf16 --pipeline-schedule 2bw"
        " --freeze-schedule 1,3"
    ),
    "distributed, fp32": "--pipeline-model-parallel-size 1 --use-distributed-optimizer --freeze-schedule 1,3",
    "recomputed": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --freeze-schedule 2,3"
    ),
}


@functools.cache
def whole(flags: str, ranks: int = 2) -> list[dict]:
    return train_watched(ranks, flags)


def assert_goes_on(resumed: list[dict], never_stopped: list[dict], *, exact: bool = True) -> None:
    """Batches behind the stop, weights, moments and counters are those of the run that was never stopped."""
    expected = never_stopped[-1]["watched"]["batches"]
    for result in resumed:
        batches = result["watched"]["batches"]
        assert 0 < len(batches) < len(expected)
        for ours, theirs in zip(batches, expected[-len(batches) :], strict=True):
            assert (ours["num_frozen"], ours["scale"], ours["lr"]) == (
                theirs["num_frozen"], theirs["scale"], theirs["lr"],
            )  # fmt: skip
            assert ours["losses"] == pytest.approx(theirs["losses"], rel=0 if exact else 1e-6)
            if not theirs["overflow"]:
                assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-14 if exact else 1e-6)
        assert_unmoved(result)
    weights, others = joined_weights(resumed), joined_weights(never_stopped)
    assert weights.keys() == others.keys()
    moments, other_moments = _moments(resumed), _moments(never_stopped)
    assert moments.keys() == other_moments.keys()
    pairs = [(weights[name], others[name], name) for name in weights]
    pairs += [(moments[name], other_moments[name], str(name)) for name in moments]
    for ours, theirs, name in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if exact else 1e-5, msg=name)


def _moments(results: list[dict]) -> dict[tuple[str, str], torch.Tensor]:
    return {
        (name, key): torch.as_tensor(value)
        for result in results
        for name, state in result["watched"]["moments"].items()
        for key, value in state.items()
        if value is not None
    }


@pytest.mark.full
@pytest.mark.parametrize("name", ["2bw, bf16", *(name for name in CASES if name != "2bw, bf16")])
@pytest.mark.parametrize("stop", [4, 3, 1, 2, 5])
def test_stopped_and_resumed(tmp_path, name, stop):
    """Before the first decision, at one, and between two: bit-equal to a run that was never stopped."""
    flags = CASES[name]
    first = train_watched(2, f"{flags} --save {tmp_path} --exit-interval {stop}")
    assert [result["iteration"] for result in first] == [stop] * 2
    assert_goes_on(train_watched(2, f"{flags} --load {tmp_path}"), whole(flags))


@pytest.mark.full
@pytest.mark.parametrize("name", ["flush", "2bw, bf16", "distributed"])
def test_saved_at_every_iteration_beside_training(tmp_path, name):
    """--async-save: a checkpoint is under way wherever something is decided or changes, and all of them go on."""
    flags = CASES[name]
    found = train_watched(2, f"{flags} --save {tmp_path} --save-interval 1 --async-save")
    assert found[-1]["watched"]["batches"] == whole(flags)[-1]["watched"]["batches"]
    for step in (2, 4, 5):
        resumed = train_watched(2, f"{flags} --load {tmp_path} --ckpt-step {step}")
        assert_goes_on(resumed, whole(flags))


def test_a_save_waits_for_the_one_before(tmp_path):
    """Before it begins, on all ranks: either asks the others over the same group. Rank 0 writes its files late."""
    flags = f"{FREEZES} --freeze-interval 4 --train-iters 3 --save-interval 1 --async-save --save {tmp_path}"
    train(2, flags, watch="tests.trainer.changes.freezing_cases:late_files")
    assert sorted(each.name for each in tmp_path.glob("iter_*")) == [f"iter_{step:07d}" for step in (1, 2, 3)]


@pytest.mark.full
@pytest.mark.parametrize(("before", "after", "stop"), [(2, 1, 4), (1, 2, 4), (4, 2, 5)])
@pytest.mark.parametrize("name", ["flush", "2bw, bf16"])
def test_another_depth(tmp_path, name, before, after, stop):
    """Unclipped, the arithmetic does not depend on the depth."""
    flags = CASES[name]
    train_watched(before, f"{flags} --save {tmp_path} --exit-interval {stop}")
    assert_goes_on(train_watched(after, f"{flags} --load {tmp_path}"), whole(flags, after))


@pytest.mark.full
@pytest.mark.parametrize("stop", [3, 4])
@pytest.mark.parametrize("dtype", ["", "--bf16"])
@pytest.mark.parametrize(
    ("saved", "loaded"), [("", "--use-distributed-optimizer"), ("--use-distributed-optimizer", "")]
)
def test_the_other_optimizer(tmp_path, saved, loaded, dtype, stop):
    """What either optimizer has saved goes on in the other, where a whole rank is frozen, too."""
    flags = f"{dtype} --freeze-schedule 1,2,3"
    train_watched(2, f"{flags} {saved} --save {tmp_path} --exit-interval {stop}")
    resumed = train_watched(2, f"{flags} {loaded} --load {tmp_path}")
    expected = whole(flags)
    assert [each["losses"] for each in resumed[-1]["watched"]["batches"]] == [
        pytest.approx(each["losses"], rel=1e-6) for each in expected[-1]["watched"]["batches"][stop:]
    ]


@pytest.mark.full
def test_weights_alone(tmp_path):
    """Without the optimizer's state, what is frozen stays so; --finetune begins anew; other flags are refused."""
    flags = CASES["flush"]
    train_watched(2, f"{flags} --save {tmp_path} --exit-interval 4 --no-save-optim")
    with pytest.raises(workers.WorkerError, match=r"was saved without this optimizer state: pass --no-load-optim"):
        train_watched(2, f"{flags} --load {tmp_path}")
    resumed = train_watched(2, f"{flags} --load {tmp_path} --no-load-optim")
    assert [each["num_frozen"] for each in resumed[0]["watched"]["batches"]] == [
        each["num_frozen"] for each in whole(flags)[0]["watched"]["batches"]
    ][4:]
    anew = train_watched(2, f"{flags} --load {tmp_path} --finetune")
    assert [each["num_frozen"] for each in anew[0]["watched"]["batches"]][:2] == [0, 0]


@pytest.mark.full
def test_without_the_flags_that_froze(tmp_path):
    """Who needs no state of the optimizer needs no flag: evaluated, the checkpoint has the loss that it has with them,
    and trained on without that state, all layers learn."""
    saved = train(2, f"{FREEZES} {CASES['flush']} --save {tmp_path} --exit-interval 4")
    evaluated = f"--eval-iters 1 --skip-train --load {tmp_path}"
    flags = f"--untie-embeddings-and-output-weights --clip-grad 0 --train-iters 7 --load {tmp_path}"
    losses = validation_losses(train(2, f"{flags} {evaluated}"))
    assert losses == validation_losses(train(2, f"{FREEZES} {CASES['flush']} {evaluated}")) != []
    before = joined_weights(saved)
    after = joined_weights(train(2, f"{flags} --no-load-optim"))
    assert all(not torch.equal(value, after[name]) for name, value in before.items() if "layers.0" in name)


def validation_losses(results: list[dict]) -> list[float]:
    return [each["validation_loss"] for each in results[-1]["records"] if "validation_loss" in each]


def test_what_is_refused(tmp_path):
    """Each in one sentence, on every rank."""
    train_watched(2, f"{CASES['flush']} --save {tmp_path} --exit-interval 4")
    freezes = "--freeze-training --freeze-interval 2"
    assert re.search(
        r"--load .*: 2 layers of the checkpoint are frozen, .*; add --freeze-training, or to train all --no-load-optim",
        refusal(f"--load {tmp_path}"),
    )
    assert re.search(
        r"were frozen by --freeze-rule gradients, and this run has schedule; use the same, or --finetune",
        refusal(f"{freezes} --freeze-schedule 1,2 --load {tmp_path}"),
    )
    for damage in (
        lambda changes: changes.pop("wanted"),
        lambda changes: changes["wanted"].update(num_frozen=4),
        lambda changes: changes["wanted"].update(layers_of_rank=[2, 1]),
        lambda changes: changes["freezing"].pop("rule_state"),
        lambda changes: changes["freezing"]["norms"].update(sums=[1.0]),
    ):
        damaged = tmp_path / "damaged"
        shutil.copytree(tmp_path / "iter_0000004", damaged / "iter_0000004")
        shutil.copy(tmp_path / "latest_checkpointed_iteration.txt", damaged)
        _change_record(damaged / "iter_0000004", damage)
        found = refusal(f"{freezes} --load {damaged}")
        assert re.search(
            r"--load .*: the checkpoint's record of frozen layers is damaged \(.*\); choose another", found
        )
        shutil.rmtree(damaged)


def refusal(flags: str) -> str:
    flags = (
        f"--untie-embeddings-and-output-weights --train-iters 7 {flags} {data_flags()} --pipeline-model-parallel-size 2"
    )
    first, *others = workers.run(2, "tests.trainer.changes.freezing_cases:refused", flags=flags)
    assert others == [first] and first is not None and "\n" not in first
    return first


def _change_record(folder: Path, change: Callable[[dict], object]) -> None:
    """Without checksums, which would tell."""
    common = torch.load(folder / "common.pt", weights_only=False)
    change(common["changes"])
    del common[CHECKSUMS_ENTRY]
    torch.save(common, folder / "common.pt")
    (folder / MANIFEST).unlink()
