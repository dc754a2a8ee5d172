"""Ranks share out the experts of a layer, and train as one process that has all of them."""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from tests.pipeline.runtime.stages.megatron.megatron_cases import Deviation
from tests.pipeline.runtime.stages.megatron.megatron_model import Case
from tests.pipeline.runtime.stages.megatron.test_experts import BIASED, CAPACITY, EXPERTS, FLUSH, OVER_BATCHES, TWO_BW
from tests.pipeline.runtime.stages.megatron.test_provisional import check_predictions
from tests.pipeline.runtime.stages.megatron.test_update import FP16, Outcomes, Row, check, marked

ALL_TO_ALL = ("moe_token_dispatcher_type", "alltoall")
SHARED = {"e": 2, "clip": 0.5}  # clipping, so that each weight depends on the norm of all gradients
SEQUENCES = {"cp": 2, "token_form": True, "lr": 1e-3}
TWICE, FOUR, ALONE = (2, 1, 2), (1, 1, 4), (1, 1, 2)
NEAR = Deviation(loss=1e-7, norm=1e-6, newest=2e-6, older=2e-6)
"""Replicas add up in another order."""
ONE_MICROBATCH = Deviation(loss=1e-7, norm=1e-6, newest=1e-5, older=2e-6)
"""Found: 4.4e-6 of a weight, whose gradient of one microbatch is small. A lost update is a thousand times as much."""
WIDE = Deviation(loss=2e-7, norm=5e-6, newest=2e-5, older=2e-5)
"""Tensor ranks split every product."""
IN_FP16 = Deviation(loss=5e-5, norm=5e-4, newest=2e-3, older=2e-3)
"""Found: 8e-6, 1.1e-4, 5.5e-4. A lost update, of which there are six, is 9e-3 of a weight."""
IN_BF16 = Deviation(loss=3e-4, norm=3e-3, newest=8e-3, older=8e-3)
"""Found: 4.5e-5, 1.0e-3, 7.8e-3, which is the last bit of a weight above 1. A lost update is 1.2e-2."""

TABLE = {
    "flush": Row(FLUSH | SHARED, layouts=(TWICE,), allowed=NEAR),
    "2bw, distributed optimizer": Row(
        TWO_BW | SHARED | {"router": (ALL_TO_ALL,), "distributed_optimizer": True}, layouts=(TWICE, FOUR),
        allowed=NEAR,
    ),
    "flush, two copies of each expert": Row(FLUSH | SHARED, layouts=(FOUR,), allowed=NEAR),
    "flush, tensor ranks": Row(
        FLUSH | SHARED | {"router": (ALL_TO_ALL,), "sequence_parallel": True}, layouts=((1, 2, 2),), allowed=WIDE
    ),
    "2bw, tensor ranks, allgather, distributed optimizer": Row(
        TWO_BW | SHARED | {"sequence_parallel": True, "distributed_optimizer": True}, layouts=((1, 2, 2),), allowed=WIDE
    ),
    "2bw, tensor ranks share out whole experts": Row(
        TWO_BW | SHARED | {"router": (ALL_TO_ALL,), "sequence_parallel": True, "cut_experts": False},
        layouts=((1, 2, 1), (1, 2, 2)), allowed=WIDE,
    ),
    "flush, whole experts, allgather, distributed optimizer": Row(
        FLUSH | SHARED | {"e": 4, "sequence_parallel": True, "cut_experts": False, "distributed_optimizer": True},
        layouts=((1, 2, 2), (1, 2, 4)), allowed=WIDE,
    ),
    "2bw, ranks share sequences and experts": Row(
        TWO_BW | SHARED | {"router": (ALL_TO_ALL,)} | SEQUENCES,
        layouts=((1, 1, 1), (1, 1, 2), (2, 1, 1)), allowed=NEAR,
    ),
    "flush, sequences and experts, distributed optimizer": Row(
        FLUSH | SHARED | {"distributed_optimizer": True} | SEQUENCES, layouts=((1, 1, 2),), allowed=NEAR,
    ),
    "pipedream": Row(
        FLUSH | SHARED | {"schedule": "pipedream", "batches": (2,) * 4, "clip": 0.0, "router": (ALL_TO_ALL,)},
        layouts=(TWICE,), allowed=ONE_MICROBATCH,
    ),
    "zb-h1": Row(FLUSH | SHARED | {"schedule": "zb-h1"}, layouts=(TWICE,), allowed=NEAR),
    "zbv": Row(FLUSH | SHARED | {"schedule": "zbv", "v": 2, "router": (ALL_TO_ALL,)}, layouts=(TWICE,), allowed=NEAR),
    "2bw, recompute instructions": Row(TWO_BW | SHARED | {"recompute": True}, layouts=(TWICE,), allowed=NEAR),
    "2bw, full recompute": Row(
        TWO_BW | SHARED | {"recompute_granularity": "full", "router": (ALL_TO_ALL,)}, layouts=(TWICE,), allowed=NEAR),
    "2bw, one gradient buffer": Row(TWO_BW | {"e": 2, "single_gradient_buffer": True}, layouts=(ALONE,), allowed=NEAR),
    "2bw, over batches": Row(
        TWO_BW | SHARED | OVER_BATCHES | {"batches": (8,) * 4, "router": (ALL_TO_ALL,)}, layouts=(TWICE,),
        allowed=NEAR,
    ),
    "2bw, balanced": Row(
        TWO_BW | SHARED | {"balance": True, "batches": (8,) * 4, "router": (*CAPACITY, ALL_TO_ALL)},
        layouts=((4, 1, 2),), allowed=NEAR,
    ),
    "2bw, bf16": Row(
        TWO_BW | SHARED | {"dtype": "bfloat16", "router": (("moe_router_dtype", "fp32"), ALL_TO_ALL)},
        layouts=(TWICE,), allowed=IN_BF16,
    ),
    "2bw, fp16, two overflows": Row(
        FP16 | EXPERTS | {"e": 2, "batches": (2,) * 8, "overflow_batches": (2, 3), "layers": 2},
        layouts=(ALONE,), allowed=IN_FP16,
    ),
}  # fmt: skip
PREDICTED = TWO_BW | {"predict": True}
READ = PREDICTED | SHARED | {"reduce_partial": True}
PREDICTIONS = {
    "reduced, distributed optimizer": (READ | {"distributed_optimizer": True, "router": (ALL_TO_ALL,)}, TWICE, NEAR),
    "reduced, two copies, distributed optimizer": (READ | {"distributed_optimizer": True}, FOUR, NEAR),
    "apart": (PREDICTED | SHARED | BIASED, TWICE, NEAR),
    "apart, uniform": (PREDICTED | SHARED | {"provisional_microbatches": 1}, TWICE, NEAR),
    "SGD, which sees how large a gradient is": (
        PREDICTED | SHARED | {"optimizer": "sgd", "lr": 0.05, "distributed_optimizer": False}, TWICE, NEAR),
    "tensor ranks share out whole experts": (
        READ | {"router": (ALL_TO_ALL,), "sequence_parallel": True, "cut_experts": False}, (1, 2, 2), WIDE),
    "error feedback": (
        PREDICTED | SHARED | {"provisional_microbatches": 0, "distributed_optimizer": True}, TWICE, NEAR),
    "fp16, two overflows": (
        FP16 | EXPERTS | {"e": 2, "predict": True, "batches": (2,) * 8, "overflow_batches": (2, 3), "layers": 2},
        ALONE, IN_FP16),
}  # fmt: skip

USUAL = {"reduced, distributed optimizer"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.full) for name in PREDICTIONS]
)
def test_predictions_equal_one_process(name):
    """Provisional weights of experts whose gradients are of the microbatches of several replicas."""
    options, (p, t, d), allowed = PREDICTIONS[name]
    check_predictions(Case(**options, p=p, t=t, d=d), allowed)


FULL = TABLE.keys() - {"2bw, distributed optimizer", "flush, tensor ranks"}


@pytest.fixture(scope="module")
def outcomes():
    return Outcomes(TABLE)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "layout"), marked(TABLE, full=FULL), ids=str)
def test_training_equals_one_process(outcomes, name, layout):
    """Losses, norms and weights are those of a plain loop on one rank, which has all experts."""
    check(outcomes[name, layout], TABLE[name].allowed)
