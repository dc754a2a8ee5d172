"""The files of published runs in benchmarks/published: all are read, and stand as near as the docs say.

No constant is fitted to them, and no bar is tight: a rule that is lost shows.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megatron.planner.published.entries import Entry, Unpredictable, load_entries
from megatron.planner.published.prediction import Prediction, predict
from megatron.planner.search import Training
from megatron.planner.time.calibration import default_constants
from tests.planner.search.helper import run

FOLDER = Path(__file__).parents[3] / "benchmarks" / "published"
SEVERAL, HOPPER, CLOUD = "several_clusters", "hopper_blackwell", "dgx_cloud_h100"


@cache
def entries(name: str) -> list[Entry | Unpredictable]:
    return load_entries(FOLDER / f"{name}.json")


@cache
def predictions(name: str) -> dict[str, Prediction]:
    """By id."""
    found = (each for each in entries(name) if isinstance(each, Entry))
    return {entry.id: predict(entry, default_constants()) for entry in found}


def errors(name: str, kind_of: Callable[[Entry], object]) -> dict[object, list[float]]:
    """Predicted over measured times of iterations, less 1, by kind."""
    found = defaultdict(list)
    for each in predictions(name).values():
        if each.entry.seconds is not None:
            found[kind_of(each.entry)].append(each.errors["iteration"])
    return found


def source(entry: Entry) -> str:
    return entry.source.split()[0].strip(",")


def fp8_and_context(entry: Entry) -> tuple[bool, bool]:
    return entry.software.fp8, entry.configuration.context > 1


def kind_of(entry: Entry) -> str:
    """As docs/planner.md has it in its table."""
    if entry.model.experts is not None:
        kind = "experts"
    elif entry.configuration.sharding is not None:
        kind = "FSDP"
    else:
        kind = "context" if entry.configuration.context > 1 else "dense"
    return f"{kind}, {'H100' if entry.cluster.gpu == 'H100' else 'Blackwell'}"


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("name", "kinds", "kind", "count", "bar"),
    [
        (SEVERAL, source, "Zero", 30, 0.03), (SEVERAL, source, "Balancing", 8, 0.06),
        (SEVERAL, source, "BigScience", 45, 0.13), (SEVERAL, source, "MegaScale", 8, 0.12),
        (SEVERAL, source, "MosaicML", 9, 0.02),
        (HOPPER, kind_of, "dense, H100", 15, 0.06), (HOPPER, kind_of, "context, H100", 8, 0.06),
        (HOPPER, kind_of, "FSDP, H100", 2, 0.10), (HOPPER, kind_of, "dense, Blackwell", 14, 0.15),
        (HOPPER, kind_of, "context, Blackwell", 5, 0.18), (HOPPER, kind_of, "experts, H100", 10, 0.20),
        (HOPPER, kind_of, "experts, Blackwell", 16, 0.12),
        (CLOUD, fp8_and_context, (False, False), 18, 0.07), (CLOUD, fp8_and_context, (False, True), 17, 0.03),
        (CLOUD, fp8_and_context, (True, False), 18, 0.08), (CLOUD, fp8_and_context, (True, True), 17, 0.07),
    ],
)  # fmt: skip
def test_mean_errors(name, kinds, kind, count, bar):
    found = errors(name, kinds)[kind]
    assert len(found) == count and sum(map(abs, found)) / count < bar
    assert name != CLOUD or max(map(abs, found)) < 0.15


def test_each_is_predicted_or_refused_for_the_reason_that_the_file_names():
    about = json.loads((FOLDER / f"{HOPPER}.json").read_text())["about"]
    for name, count, num_refused in ((SEVERAL, 104, 0), (HOPPER, 79, 9), (CLOUD, 70, 0)):
        refused = [each for each in entries(name) if isinstance(each, Unpredictable)]
        assert len(entries(name)) == count and len(refused) == num_refused
        assert all(each.reason.partition(";")[0] in about for each in refused)
        assert all(each.errors for each in predictions(name).values())


def test_heads_that_are_not_aligned_are_no_farther_off_than_others():
    """150 elements of 14,400 over 96 heads, and 108 of 13,824 over 128: 33 to 39% too fast before they were priced."""
    runs = {name: each for name, each in predictions(SEVERAL).items() if "h14400" in name or "h13824-a128" in name}
    assert len(runs) == 10 and all(abs(each.errors["iteration"]) < 0.13 for each in runs.values())


def test_nothing_of_a_run_is_left_unread():
    """No measurement, no guess of what a recipe says: precision, overlaps with replicas, recomputation apart, which
    none of them has."""
    for each in entries(HOPPER):
        if isinstance(each, Entry):
            assert not each.unread
            assert not [text for text in each.assumed if "reductions over" in text or "GPU " in text], each.id


def test_copies_beside_another_microbatch_save_what_they_saved():
    """The matched pair: 24.7 s without, 21.0 s with."""
    without, beside = (
        predictions(HOPPER)[f"bridge-2026-07-h100-qwen3-30b-a3b-bf16-overlap-{each}"] for each in ("off", "on")
    )
    saved = 1 - beside.estimate.seconds / without.estimate.seconds
    assert saved == pytest.approx(1 - 20.9920 / 24.7138, abs=0.03)
    assert abs(without.errors["iteration"]) < 0.05 and abs(beside.errors["iteration"]) < 0.05
    assert abs(beside.peak_error) < 0.05


def test_a_search_finds_the_degrees_of_the_fastest_published_run():
    """Of that model on 16 H100, over t, p, microbatches and stages on a rank, with 8 and 16 ranks that have different
    experts."""
    entry = predictions(HOPPER)["bridge-2026-07-h100-qwen3-30b-a3b-bf16-overlap-on"].entry
    asked = entry.configuration
    outcome = run(
        entry.model, entry.cluster, entry.software, Training(saves_scores=False, fuses_softmax=False),
        global_batch_size=asked.global_batch_size, expert=(8, 16), expert_tensor=1, schedules=("flush", "interleaved"),
    )  # fmt: skip
    best = outcome.best.estimate.configuration
    for name in ("tensor", "pipeline", "data", "expert", "micro_batch_size", "recompute"):
        assert getattr(best, name) == getattr(asked, name), name


def test_memory_of_runs_on_hopper_and_blackwell():
    """All of these ran. One is taken not to: whether its weights were in FP8 alone, which would do, is not printed."""
    outside = [each.entry.id for each in predictions(HOPPER).values() if each.estimate.verdict.free_gib < 0]
    assert outside == ["nemo-24.07-nemotron-340b"]
    (entry,) = [each for each in entries(HOPPER) if each.id == outside[0]]
    alone = replace(entry, software=replace(entry.software, fp8_weights=True))
    assert predict(alone, default_constants()).estimate.verdict.free_gib > 0


def test_memory_of_runs_in_the_cloud():
    """All of these ran. Five are said to be borderline, and 340B on the fewest GPUs not to fit."""
    outside = [each.entry.id for each in predictions(CLOUD).values() if each.estimate.verdict.free_gib < 0]
    assert outside == ["dgxc-24.11-nemotron-340b-bf16-128", "dgxc-24.11-nemotron-340b-fp8-128"]
    assert sum(not each.estimate.fits for each in predictions(CLOUD).values()) == 7


def test_what_more_replicas_cost():
    """From the fewest to the most GPUs of a model, with as many microbatches, an iteration got 1 to 10% longer. What is
    predicted is less, by a tenth at most."""
    found = defaultdict(list)
    for each in predictions(CLOUD).values():
        entry = each.entry
        found[entry.model, entry.software.fp8].append((entry.cluster.num_gpus, each.estimate.seconds, entry.seconds))
    several = [sorted(runs) for runs in found.values() if len(runs) > 1]
    assert len(several) == 12
    for runs in several:
        (_, predicted, measured), (_, last_predicted, last_measured) = runs[0], runs[-1]
        grew, did_grow = last_predicted / predicted, last_measured / measured
        assert 0.998 < grew < did_grow < 1.11 and did_grow - grew < 0.1
