"""The file of published runs on H100 in bfloat16 and FP8, at up to 2,304 GPUs: as near as the docs say."""

from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from megatron.planner.published.entries import Entry, load_entries
from megatron.planner.published.prediction import Prediction, predict
from megatron.planner.time.calibration import default_constants

FILE = Path(__file__).parents[3] / "benchmarks" / "published" / "dgx_cloud_h100.json"


@cache
def predictions() -> tuple[Prediction, ...]:
    entries = load_entries(FILE)
    assert all(isinstance(each, Entry) for each in entries)
    return tuple(predict(entry, default_constants()) for entry in entries)


def errors(is_fp8: bool, *, context: bool) -> list[float]:
    """Of those with, or without, context parallelism."""
    return [
        each.errors["iteration"]
        for each in predictions()
        if each.entry.software.fp8 is is_fp8 and (each.entry.configuration.context > 1) is context
    ]


@pytest.mark.parametrize(
    ("is_fp8", "context", "count", "bar"),
    [(False, False, 18, 0.07), (False, True, 17, 0.03), (True, False, 18, 0.08), (True, True, 17, 0.07)],
)
def test_mean_errors(is_fp8, context, count, bar):
    """No constant is fitted to them."""
    found = errors(is_fp8, context=context)
    assert len(found) == count
    assert sum(map(abs, found)) / count < bar and max(map(abs, found)) < 0.15


def test_memory_of_runs_that_ran():
    """All of these ran. Five are said to be borderline, and 340B on the fewest GPUs not to fit."""
    outside = [each.entry.id for each in predictions() if each.estimate.verdict.free_gib < 0]
    assert outside == ["dgxc-24.11-nemotron-340b-bf16-128", "dgxc-24.11-nemotron-340b-fp8-128"]
    assert sum(not each.estimate.fits for each in predictions()) == 7


def test_what_more_replicas_cost():
    """From the fewest to the most GPUs of a model, with as many microbatches, an iteration got 1 to 10% longer. What is
    predicted is less, by a tenth at most."""
    found = defaultdict(list)
    for each in predictions():
        entry = each.entry
        found[entry.model, entry.software.fp8].append((entry.cluster.num_gpus, each.estimate.seconds, entry.seconds))
    several = [sorted(runs) for runs in found.values() if len(runs) > 1]
    assert len(several) == 12
    for runs in several:
        (_, predicted, measured), (_, last_predicted, last_measured) = runs[0], runs[-1]
        grew, did_grow = last_predicted / predicted, last_measured / measured
        assert 0.998 < grew < did_grow < 1.11 and did_grow - grew < 0.1
