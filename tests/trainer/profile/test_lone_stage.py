"""Stages measured without their pipeline are those of the pipeline."""

import statistics
from dataclasses import replace

import pytest

from megatron.pipeline.program.weight_policies import FLUSH, TWO_BW
from megatron.planner.memory.parameters import stage_parameters
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.time.profile import StagePosition
from megatron.trainer.plan.command import model_argv
from megatron.trainer.profile.pool import StagePlan
from tests import workers
from tests.trainer.run.run_case import BASE, data_flags

NUM_MICROBATCHES, NUM_BATCHES, LAYERS = 2, 3, 2


def stage_plan(place: StagePosition = StagePosition.MIDDLE, flags: str = "", **changes) -> StagePlan:
    argv = model_argv(f"{BASE} --global-batch-size 8 {data_flags()} {flags}".split(), architecture="gpt")
    values = dict(
        architecture="gpt", argv=argv, place=place, num_layers=LAYERS,
        tensor=1, micro_batch_size=2, recompute=RecomputeScope.NONE, weights=FLUSH,
        sequence_parallel=False, num_microbatches=NUM_MICROBATCHES, num_batches=NUM_BATCHES, num_warmup=1,
    )  # fmt: skip
    return StagePlan(**values | changes)


def time_case(plans: list[StagePlan], halves: bool = False) -> list[dict]:
    """What each plan yields on this rank, which is one of a job of tensor ranks."""
    from megatron.core import parallel_state
    from megatron.trainer.plan import from_flags as planner_records
    from megatron.trainer.profile.measurements import build_lone_stage, time_stage
    from megatron.trainer.profile.pool import prepare, training_program

    found = []
    for plan in plans:
        args, starts = prepare(plan.arguments(), None), []
        lone = build_lone_stage(args, training_program("gpt"), plan.place, plan.weights)
        samples = time_stage(
            lone, num_microbatches=plan.num_microbatches, num_batches=plan.num_batches, num_warmup=plan.num_warmup,
            start=lambda starts=starts: starts.append(1), halves=halves,
        )  # fmt: skip
        lone.close()
        from megatron.trainer.data.tokenizer import build_tokenizer, padded_vocab_size

        args = replace(args, padded_vocab_size=padded_vocab_size(args, build_tokenizer(args)))
        found.append(
            {
                "samples": samples,
                "num_parameters": lone.num_parameters,
                "num_starts": len(starts),
                "num_saved": len(lone.stage.activations),
                "deferred_bytes": lone.deferred_bytes,
                "model": planner_records.architecture(args),
            }
        )
        parallel_state.destroy_model_parallel()
    return found


def run(plans: list[StagePlan], **options) -> list[dict]:
    return workers.run(plans[0].tensor, "tests.trainer.profile.test_lone_stage:time_case", plans=plans, **options)[0]


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.full)])
def test_every_position_is_that_of_a_pipeline(tensor):
    """A stage has the parameters that the planner counts for its place (the last with an embedding of its own), every
    batch after the warm-up is timed once, and nothing is left saved."""
    plans = [stage_plan(place, tensor=tensor) for place in StagePosition]
    plans += [stage_plan(weights=TWO_BW, tensor=tensor)]
    results = run(plans)
    first, middle, last = stage_parameters(results[0]["model"], tensor, (LAYERS,) * 3)
    (only,) = stage_parameters(results[0]["model"], tensor, (LAYERS,))
    expected = {
        StagePosition.ONLY: only,
        StagePosition.FIRST: first,
        StagePosition.MIDDLE: middle,
        StagePosition.LAST: last,
    }
    for plan, result in zip(plans, results, strict=True):
        assert result["num_parameters"] == expected[plan.place], plan
        counts = {name: len(values) for name, values in result["samples"].items()}
        assert counts == dict.fromkeys(("forward", "backward", "zero", "norm", "step"), NUM_BATCHES), plan
        assert all(value > 0 for values in result["samples"].values() for value in values)
        assert (result["num_starts"], result["num_saved"]) == (1, 0)


def test_halves_are_timed_beside_whole_backwards():
    """Each batch is timed twice, with B and with I and W; what is kept between these grows with the layers."""
    results = run([stage_plan(num_layers=layers) for layers in (1, 3)], halves=True)
    names = ("forward", "backward", "backward_input", "backward_weight", "zero", "norm", "step")
    for result in results:
        assert {name: len(values) for name, values in result["samples"].items()} == dict.fromkeys(names, NUM_BATCHES)
        assert all(value > 0 for values in result["samples"].values() for value in values)
        assert result["num_saved"] == 0
    tokens, hidden = 2 * 16, 32
    of_layer = 4 * tokens * hidden * ((1 + 3) + (1 + 1) + (1 + 4) + (4 + 1))
    assert [result["deferred_bytes"] for result in results] == [of_layer, 3 * of_layer]


def weights_left_case(plan: StagePlan) -> int:
    """How many weights of a stage that was timed and closed are still in memory."""
    import gc
    import weakref

    from megatron.core import parallel_state
    from megatron.trainer.profile.measurements import build_lone_stage, time_stage
    from megatron.trainer.profile.pool import prepare, training_program

    lone = build_lone_stage(prepare(plan.arguments(), None), training_program("gpt"), plan.place, plan.weights)
    weights = [weakref.ref(weight) for weight in lone.stage.model.parameters()]
    time_stage(lone, num_microbatches=2, num_batches=1, num_warmup=0, start=lambda: None, halves=False)
    lone.close()
    del lone
    gc.collect()
    parallel_state.destroy_model_parallel()
    return sum(weight() is not None for weight in weights)


@pytest.mark.parametrize(
    "flags", ["", "--num-experts 4 --moe-token-dispatcher-type alltoall"], ids=["dense", "experts"]
)
def test_a_closed_stage_is_not_kept(flags):
    plan = stage_plan(flags=flags)
    assert workers.run(1, "tests.trainer.profile.test_lone_stage:weights_left_case", plan=plan) == [0]


@pytest.mark.full
def test_more_work_takes_longer():
    """Layers and recompute: forward with the number of layers, backward with the scope."""
    wide = "--hidden-size 128 --seq-length 64 --max-position-embeddings 64"
    plans = [stage_plan(flags=wide, num_layers=layers, num_batches=20) for layers in (1, 6)]
    plans += [stage_plan(flags=wide, num_layers=6, num_batches=20, recompute=RecomputeScope.LAYER)]
    few, many, again = [
        {name: statistics.median(values) for name, values in result["samples"].items()} for result in run(plans)
    ]
    assert many["forward"] > 2 * few["forward"] and many["backward"] > 2 * few["backward"]
    assert again["backward"] > 1.2 * many["backward"]
