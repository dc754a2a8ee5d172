"""Pipelines whose first stages are frozen, against plain torch on one process."""

import pytest
import torch

from megatron.pipeline.program.instruction import MOVES
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.contract.stage import Microbatch
from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.stages.module.stage import ModuleStage
from megatron.pipeline.runtime.update.versions import WeightVersions
from megatron.pipeline.schedules import Schedule
from tests import workers
from tests.pipeline.runtime.stages.module import reference
from tests.pipeline.runtime.stages.module.frozen_cases import reference_with_frozen
from tests.pipeline.runtime.stages.module.reference import Training

CASE = "tests.pipeline.runtime.stages.module.frozen_cases:run"
DELAYS = {"gpipe": 0, "flush": 0, "2bw": 1}


def run(preset, training, **options):
    num_ranks = (max(options["rank_of_stage"]) + 1) * training.num_replicas
    return workers.run(num_ranks, CASE, preset=preset, training=training, timeout=60, **options)


def assert_same(outcomes, expected, *, exact=True):
    close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    for outcome in outcomes:
        assert [report.batch for report in outcome.reports] == list(range(len(expected.losses)))
        assert [report.losses["loss"] for report in outcome.reports] == pytest.approx(expected.losses, rel=1e-6)
        assert [report.grad_norm for report in outcome.reports] == pytest.approx(expected.grad_norms, rel=1e-5)
        for name, tensor in outcome.parameters.items():
            torch.testing.assert_close(tensor, expected.parameters[name], **close)
    assert {name for outcome in outcomes for name in outcome.parameters} == set(expected.parameters)


def assert_unmoved(outcomes, num_layers):
    """Not by a bit, weight decay included."""
    initial = dict(reference.build_model().named_parameters())
    frozen = {name for name in initial if int(name.split(".")[0]) < num_layers}
    moved = {}
    for outcome in outcomes:
        for name, tensor in outcome.parameters.items():
            moved[name] = not torch.equal(tensor, initial[name])
    assert {name for name, has_moved in moved.items() if not has_moved} == frozen


@pytest.mark.sample(6)
@pytest.mark.parametrize("preset", list(DELAYS))
@pytest.mark.parametrize(
    ("rank_of_stage", "num_frozen"), [((0, 1, 2, 3), 2), ((0, 1, 1, 2), 2), ((0, 0), 1), ((0, 1), 1)]
)
def test_training_behind_a_frozen_prefix(preset, rank_of_stage, num_frozen):
    """Losses, norms and weights are bit-equal to one process, over drains and evaluations; the prefix saves nothing."""
    training = Training(batches=(4, 4, 8, 8, 4, 4), warmup=3)
    outcomes = run(preset, training, rank_of_stage=rank_of_stage, num_frozen=num_frozen, drains=(1, 3))
    num_stages = len(rank_of_stage)
    expected = reference_with_frozen(training, delay=DELAYS[preset], num_stages=num_stages, num_frozen=num_frozen)
    assert_same(outcomes, expected)
    assert_unmoved(outcomes, num_frozen * reference.NUM_LAYERS // num_stages)
    for outcome in outcomes:
        assert all(outcome.peak_saved[stage] == 0 for stage in outcome.peak_saved if stage < num_frozen)
        assert outcome.evaluations == outcomes[0].evaluations and len(outcome.evaluations) == 2


FOUR_ACTIVE = [((0, 1, 2, 3, 4), 1), ((0, 0, 1, 2, 3), 1)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("preset", "rank_of_stage", "num_frozen", "options"),
    [
        ("bpipe", *FOUR_ACTIVE[0], {}),
        ("bpipe", *FOUR_ACTIVE[1], {"slow": 0.004}),
        ("2bw", *FOUR_ACTIVE[0], {"balance": True}),
        ("2bw", *FOUR_ACTIVE[1], {"balance": True, "recompute": True}),
        pytest.param("bpipe", *FOUR_ACTIVE[1], {"recompute": True}, marks=pytest.mark.full),
        pytest.param("bpipe", (0, 1, 1, 2, 3, 4, 5), 2, {}, marks=pytest.mark.full),
        pytest.param("2bw", (0, 1, 1, 2, 3, 4, 5), 2, {"balance": True}, marks=pytest.mark.full),
    ],
)
def test_activations_move_behind_a_frozen_prefix(preset, rank_of_stage, num_frozen, options):
    """Bit-equal to one process; what moves is what the programs say, between the ranks that train alone; no rank saves
    more than ceil((a+2)/2) of a active stages.
    """
    batches = (6, 8, 5, 9)
    training = Training(batches=batches, warmup=3)
    placed = {"rank_of_stage": rank_of_stage, "num_frozen": num_frozen, **options}
    outcomes = run(preset, training, drains=(1,), **placed)
    num_stages = len(rank_of_stage)
    expected = reference_with_frozen(training, delay=int(preset == "2bw"), num_stages=num_stages, num_frozen=num_frozen)
    assert_same(outcomes, expected)
    placed.pop("slow", None)
    schedule = Schedule.preset(preset, num_stages=num_stages, **placed)
    bounds = schedule.max_saved_on_rank(batches)
    assert max(bounds) == -(-(num_stages - num_frozen + 2) // 2)
    stream, moves = schedule.stream(), [[] for _ in outcomes]
    for batch, num_microbatches in enumerate(batches):
        for segments in (stream.start_batch(num_microbatches), stream.drain() if batch in (1, 3) else ()):
            for rank, segment in enumerate(segments):
                moves[rank] += [str(each) for each in segment if each.kind in MOVES]
    for outcome, bound, due in zip(outcomes, bounds, moves, strict=True):
        assert outcome.moves == due
        assert outcome.peak_saved_on_rank <= bound
        assert bool(outcome.num_buffers) == bool(due)
    first = rank_of_stage[num_frozen]
    assert [rank for rank, due in enumerate(moves) if due] == [first, len(moves) - 1]


def test_what_a_frozen_stage_hands_on_is_not_ours_to_change():
    """A frozen stage that hands on its data, as from a cache: the stage behind it drops its input, and not the data."""
    data = torch.ones(2, 2)
    spec = TensorSpec((2, 2))
    frozen = ModuleStage(
        torch.nn.Identity(), index=0, num_stages=3, versions=None, source=lambda _: data, output_spec=spec
    )
    versions = WeightVersions(dict((module := torch.nn.Linear(2, 2)).named_parameters()), window=1)
    behind = ModuleStage(
        module, index=1, num_stages=3, versions=versions, input_spec=spec, output_spec=spec,
        activation_memory=ActivationMemory(), input_needs_gradient=False,
    )  # fmt: skip
    behind.load_version(0)
    microbatches = [Microbatch(index, 0, index, 2) for index in range(2)]
    for each in microbatches:
        behind.forward(each, frozen.forward_only(each, None))
    assert torch.equal(data, torch.ones(2, 2)) and data.stride() == (2, 1)


@pytest.mark.parametrize("preset", ["flush", "2bw"])
def test_recompute_replicas_and_clipping(preset):
    training = Training(batches=(2, 2, 4, 2), clip_grad=0.05, num_replicas=2)
    outcomes = run(preset, training, rank_of_stage=(0, 1), num_frozen=1, recompute=True)
    expected = reference_with_frozen(training, delay=DELAYS[preset], num_stages=2, num_frozen=1)
    assert_same(outcomes, expected, exact=False)


def test_a_frozen_rank_runs_ahead_and_not_away():
    """Before a slow end it is into the next batch, with at most p-s+1 outputs unread."""
    training = Training(batches=(12, 12))
    outcomes = run("flush", training, rank_of_stage=(0, 1), num_frozen=1, slow=0.01)
    assert outcomes[0].most_unread == 3
    assert_same(outcomes, reference_with_frozen(training, delay=0, num_stages=2, num_frozen=1))
