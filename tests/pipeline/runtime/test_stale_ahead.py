"""FTPipe's weights with predictions or provisional steps: several processes compute what a replay in one does."""

import pytest
import torch

from megatron.pipeline.program.weight_policies import Ahead
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.module.graph_stage import GraphModuleStage
from megatron.pipeline.runtime.update.versions import AheadVersions, WeightVersions
from megatron.pipeline.schedules import Schedule
from tests.pipeline.runtime import graph_cases
from tests.pipeline.runtime.graph_cases import Shape, random_shape
from tests.pipeline.runtime.test_graph import SHARES, SKIPS, assert_same, run

FULL = pytest.mark.full
ALONE = Shape((), (0,))
DRAWN = {  # batches and optimizers of drawn shapes; nobody can predict the optimizers "adafactor" and "plain"
    "predict": (((1,) * 9, (2, 2, 2, 2), (5, 5, 5)), ("sgd", "adamw")),
    "provisional": (((3, 1, 2, 3), (2, 2, 2, 2), (5, 5, 5)), ("sgd", "adamw", "adafactor", "plain")),
}


def drawn_shape(seed: int) -> Shape:
    return random_shape(seed, num_stages=3 + seed % 6, num_ranks=2 + seed % 3)


def assert_not_all_equal(outcome, other):
    assert not all(torch.equal(each, other.parameters[name]) for name, each in outcome.parameters.items())


@pytest.mark.parametrize(
    ("ahead", "shape", "batches", "kind", "slow"),
    [
        ("predict", SKIPS, (1,) * 7, "sgd", 0.0),
        ("predict", SKIPS, (2, 1, 5, 2), "adamw", 0.004),
        pytest.param("predict", SHARES, (2, 1, 5, 2), "adamw", 0.004, marks=FULL),
        ("provisional", SKIPS, (2, 1, 5, 2), "adamw", 0.004),
        ("provisional", SHARES, (2, 1, 5, 2), "plain", 0.0),
        pytest.param("provisional", SKIPS, (5, 5), "sgd", 0.0, marks=FULL),
        pytest.param("provisional", SKIPS, (2, 2, 2, 2), "adafactor", 0.0, marks=FULL),
        pytest.param("provisional", SHARES, (2, 2, 5, 2), "adamw", 0.004, marks=FULL),
        *(
            pytest.param(
                ahead, drawn_shape(seed), batches[seed % 3], kinds[seed % len(kinds)], 0.003 * (seed % 4 > 1),
                marks=FULL,
            )
            for ahead, (batches, kinds) in DRAWN.items()
            for seed in range(1, 13)
        ),
    ],
    ids=str,
)  # fmt: skip
def test_processes_compute_what_a_replay_does(ahead, shape, batches, kind, slow):
    """Accumulation of 1, 2 and more, one to several stages a rank, skips, shared weights, delays, learning rates that
    change."""
    options = {"batches": batches, "kind": kind, ahead: True, "recompute": True}
    outcomes = run(shape, preset="stale", slow=slow, **options)
    expected = graph_cases.replayed(shape, **options)
    assert_same(outcomes, expected)
    assert_not_all_equal(graph_cases.replayed(shape, **{**options, ahead: False}), expected)
    made = {stage: count for outcome in outcomes for stage, count in outcome.num_ahead.items()}
    assert made == wanted(ahead, shape, batches)


def wanted(ahead, shape, batches):
    """By stage, one prediction for each version and horizon, and not for each microbatch; one step for each forward of
    a newer batch than its weights', that finds the batch of these begun."""
    of = [batch for batch, size in enumerate(batches) for _ in range(size)]
    found = {}
    for stage in range(len(shape.rank_of_stage)):
        behind = [max(0, index - shape.graph.depth(stage)) for index in range(len(of))]
        if ahead == "predict":
            pairs = {(of[before], batch) for before, batch in zip(behind, of, strict=True)}
            found[stage] = sum(version < batch for version, batch in pairs)
        else:
            found[stage] = sum(
                of[before] < of[index] and before > 0 and of[before - 1] == of[before]
                for index, before in enumerate(behind)
            )
    return found


@pytest.mark.parametrize(
    ("shape", "batches", "options"),
    [
        (SKIPS, (1,) * 6, {"predict": True}),
        pytest.param(SKIPS, (2, 1, 3, 2), {"predict": True, "kind": "adamw"}, marks=FULL),
        pytest.param(SKIPS, (2, 1, 3, 2), {"slow": 0.004}, marks=FULL),
        *(
            pytest.param(
                drawn_shape(seed), DRAWN["predict"][0][seed % 3],
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
    assert_not_all_equal(graph_cases.replayed(shape, **{**options, "gap_aware": False}), expected)


@FULL
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_nothing_shrinks_without_a_gap(kind):
    """A single stage steps as its optimizer does, bit for bit."""
    options = {"batches": (2, 1, 3), "recompute": True, "kind": kind}
    outcomes = run(ALONE, preset="stale", gap_aware=True, **options)
    assert_same(outcomes, graph_cases.replayed(ALONE, **options))


@FULL
@pytest.mark.parametrize(
    ("ahead", "kind"), [("predict", "sgd"), ("provisional", "adamw"), ("provisional", "adafactor")]
)
def test_a_drain_in_the_middle_is_a_new_beginning(ahead, kind):
    """An evaluation sees the weights, and nothing ahead of them."""
    options = {"batches": (2, 2, 3), "recompute": True, ahead: True, "kind": kind}
    outcomes = run(SKIPS, preset="stale", evaluate=2, **options)
    assert_same(outcomes, graph_cases.replayed(SKIPS, drains=(1,), **options))
    short = run(SKIPS, preset="stale", evaluate=2, **{**options, "batches": (2, 2)})
    assert [each.evaluations for each in outcomes] == [each.evaluations for each in short]


@pytest.mark.parametrize("ahead", DRAWN)
@pytest.mark.parametrize(
    ("shape", "lr", "kind"),
    [
        (ALONE, 0.1, "sgd"),
        pytest.param(ALONE, 0.1, "adamw", marks=FULL),
        pytest.param(SKIPS, 0.0, "sgd", marks=FULL),
        pytest.param(SKIPS, 0.0, "adamw", marks=FULL),
    ],
    ids=["one stage", "one stage, adamw", "no learning rate", "no learning rate, adamw"],
)
def test_without_depth_or_steps_it_is_stale(ahead, shape, lr, kind):
    """Nothing is ahead of a single stage, and a learning rate of 0 leads nowhere: bit for bit what stale weights
    compute."""
    options = {"batches": (2, 1, 3), "recompute": True, "lr": lr, "kind": kind}
    outcomes = run(shape, preset="stale", **{ahead: True}, **options)
    assert_same(outcomes, graph_cases.replayed(shape, **options))


@FULL
def test_batches_of_one_microbatch_leave_nothing_unstepped():
    options = {"batches": (1,) * 7, "recompute": True, "kind": "adamw"}
    assert_same(run(SKIPS, preset="stale", provisional=True, **options), graph_cases.replayed(SKIPS, **options))


@pytest.mark.parametrize(
    ("weights", "has", "load", "message"),
    [
        ("predicted", None, "load_ahead", "stage 0 is to use predicted weights, which its WeightVersions have not"),
        ("provisional", Ahead.PREDICTION, "load_provisional", "which its AheadVersions have not; give it Ahead"),
        ("provisional", Ahead.PROVISIONAL_STEP, "load_ahead", "which its AheadVersions have not; give it Ahead"),
    ],
)  # fmt: skip
def test_a_stage_needs_versions_of_that_kind(weights, has, load, message):
    """Else it says so where the first are due: predictions are no provisional steps, nor the other way round."""
    module = torch.nn.Linear(2, 2)
    own = dict(module.named_parameters())
    versions = WeightVersions(own, window=1) if has is None else AheadVersions(own, ahead=has)
    schedule = Schedule(order="async", weights=f"stale-{weights}", recompute=True, num_stages=1)
    stage = GraphModuleStage(module, index=0, graph=schedule.graph, versions=versions, edges={})
    with pytest.raises(ValueError, match=message):
        getattr(stage, load)(0, 1)
    with pytest.raises(ValueError, match=f"under stale-{weights} each stage steps by itself"):
        PipelineEngine(schedule, [], None)
