"""A pipeline that shrinks while it trains, against one that stays as it is; no sample is lost over its changes."""

import functools
import gc
import re
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from megatron.trainer.changes import change
from tests import workers
from tests.trainer.run.run_case import BASE, joined_weights, train
from tests.trainer.run.vision_helper import NUM_TRAINING, train_vision

ELASTIC = (
    f"{BASE} --global-batch-size 8 --num-layers 4 --train-iters 8 --untie-embeddings-and-output-weights "
    "--freeze-training --freeze-interval 2 --freeze-schedule 1,2,3 --hidden-dropout 0.1 --attention-dropout 0.1 "
    "--lr 1e-3"
)
SHRINKS = "--elastic-pipeline --elastic-schedule 4,2,1"
FP16 = "--fp16 --initial-loss-scale 16384"


def changes(results: list[dict]) -> list[tuple[int, int, int]]:
    """(frozen layers, ranks of the pipeline, replicas) behind each change."""
    records = [each for each in results[-1]["records"] if "frozen_layers" in each]
    return [(each["frozen_layers"], each["pipeline_ranks"], each["replicas"]) for each in records]


@functools.cache
def shrunk(flags: str = "") -> list[dict]:
    """Of a run that logs what saved activations took, which changes no number."""
    return train(4, f"{ELASTIC} {SHRINKS} --log-saved-activations --log-interval 3 {flags}")


def batches(results: list[dict]) -> list[dict]:
    return [each for each in results[-1]["records"] if "lm_loss" in each]


def nearly_equal(one: list[dict], other: list[dict], *, norm: float = 1e-6, weight: float = 1e-6) -> None:
    """But for the order in which replicas and microbatches are added up.

    Where FP32 sums them up, last bits of a few elements differ: norms by 8e-8, losses by 4e-8, weights by 2e-7 were
    measured. Gradients of BF16 have so few bits that their sums are exact more often than not: norms differed by 1e-9,
    losses and weights by nothing.
    """
    for mine, theirs in zip(batches(one), batches(other), strict=True):
        assert theirs["consumed_samples"] == mine["consumed_samples"]
        assert theirs["learning_rate"] == mine["learning_rate"]
        assert theirs["lm_loss"] == pytest.approx(mine["lm_loss"], rel=1e-5)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=norm)
    before, after = joined_weights(one), joined_weights(other)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert (value - after[name]).abs().max() <= weight, name


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "bounds"),
    [
        ("", {}),
        ("--pipeline-schedule 2bw --use-distributed-optimizer", {}),
        ("--bf16 --use-distributed-optimizer", {}),
        ("--pipeline-schedule 2bw --bf16", {}),
        (f"{FP16} --accumulate-allreduce-grads-in-fp32", {"weight": 5e-5}),
        (f"{FP16} --pipeline-schedule 2bw", {"norm": 2e-4, "weight": 2e-3}),
        ("--pipeline-schedule gpipe --optimizer sgd", {}),
        ("--pipeline-schedule bpipe --recompute-granularity full --recompute-method uniform "
                     "--recompute-num-layers 1", {}),
    ],
)  # fmt: skip
def test_equals_a_pipeline_that_stays(flags, bounds):
    """Replicas add up in another order; nothing else differs.

    Under FP16 each replica divides its losses by its own number of microbatches, here by 8, 4 and 2. So its gradients
    are up to four times as large in FP16, and near that format's limit a scale may overflow in the one run and not in
    the other: the scale is far from that. At the other end, the smallest gradients lose bits in the one and not in the
    other, which Adam makes steps of (weights: 1.2e-5 measured). Sums in FP16 itself have 11 bits, 4.9e-4 (norms: 4e-5,
    weights: half of a step of 1e-3).
    """
    stays, shrinks = train(4, f"{ELASTIC} {flags}"), shrunk(flags)
    assert changes(stays) == [(1, 4, 1), (2, 4, 1), (3, 4, 1)]
    assert changes(shrinks) == [(1, 4, 1), (2, 2, 2), (3, 1, 4)] and len(batches(shrinks)) == 8
    nearly_equal(stays, shrinks, **bounds)


@pytest.mark.full
@pytest.mark.parametrize("flags", ["", "--pipeline-schedule 2bw --bf16"])
def test_equals_a_pipeline_that_is_cut_otherwise(flags):
    """Bit for bit at equal ranks, replicas and microbatches, and without clipping. Squares of norms are added up in
    another order."""
    flags = f"{ELASTIC} {flags} --num-layers 8 --freeze-schedule 2,4,6 --clip-grad 0"
    stays, cut = train(2, flags), train(2, f"{flags} --elastic-pipeline --elastic-schedule 2,2,2")
    assert changes(stays) == changes(cut) == [(2, 2, 1), (4, 2, 1), (6, 2, 1)]
    assert {(4, 4)} == set(cuts(stays)) != set(cuts(cut))
    for one, other in zip(batches(stays), batches(cut), strict=True):
        assert other["lm_loss"] == one["lm_loss"] and other["learning_rate"] == one["learning_rate"]
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-14)
    weights = joined_weights(stays)
    assert all(torch.equal(value, weights[name]) for name, value in joined_weights(cut).items())


def cuts(results: list[dict]) -> list[tuple[int, ...]]:
    """How many layers each rank of a pipeline has, behind each change."""
    told = [re.search(r"layers by rank: (.*?) \|", line) for line in results[-1]["lines"] if "pipeline changed" in line]
    return [tuple(sum(map(int, re.findall(r"\d+", rank))) for rank in each[1].split(",")) for each in told]


@pytest.mark.full
@pytest.mark.parametrize("flags", ["", "--sequence-parallel --use-distributed-optimizer --bf16"])
def test_with_tensor_ranks(flags):
    """Two of them in each of two pipeline ranks, which become replicas of one."""
    flags = f"{ELASTIC} {flags} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    stays, shrinks = train(4, flags), train(4, f"{flags} --elastic-pipeline --elastic-schedule 2,1")
    assert changes(shrinks) == [(1, 2, 1), (2, 1, 2), (3, 1, 2)]
    nearly_equal(stays, shrinks)


@pytest.mark.sample(1)
@pytest.mark.parametrize("stops", [(4, 8), (3, 4, 7, 8)])
def test_a_stop_between_changes_goes_on_as_if_there_was_none(stops, tmp_path):
    """Also where it stops right behind a decision, before the change."""
    whole = shrunk()
    parts, save = [], f"--save {tmp_path} --load {tmp_path} --save-interval 100"
    for last in stops:
        parts += batches(train(4, f"{ELASTIC} {SHRINKS} {save} --exit-interval {last}"))
    assert numbers(parts) == numbers(batches(whole))


@pytest.mark.full
def test_the_microbatch_grows():
    """Without dropout, which is drawn by microbatch."""
    flags = ELASTIC.replace("0.1", "0")
    sizes = "--elastic-micro-batch-size 1,2,2"
    nearly_equal(train(4, flags), train(4, f"{flags} {SHRINKS} {sizes}"))


@pytest.mark.full
def test_the_batch_grows_with_the_replicas(tmp_path):
    """As in a pipeline that stays, and is told these batches; and over stops, one right behind a decision."""
    flags = re.sub(r"--train-iters \d+", "", ELASTIC)
    flags += " --train-samples 128 --lr-decay-style linear --lr-warmup-samples 16"
    grows = f"{flags} {SHRINKS} --elastic-batch grow"
    whole = train(4, grows)
    assert [each["consumed_samples"] for each in batches(whole)] == [8, 16, 24, 32, 48, 64, 96, 128]
    nearly_equal(train(4, f"{flags} --global-batch-size 32 --step-batch-size-schedule 0:8 512:16 1024:32"), whole)
    parts, save = [], f"--save {tmp_path} --load {tmp_path} --save-interval 100"
    for last in (4, 5, 100):
        parts += batches(train(4, f"{grows} {save} --exit-interval {last}"))
    assert numbers(parts) == numbers(batches(whole))


def numbers(batches: list[dict]) -> list[tuple]:
    return [(each["iteration"], each["lm_loss"], each["grad_norm"]) for each in batches]


def bit_equal(one: list[dict], other: list[dict]) -> bool:
    weights = joined_weights(one)
    same = all(torch.equal(value, weights[name]) for name, value in joined_weights(other).items())
    return same and numbers(batches(one)) == numbers(batches(other))


@functools.cache
def undisturbed(freezes: str, pipelines: str, flags: str = "") -> list[dict]:
    flags = f"{ELASTIC.replace('1,2,3', freezes)} {flags}"
    return train(4, f"{flags} --elastic-pipeline --elastic-schedule {pipelines}")


TWO_BW = "--pipeline-schedule 2bw --use-distributed-optimizer --bf16"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fault", "error", "flags"),
    [
        ("a_late_fault", "RuntimeError: no kernel", TWO_BW),
        ("no_files_for_groups", r"OSError: \[Errno 24\] Too many open files", ""),
        ("an_arrangement_that_cannot_be", "no such ranks", ""),
        ("one_state_that_cannot_be_held", "RuntimeError: no state", TWO_BW),
        ("no_state_that_can_be_held", "RuntimeError: no state", ""),
        ("a_model_that_cannot_be", "no such model", ""),
        ("no_memory_for_chunks", "OutOfMemoryError: tried to allocate 80 GiB", ""),
        ("no_memory_for_gradients", "OutOfMemoryError: 80 GiB", ""),
        ("no_files_for_the_chain", "RuntimeError: no sockets", ""),
        ("a_stage_that_cannot_be", "no such stage", ""),
        ("another_program", "2 different programs", ""),
        ("a_late_fault", "RuntimeError: no kernel", ""),
    ],
)
def test_after_a_fault_in_a_change_the_run_goes_on(fault, error, flags):
    """As it was, with a warning, and what is decided next comes about. Meanwhile gradients take no memory."""
    watch = f"tests.trainer.changes.elastic_faults:{fault}"
    found = train(4, f"{ELASTIC} {flags} --elastic-pipeline --elastic-schedule 2,2,1", watch=watch)
    warnings = [line for line in found[-1]["lines"] if line.startswith("warning: nothing changes")]
    assert len(warnings) == 1 and re.match(f"warning: nothing changes at iteration 2: {error}", warnings[0])
    assert bit_equal(found, undisturbed("0,2,3", "4,2,1", flags))
    if fault == "a_late_fault":
        assert all(before > 0 and meanwhile == 0 for each in found for before, meanwhile in each["watched"])


@pytest.mark.full
def test_after_a_rule_that_fails_the_run_goes_on():
    """On rank 0, which decides."""
    found = train(4, f"{ELASTIC} {SHRINKS}", watch="tests.trainer.changes.elastic_faults:a_rule_that_fails")
    said = "warning: nothing is decided at iteration 2: ZeroDivisionError: division by zero"
    assert any(said in line for line in found[-1]["lines"])
    assert bit_equal(found, undisturbed("0,1,2", "4,4,2"))


@pytest.mark.full
def test_evaluations_keep_their_batch():
    """A batch that grows does not let replicas take more than there is in an evaluation's."""
    flags = re.sub(r"--train-iters \d+", "", ELASTIC) + " --train-samples 64 --micro-batch-size 4 --eval-interval 4"
    with pytest.raises(workers.WorkerError, match=r"ask for 4 replicas that take 4 samples at a time"):
        train(4, f"{flags} --elastic-pipeline --elastic-schedule 1 --elastic-batch grow")
    found = train(4, f"{flags} --elastic-pipeline --elastic-batch grow --eval-iters 1")
    assert all(replicas <= 2 for _, _, replicas in changes(found))


@pytest.mark.full
def test_resumed_by_other_flags(tmp_path):
    """A checkpoint's arrangement that these flags do not allow gives way to theirs; what is frozen stays so."""
    save = f"--save {tmp_path} --load {tmp_path}"
    train(4, f"{ELASTIC} {SHRINKS} {save} --exit-interval 6")
    flags = f"{ELASTIC} --elastic-pipeline --elastic-schedule 4 --load {tmp_path} --global-batch-size 6 --train-iters 7"
    flags += " --override-opt_param-scheduler"
    found = train(4, flags)
    assert changes(found) == [] and len(batches(found)) == 1
    assert any("pipeline 4" in line for line in found[-1]["lines"])


@pytest.mark.parametrize("kept_out", [True, False])
def test_what_a_change_replaces_is_let_go(kept_out):
    """Though it refers to itself, and where a run that trains is kept out of collections, as the next state is then.
    Elsewhere what others keep out stays so."""

    class Replaced:
        def __init__(self):
            self.itself = self

    before = Replaced()
    gc.freeze()
    try:
        replaced = weakref.ref(Replaced())
        before = weakref.ref(before)
        change.collect(SimpleNamespace(is_kept_out_of_collections=kept_out))
        assert replaced() is None and (before() is None) == kept_out
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.full
@pytest.mark.parametrize(
    ("pipelines", "watch", "num_changes", "num_failed"),
    [("2,1,2,4", None, 37, 0), ("2,4", "tests.trainer.changes.elastic_faults:every_second_change", 13, 12)],
    ids=["all come about", "every second one fails"],
)
def test_many_changes_leave_nothing_behind(pipelines, watch, num_changes, num_failed):
    """To and fro between four ranks of a pipeline, two and one, with a frozen layer, then two and three; also where
    every second change fails at its end: neither files nor threads nor memory add up."""
    frozen = ",".join(["1"] * 12 + ["2"] * 12 + ["3"] * 14)
    flags = (
        f"{BASE} --global-batch-size 8 --num-layers 4 --train-iters 38 {TWO_BW} "
        "--untie-embeddings-and-output-weights --freeze-training "
        f"--freeze-interval 1 --freeze-schedule {frozen} --elastic-pipeline "
        f"--elastic-schedule {','.join([pipelines] * 20)}"
    )
    results = train(4, flags, look_after=(7 if watch else 5, 37), watch=watch, timeout=400)  # of four ranks either time
    assert len(changes(results)) == num_changes and changes(results)[-1][0] == 3
    assert sum(line.startswith("warning: nothing changes") for line in results[-1]["lines"]) == num_failed
    for each in results:
        early, late = each["resources"]
        assert late["files"] - early["files"] <= 10
        assert late["threads"] - early["threads"] <= 5
        assert late["bytes"] - early["bytes"] <= 40 * 2**20


@pytest.mark.full
@pytest.mark.parametrize(
    ("batch", "flags", "pipelines"),
    [
        (16, "", [[0, 2], [1, 3]]),
        (128, "", [[0, 1], [2, 3]]),
        (256, "--pipeline-schedule 2bw --use-distributed-optimizer", [[0, 1], [2, 3]]),
    ],
)  # fmt: skip
def test_on_two_hosts(batch, flags, pipelines, tmp_path):
    """Two pipelines of 4 ranks: with few microbatches gradients are more than what stages send, so replicas stay on a
    host; with many a pipeline does. Either way nothing else is another; and stopped and resumed.

    Under the distributed optimizer each rank has a part of the squares of the norm, and these are added up in the order
    of ranks."""
    flags = f"{ELASTIC} --elastic-pipeline --elastic-schedule 2 --global-batch-size {batch} --train-iters 5 {flags}"
    flags += " --micro-batch-size 4"
    expected, hosts = train(4, flags), {"watch": "tests.trainer.changes.elastic_hosts:two_hosts"}
    found = train(4, flags, **hosts)
    assert changes(found) == changes(expected) == [(1, 2, 2), (2, 2, 2)]
    assert sorted({tuple(each["watched"]) for each in found}) == [tuple(each) for each in pipelines]
    told = [line for line in found[-1]["lines"] if "pipeline changed" in line]
    assert all(("| the ranks of a pipeline in a row |" in line) == (batch > 16) for line in told)
    save = f"--save {tmp_path} --load {tmp_path} --save-interval 100"
    parts = [*batches(train(4, f"{flags} {save} --exit-interval 3", **hosts)), *batches(train(4, f"{flags} {save}"))]
    rounding = 1e-14 if "distributed" in flags else 0
    for others in (batches(found), parts):
        for one, other in zip(batches(expected), others, strict=True):
            assert (other["iteration"], other["lm_loss"]) == (one["iteration"], one["lm_loss"])
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=rounding, abs=0)
    weights = joined_weights(expected)
    assert all(torch.equal(value, weights[name]) for name, value in joined_weights(found).items())


BATCH = 8
FLAGS = (
    "--untie-embeddings-and-output-weights --freeze-training --freeze-interval 2 "
    "--freeze-schedule 1,2,3 --elastic-pipeline --elastic-schedule 4,2,1 --eval-interval 100"
)


def samples(results: list[dict]) -> list[tuple[int, int]]:
    return [each for result in results for each in result["watched"]]


@pytest.mark.full
@pytest.mark.parametrize(
    ("epochs", "flags", "stops"),
    [
        (4, "--epochs 4", (3, 4, 7)),
        (4, "--epochs 4 --activation-cache {folder} --activation-cache-use always", (3, 4, 7)),
        (8, f"--train-samples {8 * NUM_TRAINING} --elastic-batch grow", (3, 4, 7)),
    ],
)  # fmt: skip
def test_none_twice_and_none_lost(tmp_path, epochs, flags, stops):
    """Over three changes, and over runs each of which goes on from where the one before has stopped: right behind a
    decision, between two, and in the middle of an epoch. Each batch has the same samples, and so has each part of a
    batch that has grown."""
    flags = f"{FLAGS} {flags.format(folder=tmp_path / 'cache')}"
    watch = "tests.trainer.run.read_samples:sample_ids"
    whole = samples(train_vision(4, flags, watch=watch))
    parts, save = [], f"--save {tmp_path / 'checkpoints'} --load {tmp_path / 'checkpoints'} --save-interval 100"
    for last in (*stops, 100):
        parts += samples(train_vision(4, f"{flags} {save} --exit-interval {last}", watch=watch))
    assert Counter(whole) == Counter(parts)
    batches = epochs * NUM_TRAINING // BATCH
    assert Counter(batch for batch, _ in whole) == {number: BATCH for number in range(batches)}
    assert Counter(number for _, number in whole) == {number: epochs for number in range(NUM_TRAINING)}
