"""Stages anywhere: a GPT's, whose megatron.core chunks are shown the place of their stage, and those of any module."""

import functools
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.pipeline.runtime.stages.megatron.pipeline_position import at_stage, config_of_stage, embedding_ranks
from tests import workers
from tests.pipeline.placed_schedules import registered
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases
from tests.pipeline.runtime.stages.megatron.test_update import CLOSE, EXACT, SPREAD, check, reference_key
from tests.pipeline.runtime.stages.module import reference
from tests.pipeline.runtime.stages.module.reference import Training
from tests.pipeline.runtime.stages.module.test_pipeline import assert_same

FULL = pytest.mark.full
V = {"schedule": "v", "p": 2, "v": 2}
TWO_BW_V = V | {"schedule": "2bw-v", "batches": (4,) * 6}
SHUFFLED = {"schedule": "shuffled", "p": 4}
TIED = {"tied": True, "clip": 0.5}
FP16 = {"dtype": "float16", "layers": 4, "hidden": 16, "clip": 1.0, "batches": (2,) * 8, "overflow_batches": (2, 3)}

CASES = {
    "v": (V | {"drains": (1, 3)}, EXACT),
    "v tied, distributed optimizer, d=2": (V | TIED | {"d": 2, "distributed_optimizer": True}, CLOSE),
    "v of 2bw, tied": (TWO_BW_V | TIED | {"drains": (2,)}, CLOSE),
    "v of 2bw, fp16": (TWO_BW_V | FP16, EXACT),
    "shuffled, dropout": (SHUFFLED | {"dropout": 0.1, "recompute": True}, EXACT),
    "shuffled tied": (SHUFFLED | TIED, CLOSE),
    "lopsided tied": (V | TIED | {"schedule": "lopsided"}, CLOSE),
}
MATRIX = {
    "v tied, sequence parallel": (V | TIED | {"t": 2, "sequence_parallel": True}, SPREAD),
    "v tied, clipped": (V | TIED, CLOSE),
    "v of 2bw, eight batches": (TWO_BW_V | TIED | {"drains": (2,), "batches": (4,) * 8}, CLOSE),
    "v tied, d=2": (V | TIED | {"d": 2}, CLOSE),
    "v tied, t=2 d=2": (V | TIED | {"t": 2, "d": 2, "distributed_optimizer": True}, SPREAD),
    "v bf16": (V | {"dtype": "bfloat16"}, EXACT),
    "v full recompute": (V | {"recompute_granularity": "full", "dropout": 0.1}, EXACT),
    "v of 2bw, one gradient buffer": (TWO_BW_V | TIED | {"single_gradient_buffer": True}, CLOSE),
    "v of BERT": (V | {"bert": True, "clip": 0.5}, CLOSE),
    "shuffled BERT, tied": (SHUFFLED | TIED | {"bert": True}, CLOSE),
}
DELAYS = {"2bw-v": "2bw"}  # the schedules whose reference is not flush's


def train_gpt(**options) -> dict:
    with registered():
        return cases.train(**options)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "allowed"),
    [pytest.param(*row, id=name) for name, row in CASES.items()]
    + [pytest.param(*row, id=name, marks=FULL) for name, row in MATRIX.items()],
)
def test_training_equals_one_process(options, allowed):
    """Losses, norms, weights and both weight versions; tied copies are equal bit for bit."""
    case = cases.Case(**options)
    results = workers.run(case.num_ranks, f"{__name__}:train_gpt", timeout=200, **options)
    alone = replace(reference_key(case), v=1, schedule=DELAYS.get(case.schedule, "flush"))
    if "single_gradient_buffer" not in options:
        assert {result["num_gradient_slots"] for result in results} <= {1, 2}
    check((replace(case, schedule=alone.schedule), train_alone(alone), results), allowed)


@functools.cache  # placements of one case share it
def train_alone(case: cases.Case) -> dict:
    return workers.run(
        1, "tests.pipeline.runtime.stages.megatron.megatron_reference:reference", timeout=200, **vars(case)
    )[0]


def test_a_chunk_has_the_layers_of_its_stage():
    """Whichever rank asks, and whether megatron.core takes it from the configuration or from `parallel_state`."""
    layers = (1, 3, 0, 2)
    config = TransformerConfig(
        num_layers=6, hidden_size=8, num_attention_heads=2, num_layers_in_first_pipeline_stage=1,
        pipeline_model_parallel_size=2, pipeline_dtype=torch.float32,
    )  # fmt: skip
    found = []
    for stage in range(4):
        own = config_of_stage(config, stage, layers)
        for pp_rank in (0, 1):
            found.append(
                (get_transformer_layer_offset(own, None, pp_rank), get_num_layers_to_build(own, None, pp_rank))
            )
    assert found == [(0, 1)] * 2 + [(1, 3)] * 2 + [(4, 0)] * 2 + [(4, 2)] * 2
    assert config.pipeline_model_parallel_size == 2 and config.pipeline_model_parallel_layout is None


def test_the_place_that_parallel_state_gives():
    """The stage's, also to those who count virtual stages; afterwards, and after an error, the rank's again."""
    before = dict(vars(parallel_state))
    for stage in range(3):
        with pytest.raises(KeyError), at_stage(stage, 3):
            assert parallel_state.get_pipeline_model_parallel_rank() == stage
            assert parallel_state.get_pipeline_model_parallel_world_size() == 3
            assert parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=1) == (stage == 0)
            assert parallel_state.is_pipeline_last_stage() == (stage == 2)
            raise KeyError
        assert dict(vars(parallel_state)) == before


@pytest.mark.parametrize(
    ("rank_of_stage", "ranks"), [((0, 1, 2), [4, 6]), ((2, 0, 1), [5, 6]), ((0, 1, 2, 2, 1, 0), [4])]
)
def test_who_holds_embeddings(rank_of_stage, ranks):
    """The ranks of the first and the last stage, in order: one, where both lie on it."""
    assert embedding_ranks([4, 5, 6], rank_of_stage) == ranks


# Any module.

MODULES = {
    "v": (2, {"preset": "v", "num_virtual_stages": 2}, 0),
    "shuffled": (4, {"preset": "shuffled"}, 0),
    "lopsided": (2, {"preset": "lopsided", "num_virtual_stages": 2}, 0),
    "2bw, v": (2, {"preset": "2bw-v", "num_virtual_stages": 2}, 1),
    "2bw, reversed": (4, {"preset": "2bw-reversed"}, 1),
}


def run_module(**options):
    from tests.pipeline.runtime.stages.module import module_cases

    with registered():
        return module_cases.run(**options)


def train_module(num_ranks: int, **options) -> list:
    return workers.run(num_ranks, f"{__name__}:run_module", timeout=60, **options)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("num_ranks", "options", "delay"), MODULES.values(), ids=MODULES)
def test_modules_anywhere_train_as_one_process(num_ranks, options, delay):
    """Bit-equal, with evaluations between drained batches."""
    training = Training(batches=(4, 4, 8, 4, 4, 4))
    outcomes = train_module(num_ranks, training=training, drains=(1, 3), evaluate=2, **options)
    assert_same(outcomes, reference.train(training, delay=delay))
    assert all(outcome.evaluations == outcomes[0].evaluations for outcome in outcomes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("name", ["v", "shuffled", "2bw, v"])
def test_a_tied_parameter_of_a_module(name, num_replicas):
    """Two copies, on two ranks or on one, with replicas: they get the sum of their gradients, the norm counts one of
    them, and both stay what the one weight of a single process is."""
    num_ranks, options, delay = MODULES[name]
    training = Training(batches=(4, 4, 4, 4), clip_grad=0.05, tied=True, num_replicas=num_replicas)
    outcomes = train_module(num_ranks * num_replicas, training=training, **options)
    expected = reference.train(training, delay=delay)
    expected.parameters[reference.LAST_WEIGHT] = expected.parameters[reference.FIRST_WEIGHT]
    assert_same(outcomes, expected, exact=False)
    copies = (reference.FIRST_WEIGHT, reference.LAST_WEIGHT)
    weights = [outcome.parameters[name] for outcome in outcomes for name in copies if name in outcome.parameters]
    assert len(weights) == 2 * num_replicas and all(torch.equal(weight, weights[0]) for weight in weights)
    for outcome in outcomes:
        assert [report.grad_norm for report in outcome.reports] == pytest.approx(expected.grad_norms, rel=1e-5)
