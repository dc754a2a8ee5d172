"""FTPipe's weights with predictions: several processes compute what a replay in one does, bit for bit."""

import pytest
import torch

from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.module.graph_stage import GraphModuleStage
from megatron.pipeline.runtime.update.versions import WeightVersions
from megatron.pipeline.schedules import Schedule
from tests.pipeline.runtime import graph_cases
from tests.pipeline.runtime.graph_cases import Shape, random_shape
from tests.pipeline.runtime.test_graph import SHARES, SKIPS, assert_same, run

FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("shape", "batches", "kind", "slow"),
    [
        (SKIPS, (1,) * 7, "sgd", 0.0),
        (SKIPS, (2, 1, 5, 2), "adamw", 0.004),
        pytest.param(SHARES, (2, 1, 5, 2), "adamw", 0.004, marks=FULL),
        *(
            pytest.param(
                random_shape(seed, num_stages=3 + seed % 6, num_ranks=2 + seed % 3),
                ((1,) * 9, (2, 2, 2, 2), (5, 5, 5))[seed % 3], ("sgd", "adamw")[seed % 2], 0.003 * (seed % 4 > 1),
                marks=FULL,
            )
            for seed in range(1, 13)
        ),
    ],
    ids=str,
)  # fmt: skip
def test_processes_compute_what_a_replay_does(shape, batches, kind, slow):
    """Accumulation of 1, 2 and more, one to several stages a rank, skips, delays, learning rates that change."""
    options = {"batches": batches, "kind": kind, "predict": True, "recompute": True}
    outcomes = run(shape, preset="stale", slow=slow, **options)
    expected = graph_cases.replayed(shape, **options)
    assert_same(outcomes, expected)
    plain = graph_cases.replayed(shape, **{**options, "predict": False})
    assert not all(torch.equal(each, expected.parameters[name]) for name, each in plain.parameters.items())
    made = {stage: count for outcome in outcomes for stage, count in outcome.num_ahead.items()}
    assert made == wanted_predictions(shape, batches)


def wanted_predictions(shape, batches):
    """One for each version and horizon, and not for each microbatch."""
    of = [batch for batch, size in enumerate(batches) for _ in range(size)]
    wanted = {}
    for stage in range(len(shape.rank_of_stage)):
        depth = shape.graph.depth(stage)
        pairs = {(of[max(0, index - depth)], batch) for index, batch in enumerate(of)}
        wanted[stage] = sum(version < batch for version, batch in pairs)
    return wanted


@pytest.mark.parametrize(
    ("shape", "batches", "options"),
    [
        (SKIPS, (1,) * 6, {"predict": True}),
        pytest.param(SKIPS, (2, 1, 3, 2), {"predict": True, "kind": "adamw"}, marks=FULL),
        pytest.param(SKIPS, (2, 1, 3, 2), {"slow": 0.004}, marks=FULL),
        *(
            pytest.param(
                random_shape(seed, num_stages=3 + seed % 6, num_ranks=2 + seed % 3),
                ((1,) * 9, (2, 2, 2, 2), (5, 5, 5))[seed % 3],
                {"predict": seed % 4 < 2, "kind": ("sgd", "adamw")[seed % 2]}, marks=FULL,
            )
            for seed in range(1, 7)
        ),
    ],
    ids=str,
)  # fmt: skip
def test_gap_aware_steps_are_those_of_a_replay(shape, batches, options):
    """Where weights are predicted and where not; reports have the norm of what was computed, before it shrinks."""
    slow, options = options.get("slow", 0.0), {each: options[each] for each in options if each != "slow"}
    options |= {"recompute": True, "batches": batches, "gap_aware": True}
    outcomes = run(shape, preset="stale", slow=slow, **options)
    expected = graph_cases.replayed(shape, **options)
    assert_same(outcomes, expected)
    plain = graph_cases.replayed(shape, **{**options, "gap_aware": False})
    assert not all(torch.equal(each, expected.parameters[name]) for name, each in plain.parameters.items())


@FULL
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_nothing_shrinks_without_a_gap(kind):
    """A single stage steps as its optimizer does, bit for bit."""
    options = {"batches": (2, 1, 3), "recompute": True, "kind": kind}
    outcomes = run(Shape((), (0,)), preset="stale", gap_aware=True, **options)
    assert_same(outcomes, graph_cases.replayed(Shape((), (0,)), **options))


@FULL
def test_a_drain_in_the_middle_is_a_new_beginning():
    """An evaluation sees the weights, and no prediction of them."""
    options = {"batches": (2, 2, 2), "recompute": True, "predict": True}
    outcomes = run(SKIPS, preset="stale", evaluate=2, **options)
    assert_same(outcomes, graph_cases.replayed(SKIPS, drains=(1,), **options))
    short = run(SKIPS, preset="stale", evaluate=2, **{**options, "batches": (2, 2)})
    assert [each.evaluations for each in outcomes] == [each.evaluations for each in short]


@pytest.mark.parametrize(
    ("shape", "lr", "kind"),
    [
        (Shape((), (0,)), 0.1, "sgd"),
        pytest.param(Shape((), (0,)), 0.1, "adamw", marks=FULL),
        pytest.param(SKIPS, 0.0, "sgd", marks=FULL),
        pytest.param(SKIPS, 0.0, "adamw", marks=FULL),
    ],
    ids=["one stage", "one stage, adamw", "no learning rate", "no learning rate, adamw"],
)
def test_without_depth_or_steps_it_is_plain(shape, lr, kind):
    """Nothing is ahead of a single stage, and a learning rate of 0 leads nowhere: bit for bit without predictions."""
    options = {"batches": (2, 1, 3), "recompute": True, "lr": lr, "kind": kind}
    outcomes = run(shape, preset="stale", predict=True, **options)
    assert_same(outcomes, graph_cases.replayed(shape, **options))


def test_a_stage_needs_versions_that_can_be_predicted():
    """Else it says so where the first prediction is due."""
    module = torch.nn.Linear(2, 2)
    versions = WeightVersions(dict(module.named_parameters()), window=1)
    schedule = Schedule(order="async", weights="stale-predicted", recompute=True, num_stages=1)
    stage = GraphModuleStage(module, index=0, graph=schedule.graph, versions=versions, edges={})
    with pytest.raises(ValueError, match=r"stage 0 is to use predicted weights, which its WeightVersions have not"):
        stage.load_ahead(0, 1)
    with pytest.raises(ValueError, match="under stale-predicted each stage steps by itself"):
        PipelineEngine(schedule, [], None)
