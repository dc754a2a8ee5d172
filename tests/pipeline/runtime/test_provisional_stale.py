"""FTPipe's weights with provisional steps: several processes compute what a replay in one does, bit for bit."""

import pytest
import torch

from megatron.pipeline.program.weight_policies import Ahead
from megatron.pipeline.runtime.stages.module.graph_stage import GraphModuleStage
from megatron.pipeline.runtime.update.versions import AheadVersions
from megatron.pipeline.schedules import Schedule
from tests.pipeline.runtime import graph_cases
from tests.pipeline.runtime.graph_cases import Shape, random_shape
from tests.pipeline.runtime.test_graph import SHARES, SKIPS, assert_same, run

FULL = pytest.mark.full
ALONE = Shape((), (0,))


@pytest.mark.parametrize(
    ("shape", "batches", "kind", "slow"),
    [
        (SKIPS, (2, 1, 5, 2), "adamw", 0.004),
        (SHARES, (2, 1, 5, 2), "plain", 0.0),
        pytest.param(SKIPS, (5, 5), "sgd", 0.0, marks=FULL),
        pytest.param(SKIPS, (2, 2, 2, 2), "adafactor", 0.0, marks=FULL),
        pytest.param(SHARES, (2, 2, 5, 2), "adamw", 0.004, marks=FULL),
        *(
            pytest.param(
                random_shape(seed, num_stages=3 + seed % 6, num_ranks=2 + seed % 3),
                ((3, 1, 2, 3), (2, 2, 2, 2), (5, 5, 5))[seed % 3], ("sgd", "adamw", "adafactor", "plain")[seed % 4],
                0.003 * (seed % 4 > 1), marks=FULL,
            )
            for seed in range(1, 13)
        ),
    ],
    ids=str,
)  # fmt: skip
def test_processes_compute_what_a_replay_does(shape, batches, kind, slow):
    """Accumulation, one to several stages a rank, skips, shared weights, delays, learning rates that change, and
    optimizers that nobody can predict.
    """
    options = {"batches": batches, "kind": kind, "provisional": True, "recompute": True}
    outcomes = run(shape, preset="stale", slow=slow, **options)
    expected = graph_cases.replayed(shape, **options)
    assert_same(outcomes, expected)
    plain = graph_cases.replayed(shape, **{**options, "provisional": False})
    assert not all(torch.equal(each, expected.parameters[name]) for name, each in plain.parameters.items())
    made = {stage: count for outcome in outcomes for stage, count in outcome.num_ahead.items()}
    assert made == wanted_steps(shape, batches)


def wanted_steps(shape, batches):
    """One for each forward of a newer batch than its weights', that finds the batch of these begun."""
    of = [batch for batch, size in enumerate(batches) for _ in range(size)]
    wanted = {}
    for stage in range(len(shape.rank_of_stage)):
        behind = [max(0, index - shape.graph.depth(stage)) for index in range(len(of))]
        wanted[stage] = sum(
            of[before] < of[index] and before > 0 and of[before - 1] == of[before]
            for index, before in enumerate(behind)
        )
    return wanted


@FULL
@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_a_drain_in_the_middle_is_a_new_beginning(kind):
    """An evaluation sees the weights, and no step that is not taken."""
    options = {"batches": (2, 2, 3), "recompute": True, "provisional": True, "kind": kind}
    outcomes = run(SKIPS, preset="stale", evaluate=2, **options)
    assert_same(outcomes, graph_cases.replayed(SKIPS, drains=(1,), **options))
    short = run(SKIPS, preset="stale", evaluate=2, **{**options, "batches": (2, 2)})
    assert [each.evaluations for each in outcomes] == [each.evaluations for each in short]


@pytest.mark.parametrize(
    ("shape", "batches", "lr", "kind"),
    [
        (ALONE, (2, 1, 3), 0.1, "sgd"),
        pytest.param(ALONE, (2, 1, 3), 0.1, "adamw", marks=FULL),
        pytest.param(SKIPS, (2, 1, 3), 0.0, "sgd", marks=FULL),
        pytest.param(SKIPS, (2, 1, 3), 0.0, "adamw", marks=FULL),
        pytest.param(SKIPS, (1,) * 7, 0.1, "adamw", marks=FULL),
    ],
    ids=["one stage", "one stage, adamw", "no learning rate", "no learning rate, adamw", "one microbatch"],
)
def test_without_depth_steps_or_accumulation_it_is_stale(shape, batches, lr, kind):
    """Nothing is ahead of a single stage, a learning rate of 0 leads nowhere, and batches of one microbatch leave
    nothing that is not stepped: bit for bit what stale weights compute.
    """
    options = {"batches": batches, "recompute": True, "lr": lr, "kind": kind}
    outcomes = run(shape, preset="stale", provisional=True, **options)
    assert_same(outcomes, graph_cases.replayed(shape, **options))


def test_a_stage_needs_versions_that_can_be_stepped():
    """Predictions are no provisional steps, nor the other way round."""
    module = torch.nn.Linear(2, 2)
    schedule = Schedule(order="async", weights="stale-provisional", recompute=True, num_stages=1)
    for has, load in ((Ahead.PREDICTION, "load_provisional"), (Ahead.PROVISIONAL_STEP, "load_ahead")):
        versions = AheadVersions(dict(module.named_parameters()), ahead=has)
        stage = GraphModuleStage(module, index=0, graph=schedule.graph, versions=versions, edges={})
        with pytest.raises(
            ValueError, match=r"which its AheadVersions have not; give it AheadVersions with ahead=Ahea"
        ):
            getattr(stage, load)(0, 1)
