"""The wide grid of `test_update`: every option with every schedule and layout that it goes with."""

import pytest

torch = pytest.importorskip("torch")

from tests.pipeline.runtime.stages.megatron.test_update import (
    CLOSE,
    EIGHT,
    EXACT,
    FP16,
    P124,
    SPREAD,
    Outcomes,
    Row,
    check,
    layouts_of,
)

pytestmark = pytest.mark.full

MODERN = {"swiglu": True, "normalization": "RMSNorm", "position": "rope", "token_form": True}
REPLICAS = ((1, 1, 2), (2, 1, 2))
TENSORS = ((1, 2, 1), (2, 2, 1))


def grid() -> dict[str, Row]:
    table = {}
    for schedule in ("gpipe", "flush", "zb-h1", "2bw"):
        base = {"schedule": schedule, "batches": EIGHT}
        # gpipe runs backwards in ascending order too, so it adds up gradients as the others do.
        table |= {
            f"{schedule} plain, decayed": Row(base | {"weight_decay": 0.3}, P124, EXACT),
            f"{schedule} clipped": Row(base | {"clip": 0.3}, P124, CLOSE),
            f"{schedule} tied": Row(base | {"tied": True}, P124, CLOSE),
            f"{schedule} modern": Row(base | MODERN, P124, EXACT),
            f"{schedule} modern tied": Row(base | MODERN | {"tied": True, "clip": 0.3}, TENSORS, SPREAD),
            f"{schedule} sgd": Row(base | {"optimizer": "sgd", "lr": 0.1}, P124, EXACT),
            f"{schedule} dropout": Row(base | {"dropout": 0.2}, P124, EXACT),
            f"{schedule} dropout, replicas": Row(base | {"dropout": 0.2, "tied": True}, REPLICAS, CLOSE),
            f"{schedule} replicas": Row(base | {"clip": 0.3}, REPLICAS, CLOSE),
            f"{schedule} distributed optimizer": Row(base | {"distributed_optimizer": True}, REPLICAS, CLOSE),
            f"{schedule} tensors": Row(base | {"tied": True}, TENSORS, SPREAD),
            f"{schedule} sequence": Row(base | {"sequence_parallel": True, "clip": 0.3}, TENSORS, SPREAD),
            f"{schedule} bf16": Row(base | {"dtype": "bfloat16"}, P124, EXACT),
            f"{schedule} drained": Row(base | {"drains": (0, 1, 5), "warmup": 30}, P124, EXACT),
            f"{schedule} long batches": Row(base | {"batches": (8,) * 6}, ((2, 1, 1), (4, 1, 1)), EXACT),
            f"{schedule} ramp-up": Row(base | {"batches": (4, 4, 5, 6, 7, 8)}, P124, EXACT),
            f"{schedule} fp16": Row(FP16 | {"schedule": schedule, "batches": (4,) * 8}, ((1, 1, 1), (2, 1, 1)), EXACT),
        }
        for overflows in ((0,), (1, 2), (3, 4, 5), (7,)):
            options = FP16 | {"schedule": schedule, "batches": (2,) * 8, "overflow_batches": overflows, "drains": (3,)}
            table[f"{schedule} fp16, overflows {overflows}"] = Row(options, ((1, 1, 1), (2, 1, 1)), EXACT)
        for recompute in (
            {"recompute": True},
            {"recompute_granularity": "full"},
            {"recompute_granularity": "selective"},
            {"recompute": True, "recompute_granularity": "selective"},
        ):
            table[f"{schedule} {recompute}"] = Row(base | recompute | {"dropout": 0.1}, P124, EXACT)
    table |= {
        "2bw bf16 distributed": Row(
            {"schedule": "2bw", "batches": EIGHT, "dtype": "bfloat16", "distributed_optimizer": True}, ((2, 1, 1),)
        ),
        "2bw fp16 distributed, overflow": Row(
            FP16 | {"batches": (4,) * 8, "overflow_batches": (2,), "distributed_optimizer": True, "clip": 0.0},
            ((1, 1, 2), (2, 1, 2)),
            CLOSE,
        ),
        "2bw extra warm-up": Row(
            {"schedule": "2bw", "batches": (7,) * 6, "extra_warmup": True}, ((2, 1, 1), (4, 1, 1))
        ),
        "2bw one buffer, tied": Row(
            {"schedule": "2bw", "batches": EIGHT, "clip": 0.3, "single_gradient_buffer": True, "tied": True},
            P124,
            CLOSE,
        ),
        "2bw constant scale": Row(
            FP16 | {"batches": (2,) * 8, "loss_scale": 256.0, "overflow_batches": (4,)}, ((2, 1, 1),)
        ),
        "2bw fp16, four stages": Row(
            FP16 | {"layers": 4, "batches": (4,) * 8, "overflow_batches": (2, 3)}, ((4, 1, 1),)
        ),
        "flush fp16, four stages": Row(
            FP16 | {"schedule": "flush", "layers": 4, "batches": (4,) * 8, "overflow_batches": (2, 3)}, ((4, 1, 1),)
        ),
        "2bw hysteresis": Row(FP16 | {"batches": (2,) * 8, "overflow_batches": (1, 2, 4)}, ((1, 1, 1), (2, 1, 1))),
        "pipedream replicas": Row({"schedule": "pipedream", "batches": (2,) * 12}, ((2, 1, 2),), CLOSE),
        "pipedream dropout": Row({"schedule": "pipedream", "batches": (1,) * 12, "dropout": 0.1}, P124),
        "pipedream distributed optimizer": Row(
            {"schedule": "pipedream", "batches": (2,) * 12, "distributed_optimizer": True}, ((2, 1, 2),), CLOSE
        ),
        "pipedream bf16": Row({"schedule": "pipedream", "batches": (1,) * 12, "dtype": "bfloat16"}, P124),
        "pipedream sequence": Row(
            {"schedule": "pipedream", "batches": (1,) * 12, "sequence_parallel": True}, ((2, 2, 1),), SPREAD
        ),
        "interleaved tied, clipped, dropout": Row(
            {"schedule": "interleaved", "v": 2, "tied": True, "clip": 0.5, "dropout": 0.1},
            layouts=((2, 1, 1),),
            allowed=CLOSE,
        ),
        "interleaved recompute instructions": Row(
            {"schedule": "interleaved", "v": 2, "recompute": True, "dropout": 0.1, "dtype": "bfloat16"},
            layouts=((2, 1, 1),),
        ),
        "2bw single gradient buffer": Row(
            {"schedule": "2bw", "batches": EIGHT, "clip": 0.5, "single_gradient_buffer": True, "drains": (4,)},
            layouts=((2, 1, 1),),
        ),
        "pipedream, uneven": Row(
            {"schedule": "pipedream", "batches": (1,) * 16, "layers": 4, "first_layers": 3}, layouts=((2, 1, 1),)
        ),
        "2bw clipped, warm-up, ramp-up": Row(
            {"schedule": "2bw", "batches": (4, 4, 5, 5, 6, 6, 8, 8), "clip": 0.5, "warmup": 24, "weight_decay": 0.1},
            P124,
        ),
    }
    return table


GRID = grid()


@pytest.fixture(scope="module")
def outcomes():
    return Outcomes(GRID)


@pytest.mark.parametrize(("name", "layout"), layouts_of(GRID), ids=str)
def test_training_equals_one_process(outcomes, name, layout):
    """Every layout of every case of the grid reproduces the single process within what its row allows."""
    check(outcomes[name, layout], GRID[name].allowed)
