"""The planner counts for predicted weights what the runtime allocates: versions, true weights, gradients, copies."""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from megatron.pipeline.runtime.update.provisional_step import CHUNK_BYTES
from megatron.pipeline.schedules import Schedule
from megatron.planner import ActivationSetting, Architecture, RankMemory, TrainingState, estimate_memory
from megatron.planner.memory.parameters import PREDICTION_CHUNK
from megatron.planner.memory.schedule_demand import schedule_demand
from tests import workers
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases
from tests.pipeline.runtime.stages.megatron.megatron_model import HEADS

COUNT = "tests.pipeline.runtime.stages.megatron.provisional_memory:count"
STAGE = {"schedule": "2bw", "predict": True, "p": 2, "batches": (4,) * 4}

TABLE = {
    "FP32": STAGE,
    "bf16": STAGE | {"dtype": "bfloat16"},
    "FP32, uniform": STAGE | {"provisional_microbatches": 3},
    "bf16, uniform, fewer": STAGE | {"dtype": "bfloat16", "provisional_microbatches": 1},
    "tied": STAGE | {"tied": True, "p": 4},
    "bf16, tied, uniform": STAGE | {"dtype": "bfloat16", "tied": True, "provisional_microbatches": 3},
    "reduced": STAGE | {"p": 1, "d": 2, "reduce_partial": True},
    "FP32, distributed optimizer": STAGE | {"p": 1, "d": 2, "distributed_optimizer": True},
    "without predictions": STAGE | {"predict": False},
}


def estimated(case: cases.Case) -> tuple[RankMemory, ...]:
    shape = Architecture(
        num_layers=case.layers, hidden_size=case.hidden, ffn_hidden_size=2 * case.hidden, num_attention_heads=HEADS,
        num_query_groups=HEADS, kv_channels=case.hidden // HEADS, sequence_length=cases.SEQUENCE,
        vocabulary_size=cases.VOCABULARY, num_positions=cases.SEQUENCE, tied_embeddings=case.tied,
    )  # fmt: skip
    schedule = Schedule.preset(
        "2bw", num_stages=case.p, predict=case.predict, provisional_microbatches=case.provisional_microbatches,
        reduce_partial=case.reduce_partial, data_parallel=case.d > 1, tied_embeddings=case.tied and case.p > 1,
    )  # fmt: skip
    state = TrainingState(
        weight_bytes=case.torch_dtype.itemsize, distributed_optimizer=case.distributed_optimizer, data=case.d
    )
    setting = ActivationSetting(micro_batch_size=case.micro_batch_size)
    demand = schedule_demand(schedule, case.batches[0] // case.d)
    return estimate_memory(shape, setting, state, demand, layers=(case.layers // case.p,) * case.p)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TABLE)
def test_weights_and_gradients_are_those_that_the_runtime_allocates(name):
    case = cases.Case(**TABLE[name])
    found = workers.run(case.num_ranks, COUNT, timeout=200, **vars(case))
    expected = estimated(case)
    for number, counted in enumerate(found):
        parts = expected[number // case.d].parts
        assert (counted["weights"], counted["gradients"]) == (parts.weights, parts.gradients), number


@pytest.mark.full
def test_a_prediction_steps_from_copies_of_masters_moments_and_gradients():
    """The copies are of one group of parameters, and so of a little less than all, as there are less than 64 MiB; of
    its shard, with the distributed optimizer.
    """
    for name, options in (("alone", STAGE | {"p": 1}), ("split", TABLE["FP32, distributed optimizer"])):
        case = cases.Case(**options)
        [counted, *_] = workers.run(case.num_ranks, COUNT, timeout=200, **vars(case))
        state = TrainingState(weight_bytes=4, distributed_optimizer=case.distributed_optimizer, data=case.d)
        count = estimated(case)[0].num_parameters
        expected = state.prediction(count, largest=count)
        assert expected == 16 * count / case.d and 0.7 * expected < counted["copies"] <= 1.2 * expected, name
    assert PREDICTION_CHUNK == CHUNK_BYTES


def test_in_16_bits_predictions_take_no_more_weights_than_2bw():
    """The masters are the true weights; in FP32 they are a third copy."""
    for dtype, copies in (("bfloat16", 2), ("float32", 3)):
        predicted, plain = (
            estimated(cases.Case(**STAGE | {"dtype": dtype, "predict": predict}))[0].parts for predict in (True, False)
        )
        assert 2 * predicted.weights == copies * plain.weights and predicted.gradients == plain.gradients
