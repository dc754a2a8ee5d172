"""Multi-token prediction trains as in one process: its losses, and the embedding that two stages share."""

import itertools
from contextlib import nullcontext, suppress
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from megatron.pipeline.runtime.stages.megatron.data_and_dropout import SeededDropout
from tests import workers
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases
from tests.pipeline.runtime.stages.megatron.engine_cases import TWO as MICROBATCHES
from tests.pipeline.runtime.stages.megatron.engine_cases import begun_stage
from tests.pipeline.runtime.stages.megatron.megatron_model import (
    Case,
    forward_step,
    gpt_model,
    parallel,
    training_data,
)
from tests.pipeline.runtime.stages.megatron.megatron_reference import take_further_losses
from tests.pipeline.runtime.stages.megatron.test_provisional import check_predictions
from tests.pipeline.runtime.stages.megatron.test_update import CLOSE, FP16, SPREAD, Outcomes, Row, check, marked

FURTHER = {"further": 1, "position": "rope"}
FLUSH = FURTHER | {"schedule": "flush", "batches": (4,) * 4}
TWO_BW = FURTHER | {"schedule": "2bw", "batches": (4,) * 5}
ONE, TWO, FOUR = (1, 1, 1), (2, 1, 1), (4, 1, 1)
HALVES = cases.Deviation(loss=1e-5, norm=5e-4, newest=2e-3, older=2e-3)
"""The two halves of the embedding's gradient are FP16, and round before their sum; so do weights near 1."""

TABLE = {
    "flush": Row(FLUSH, layouts=(ONE,)),
    "flush, two stages": Row(FLUSH, layouts=(TWO, FOUR), allowed=CLOSE),
    "flush, tied": Row(FLUSH | {"tied": True, "further": 2}, layouts=(ONE,)),
    "flush, tied, four stages": Row(FLUSH | {"tied": True, "further": 2}, layouts=(FOUR,), allowed=CLOSE),
    "2bw": Row(TWO_BW | {"batches": (4, 4, 5, 6, 8), "further": 2}, layouts=(ONE,)),  # whose factors differ
    "2bw, four stages": Row(TWO_BW | {"batches": (4, 4, 5, 6, 8), "further": 2}, layouts=(FOUR,), allowed=CLOSE),
    "2bw, tied, clipped": Row(TWO_BW | {"clip": 0.5, "tied": True}, layouts=(TWO,), allowed=CLOSE),
    "2bw, recompute instructions": Row(TWO_BW | {"recompute": True, "dropout": 0.1}, layouts=(TWO,), allowed=CLOSE),
    "2bw, full recompute": Row(
        TWO_BW | {"recompute_granularity": "full", "dropout": 0.1}, layouts=(TWO,), allowed=CLOSE
    ),
    "2bw, balanced": Row(TWO_BW | {"balance": True}, layouts=(FOUR,), allowed=CLOSE),
    "2bw, replicas": Row(TWO_BW | {"clip": 0.5, "distributed_optimizer": True}, layouts=((2, 1, 2),), allowed=CLOSE),
    "2bw, sequence parallel": Row(TWO_BW | {"sequence_parallel": True}, layouts=((2, 2, 1),), allowed=SPREAD),
    "2bw, tensor ranks, tied": Row(TWO_BW | {"tied": True}, layouts=((2, 2, 1),), allowed=SPREAD),
    "2bw, fp16, two overflows": Row(
        FP16 | FURTHER | {"batches": (2,) * 8, "overflow_batches": (2, 3), "clip": 0.0}, layouts=(TWO,), allowed=HALVES
    ),
    "2bw, experts": Row(TWO_BW | {"experts": 4, "swiglu": True}, layouts=(TWO,), allowed=CLOSE),
    "interleaved": Row(FLUSH | {"schedule": "interleaved", "v": 2, "drains": (1,)}, layouts=(TWO,), allowed=CLOSE),
    "zb-h1": Row(FLUSH | {"schedule": "zb-h1", "further": 2}, layouts=(FOUR,), allowed=CLOSE),
    "zb-h1, tied": Row(FLUSH | {"schedule": "zb-h1", "tied": True}, layouts=(TWO,), allowed=CLOSE),
    "zbv": Row(FLUSH | {"schedule": "zbv", "v": 2, "drains": (1,)}, layouts=(TWO,), allowed=CLOSE),
    "zbv, tied": Row(FLUSH | {"schedule": "zbv", "v": 2, "tied": True}, layouts=(TWO,), allowed=CLOSE),
}  # fmt: skip
FULL = {"2bw, replicas", "zbv, tied", "zb-h1, tied", "2bw, full recompute", "2bw, experts", "2bw, balanced",
        "2bw, tensor ranks, tied", "flush, tied"}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes():
    return Outcomes(TABLE)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "layout"), marked(TABLE, full=FULL), ids=str)
def test_training_equals_one_process(outcomes, name, layout):
    """Losses of all tokens, norms and weights are those of a plain loop that scales the losses of further tokens anew
    before each backward; so are both copies of the embedding."""
    check(outcomes[name, layout], TABLE[name].allowed)


def masks_of_embeddings(**options) -> list[torch.Tensor]:
    """Where the outputs of the embedding are 0, for each time that a forward of one microbatch calls it; twice."""
    case, found = Case(**options), []
    with parallel(case):
        model = gpt_model(case)
        dropout = SeededDropout(model, seed=1234)
        model.embedding.register_forward_hook(lambda module, inputs, output: found.append(output == 0))
        for _ in range(2):
            with dropout.microbatch(0):
                forward_step(case)(training_data(case, 0), model)
            take_further_losses()  # else the next case on this process would find them
    return found


def test_embeddings_of_further_tokens_draw_masks_of_their_own():
    """The module is that of the first embedding; its masks depend on who calls it, and on nothing else."""
    options = FURTHER | {"further": 2, "dropout": 0.5}
    [masks] = workers.run(1, f"{__name__}:masks_of_embeddings", **options)
    first, again = masks[:3], masks[3:]
    assert all(torch.equal(*each) for each in zip(first, again, strict=True))
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(first, 2))


def losses_behind_an_abandoned_forward(interrupted: bool) -> dict[str, tuple[float, float]]:
    """The losses of a forward behind one that was abandoned, before it had taken its own if it was `interrupted`."""
    with begun_stage(engine=False, **FURTHER) as stage:
        lost = mock.patch.object(stage._multi_token_losses, "take", side_effect=RuntimeError("a rank is lost"))
        with lost if interrupted else nullcontext(), suppress(RuntimeError):
            stage.forward(MICROBATCHES[0], None)
        stage.abandon()
        stage.forward(MICROBATCHES[0], None)
        return stage.take_losses(0)


def test_losses_of_an_interrupted_forward_are_dropped():
    """megatron.core would add them to those of the next forward."""
    place = f"{__name__}:losses_behind_an_abandoned_forward"
    [whole], [interrupted] = (workers.run(1, place, interrupted=each) for each in (False, True))
    assert whole == interrupted and "mtp_1 loss" in whole


@pytest.mark.parametrize("uniform", [pytest.param(True, marks=pytest.mark.full), False])
def test_predictions_equal_one_process(uniform):
    """Both copies of the embedding are predicted from the sum of their gradients."""
    options = {"provisional_microbatches": 1, "clip": 0.5} if uniform else {}
    case = Case(**TWO_BW | {"predict": True, **options}, p=2)
    check_predictions(case, CLOSE)
