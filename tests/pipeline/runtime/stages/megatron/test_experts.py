"""Mixtures of experts train as in one process: choices and auxiliary losses of routers do not depend on a schedule."""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from tests import workers
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases
from tests.pipeline.runtime.stages.megatron.megatron_model import Case
from tests.pipeline.runtime.stages.megatron.test_provisional import check_predictions
from tests.pipeline.runtime.stages.megatron.test_update import CLOSE, EXACT, FP16, SPREAD, Outcomes, Row, check, marked

EXPERTS = {"experts": 4, "swiglu": True, "layers": 4}
FLUSH = EXPERTS | {"schedule": "flush", "batches": (4,) * 4}
TWO_BW = EXPERTS | {"schedule": "2bw", "batches": (4,) * 5}
CAPACITY = (("moe_expert_capacity_factor", 1.0), ("moe_pad_expert_input_to_capacity", True))
TWO, FOUR = (2, 1, 1), (4, 1, 1)
BIASED = {
    "router": (
        ("moe_router_score_function", "sigmoid"), ("moe_router_enable_expert_bias", True),
        ("moe_router_bias_update_rate", 0.05),
    )
}  # fmt: skip
RANDOM = {"router": (("moe_router_force_load_balancing", True),)}
OVER_BATCHES = {"balancing": "global_aux_loss"}

TABLE = {
    "flush": Row(FLUSH, layouts=((1, 1, 1), FOUR)),
    "2bw": Row(TWO_BW | {"batches": (4, 4, 5, 6, 8)}, layouts=((1, 1, 1), FOUR)),  # whose factors differ
    "2bw, recompute instructions": Row(TWO_BW | {"recompute": True, "dropout": 0.1}, layouts=(TWO,)),
    "2bw, full recompute": Row(TWO_BW | {"recompute_granularity": "full", "dropout": 0.1}, layouts=(TWO,)),
    "2bw, balanced": Row(TWO_BW | {"balance": True, "router": CAPACITY}, layouts=(FOUR,)),
    "2bw, distributed optimizer": Row(TWO_BW | {"distributed_optimizer": True}, layouts=((2, 1, 2),), allowed=CLOSE),
    "2bw, sequence parallel": Row(TWO_BW | {"sequence_parallel": True}, layouts=((2, 2, 1),), allowed=SPREAD),
    "2bw, fp16, two overflows": Row(
        FP16 | EXPERTS | {"batches": (2,) * 8, "overflow_batches": (2, 3), "layers": 2}, layouts=(TWO,)
    ),
    "2bw, over sequences": Row(TWO_BW | {"balancing": "seq_aux_loss"}, layouts=(TWO,)),
    "2bw, biases": Row(TWO_BW | BIASED | {"batches": (4, 4, 5, 6, 8)}, layouts=((1, 1, 1), TWO)),
    "2bw, biases, recompute instructions": Row(TWO_BW | BIASED | {"recompute": True}, layouts=(TWO,)),
    "2bw, biases, full recompute, drained": Row(
        TWO_BW | BIASED | {"recompute_granularity": "full", "drains": (0, 3)}, layouts=(TWO,)
    ),
    "2bw, biases, data parallel": Row(TWO_BW | BIASED, layouts=((2, 1, 2),), allowed=CLOSE),
    "2bw, biases, fp16, two overflows": Row(
        FP16 | EXPERTS | BIASED | {"batches": (2,) * 8, "overflow_batches": (2, 3), "layers": 2}, layouts=(TWO,)
    ),
    "zb-h1, biases": Row(FLUSH | BIASED | {"schedule": "zb-h1"}, layouts=(TWO,)),
    "interleaved, biases": Row(FLUSH | BIASED | {"schedule": "interleaved", "v": 2, "drains": (1,)}, layouts=(TWO,)),
    "2bw, over batches": Row(TWO_BW | OVER_BATCHES, layouts=((1, 1, 1), TWO)),
    "flush, over batches, data parallel": Row(FLUSH | OVER_BATCHES, layouts=((2, 1, 2),), allowed=CLOSE),
    "2bw, over batches, full recompute": Row(
        TWO_BW | OVER_BATCHES | {"recompute_granularity": "full"}, layouts=(TWO,)
    ),
    "2bw, random choices, recompute instructions": Row(TWO_BW | RANDOM | {"recompute": True}, layouts=((1, 1, 1), TWO)),
    "gpipe, sinkhorn": Row(FLUSH | {"schedule": "gpipe", "balancing": "sinkhorn"}, layouts=(TWO,), allowed=CLOSE),
    "zb-h1": Row(FLUSH | {"schedule": "zb-h1"}, layouts=(FOUR,)),
    "zbv": Row(FLUSH | {"schedule": "zbv", "v": 2, "drains": (1,)}, layouts=(TWO,)),
    "pipedream": Row(EXPERTS | {"schedule": "pipedream", "batches": (1,) * 10}, layouts=(FOUR,)),
    "flush, dropped tokens": Row(
        FLUSH | {"router": CAPACITY}, layouts=(TWO,)
    ),
    "flush, a shared expert, groups, all-to-all": Row(
        FLUSH
        | {
            "router": (
                ("moe_shared_expert_intermediate_size", 32), ("moe_router_num_groups", 2), ("moe_router_group_topk", 1),
                ("moe_token_dispatcher_type", "alltoall"), ("moe_router_pre_softmax", True),
                ("moe_router_topk_scaling_factor", 2.0),
            )
        },
        layouts=(TWO,),
    ),
}  # fmt: skip
FULL = {"gpipe, sinkhorn", "pipedream", "2bw, over sequences", "flush, dropped tokens", "2bw, full recompute",
        "2bw, biases, data parallel", "flush, over batches, data parallel"}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes():
    return Outcomes(TABLE)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "layout"), marked(TABLE, full=FULL), ids=str)
def test_training_equals_one_process(outcomes, name, layout):
    """Losses, norms and weights are those of a plain loop that scales the routers' losses anew before each backward."""
    check(outcomes[name, layout], TABLE[name].allowed)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("uniform", "router"),
    [
        pytest.param(True, {}, marks=pytest.mark.full),
        pytest.param(False, {}, marks=pytest.mark.full),
        (True, BIASED),
        (True, OVER_BATCHES),
    ],
)
def test_predictions_equal_one_process(uniform, router):
    """Provisional weights of routers and experts are those of the plain loop."""
    options = {"provisional_microbatches": 1, "clip": 0.5} if uniform else {}
    case = Case(**TWO_BW | {"predict": True, **options, **router}, p=2)
    check_predictions(case, EXACT)


@pytest.mark.full
def test_without_the_losses_the_numbers_are_others():
    """So the table above would miss them."""
    with_them, without = Case(**FLUSH), Case(**FLUSH | {"balancing": "none"})
    found = [workers.run(1, f"{cases.__name__}:train", timeout=200, **vars(each))[0] for each in (with_them, without)]
    assert found[0]["batches"][0]["loss"] == found[1]["batches"][0]["loss"]
    assert found[0]["batches"][0]["norm"] != found[1]["batches"][0]["norm"]
