"""A job of megatron.core's stages goes on without ranks that it has lost: the others compute the same batches.

The references are plain torch in one process. Gradients of replicas, or copies, add up in another order: last bits.
"""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from tests import workers
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases
from tests.pipeline.runtime.stages.megatron.test_update import CLOSE, FP16, SPREAD

_PLACE = "tests.pipeline.runtime.stages.megatron."
OF_TWO = {"p": 2, "d": 2, "batches": (4,) * 5, "layers": 2}
OF_THREE = {"p": 2, "d": 3, "batches": (6,) * 4, "layers": 2}
LAST = ((1, 1),)  # the last stage of replica 1; its peer takes all
SHARED = ((2, 1),)  # of three replicas: its microbatches are shared by two peers

ROWS = {
    "flush, clipped, dropout": (LAST, 2, {**OF_TWO, "clip": 0.5, "dropout": 0.1}, CLOSE),
    "flush, all ranks, tied shards": (
        (),
        0,
        {**OF_TWO, "distributed_optimizer": True, "tied": True, "clip": 0.5},
        CLOSE,
    ),
    "2bw, SGD": (LAST, 2, {**OF_TWO, "schedule": "2bw", "optimizer": "sgd"}, CLOSE),
    "2bw, FP16": (LAST, 2, {**OF_TWO, **FP16, "batches": (4,) * 6, "overflow_batches": (3,)}, None),
    "flush, per token": (LAST, 1, {**OF_TWO, "per_token": True, "masked": True, "clip": 0.01}, CLOSE),
    "flush, shared, both stages": (((2, 1), (0, 0)), 1, {**OF_THREE, "clip": 0.5}, CLOSE),
}
MORE = {
    "2bw, all ranks, from the start": ((), 0, {**OF_TWO, "schedule": "2bw", "clip": 0.5}, CLOSE),
    "2bw, shared, tied": (SHARED, 1, {**OF_THREE, "schedule": "2bw", "tied": True, "clip": 0.5}, CLOSE),
    "tensor ranks": (LAST, 1, {**OF_TWO, "t": 2, "schedule": "2bw", "tied": True, "clip": 0.5}, SPREAD),
    "experts": (LAST, 1, {**OF_TWO, "experts": 4, "batches": (4,) * 4}, CLOSE),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "row", [*ROWS.values(), *(pytest.param(each, marks=pytest.mark.full) for each in MORE.values())], ids=[*ROWS, *MORE]
)
def test_a_job_without_a_rank_is_one_process(row):
    """Losses, norms and weights of all batches, before the ranks are lost and behind; replicas stay equal."""
    lost, border, options, allowed = row
    case = cases.Case(**options)
    [expected] = workers.run(1, f"{_PLACE}megatron_reference:reference", **options)
    found = workers.run(case.num_ranks, f"{_PLACE}copies_cases:go_on", lost=lost, border=border, timeout=90, **options)
    left = [each for each in found if each is not None]
    assert len(left) == case.num_ranks - len(lost) * case.t
    deviation = cases.deviation(case, expected, left)
    allowed = allowed or cases.Deviation(loss=1e-3, norm=5e-3, newest=5e-3, older=5e-3)
    for name in vars(allowed):
        assert getattr(deviation, name) <= getattr(allowed, name), deviation
    assert all(each["evaluation"] == left[0]["evaluation"] for each in left)
    held: dict[str, torch.Tensor] = {}
    for name, tensor in (pair for each in left for pair in each["newest"].items()):
        assert torch.equal(held.setdefault(name, tensor), tensor), f"copies of {name} differ"


@pytest.mark.full
def test_an_evaluation_of_copies_is_that_of_all_replicas():
    """Four microbatches of each replica's data, at weights that differ in last bits."""
    options = {**OF_TWO, "batches": (4, 4)}
    whole = workers.run(4, f"{_PLACE}copies_cases:evaluated", **options)[0]
    left = workers.run(4, f"{_PLACE}copies_cases:go_on", lost=LAST, border=1, timeout=90, **options)[0]["evaluation"]
    assert left["lm loss"] == pytest.approx(whole["lm loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("lost", "options", "message"),
    [
        (
            ((1, 1), (0, 0)),
            {"distributed_optimizer": True},
            "the distributed optimizer, of which each replica has a shard",
        ),
        ((), {"experts": 4, "balancing": "global_aux_loss"}, "global_aux_loss, which counts all replicas"),
    ],
)
def test_what_replicas_exchange_beside_gradients_is_refused(lost, options, message):
    found = workers.run(4, f"{_PLACE}copies_cases:refusal", lost=lost, **OF_TWO, **options)
    said = [each for each in found if each is not None]
    assert len(said) == 4 - len(lost)
    assert all(message in each and "run copies without it" in each for each in said)
