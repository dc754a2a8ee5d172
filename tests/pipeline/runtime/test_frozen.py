"""Pipelines whose first stages are frozen, against plain torch on one process."""

import pytest
import torch

from tests import workers
from tests.pipeline.runtime import reference
from tests.pipeline.runtime.frozen_cases import reference_with_frozen
from tests.pipeline.runtime.reference import Training

CASE = "tests.pipeline.runtime.frozen_cases:run"
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
