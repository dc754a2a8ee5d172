"""Pipelines of a small MLP against single-process references."""

import pytest
import torch

from megatron.pipeline.check import check
from megatron.pipeline.schedules import Schedule
from tests import workers
from tests.pipeline.runtime import reference
from tests.pipeline.runtime.reference import Training

CASE = "tests.pipeline.runtime.module_cases:run"


def run(num_ranks, preset, training, **options):
    return workers.run(num_ranks, CASE, preset=preset, training=training, timeout=60, **options)


def assert_same(ranks, expected, *, exact=True):
    """Every rank reports the reference's losses, and together they hold its parameters."""
    close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    for outcome in ranks:
        assert [report.batch for report in outcome.reports] == list(range(len(expected.losses)))
        assert [report.losses["loss"] for report in outcome.reports] == pytest.approx(expected.losses, rel=1e-6)
        for name, tensor in outcome.parameters.items():
            torch.testing.assert_close(tensor, expected.parameters[name], **close)
    assert {name for outcome in ranks for name in outcome.parameters} == set(expected.parameters)


@pytest.mark.parametrize("preset", ["gpipe", "flush"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_flushing_schedules_are_ordinary_training(preset, num_ranks):
    """Losses and parameters are bit-equal to one process for every p, with m = p and m = 2p and warm-up."""
    training = Training(batches=(4, 4, 8, 8, 4, 4), warmup=3)
    outcomes = run(num_ranks, preset, training)
    assert_same(outcomes, reference.train(training, delay=0))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_2bw_applies_gradients_of_the_version_before(num_ranks):
    """W(t+1) = W(t) - update(g(W(t-1))), bit-equal over nine batches of ramped-up size, drains in between included."""
    training = Training(batches=(4, 4, 4, 8, 8, 12, 4, 4, 4), warmup=4)
    expected = reference.train(training, delay=1)
    assert_same(run(num_ranks, "2bw", training), expected)
    drained = run(num_ranks, "2bw", training, drains=(1, 4, 5), evaluate=3)
    assert_same(drained, expected)
    assert len(drained[0].evaluations) == 3
    assert all(outcome.evaluations == drained[0].evaluations for outcome in drained)
