"""Per-token loss: the loss of a batch is the mean over its tokens, whatever the number that each microbatch counts."""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from tests import workers
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases
from tests.pipeline.runtime.stages.megatron.megatron_model import Case
from tests.pipeline.runtime.stages.megatron.test_multi_token import FURTHER
from tests.pipeline.runtime.stages.megatron.test_provisional import REFERENCE
from tests.pipeline.runtime.stages.megatron.test_update import CLOSE, EXACT, FP16, SPREAD, Outcomes, Row, check, marked

PER_TOKEN = {"per_token": True}
MASKED = {"masked": True} | PER_TOKEN
FLUSH = MASKED | {"schedule": "flush", "batches": (4,) * 4}
TWO_BW = MASKED | {"schedule": "2bw", "batches": (4, 4, 5, 6, 8), "clip": 0.5}
EXPERTS = {"experts": 4, "swiglu": True, "layers": 2}
TWO, FOUR = (2, 1, 1), (4, 1, 1)

TABLE = {
    "flush": Row(FLUSH | {"clip": 0.5, "drains": (1,)}, layouts=((1, 1, 1), FOUR)),
    "zb-h1": Row(FLUSH | {"schedule": "zb-h1", "clip": 0.5}, layouts=(TWO,)),
    "zbv": Row(FLUSH | {"schedule": "zbv", "v": 2}, layouts=(TWO,)),
    "2bw": Row(TWO_BW, layouts=((1, 1, 1), FOUR)),
    "2bw, recompute": Row(TWO_BW | {"recompute": True, "dropout": 0.1}, layouts=(TWO,)),
    "2bw, one buffer": Row(TWO_BW | {"single_gradient_buffer": True, "drains": (1,)}, layouts=((1, 1, 1), FOUR)),
    "2bw, replicas": Row(TWO_BW | {"batches": (4,) * 5, "tied": True}, layouts=((2, 1, 2),), allowed=CLOSE),
    "2bw, distributed optimizer": Row(
        TWO_BW | {"batches": (4,) * 5, "distributed_optimizer": True}, layouts=((2, 1, 2),), allowed=CLOSE
    ),
    "2bw, sequence parallel": Row(TWO_BW | {"sequence_parallel": True}, layouts=((2, 2, 1),), allowed=SPREAD),
    "2bw, fp16, two overflows": Row(
        FP16 | MASKED | {"batches": (2,) * 8, "overflow_batches": (2, 3), "initial_loss_scale": 2.0**6}, layouts=(TWO,)
    ),
    "T5, one buffer": Row(
        PER_TOKEN | {"t5": True, "schedule": "2bw", "clip": 0.5, "single_gradient_buffer": True}, layouts=(TWO,)
    ),
    "bert, one buffer": Row(
        MASKED | {"bert": True, "schedule": "2bw", "clip": 0.5, "single_gradient_buffer": True}, layouts=(TWO,)
    ),
    "2bw, experts": Row(TWO_BW | EXPERTS, layouts=(TWO,)),
    "experts, sequence parallel": Row(
        FLUSH | EXPERTS | {"sequence_parallel": True, "lr": 1e-3}, layouts=((1, 2, 1),), allowed=SPREAD
    ),
    "further tokens": Row(FLUSH | FURTHER, layouts=((1, 1, 1),)),
    "further tokens, 2bw": Row(
        TWO_BW | FURTHER | {"tied": True, "batches": (4, 4, 6, 6, 8)}, layouts=((2, 1, 2),), allowed=CLOSE
    ),
    "further tokens, 2bw, one buffer": Row(
        TWO_BW | FURTHER | {"single_gradient_buffer": True}, layouts=(TWO,), allowed=CLOSE
    ),
    "T5": Row(PER_TOKEN | {"t5": True, "schedule": "2bw", "clip": 0.5}, layouts=(FOUR,)),
    "bert": Row(MASKED | {"bert": True, "schedule": "2bw", "clip": 0.5}, layouts=(TWO,)),
}
FULL = {"zbv", "2bw, recompute", "2bw, replicas", "2bw, sequence parallel"}


@pytest.fixture(scope="module")
def outcomes():
    return Outcomes(TABLE)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "layout"), marked(TABLE, full=FULL), ids=str)
def test_training_equals_one_process(outcomes, name, layout):
    """Losses, norms and weights are those of a plain loop that divides a batch's gradients by its number of tokens."""
    check(outcomes[name, layout], TABLE[name].allowed)


@pytest.mark.sample(1, "(2, 2)-{'reduce_partial': True, 'distributed_optimizer': True, 'tied': True}")
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ((2, 1), {"provisional_microbatches": 1}),
        pytest.param((2, 1), {"provisional_microbatches": 1, **FURTHER}, marks=pytest.mark.full),
        pytest.param((2, 1), {"provisional_microbatches": 1, "t5": True, "masked": False}, marks=pytest.mark.full),
        pytest.param((2, 1), {"provisional_microbatches": 1, "bert": True}, marks=pytest.mark.full),
        pytest.param((2, 1), {}, marks=pytest.mark.full),
        pytest.param((1, 2), {"optimizer": "sgd", "lr": 0.05}, marks=pytest.mark.full),
        ((2, 2), {"reduce_partial": True, "distributed_optimizer": True, "tied": True}),
    ],
    ids=str,
)
def test_predictions_equal_one_process(layout, options):
    """A prediction takes each microbatch to have as many tokens as those of the last batch that has stepped."""
    p, d = layout
    case = Case(**TWO_BW | {"batches": (4, 4, 6, 6, 8), "predict": True, **options}, p=p, d=d)
    [expected] = workers.run(1, REFERENCE, timeout=200, **vars(case))
    found = workers.run(p * d, f"{cases.__name__}:train", timeout=200, **vars(case))
    if d > 1 and not case.reduce_partial:  # each replica goes on with a prediction of its own
        found = [result | {"older": expected["older"]} for result in found]
    check((case, expected, found), CLOSE if d > 1 or case.further else EXACT)


def test_the_mean_over_microbatches_is_another():
    """So the tables above would miss a division by another number."""
    over_tokens, over_microbatches = Case(**FLUSH), Case(**FLUSH | {"per_token": False})
    found = [workers.run(1, f"{cases.__name__}:train", timeout=200, **vars(each))[0]["batches"][0]
             for each in (over_tokens, over_microbatches)]  # fmt: skip
    assert found[0]["loss"] == found[1]["loss"] and found[0]["norm"] != pytest.approx(found[1]["norm"], rel=1e-3)


def test_a_loss_function_without_a_number_of_tokens_is_refused():
    """Else the gradients would be those of sums."""
    case = Case(schedule="flush", per_token=True, batches=(2,))
    with pytest.raises(workers.WorkerError, match="the loss function returned no number of tokens; return"):
        workers.run(1, f"{cases.__name__}:train", timeout=60, **vars(case))
