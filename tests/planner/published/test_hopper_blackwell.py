"""The file of published runs on H100, B200 and GB200: all are read, and stand as near as the docs say."""

import json
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megatron.planner.published.entries import Entry, Unpredictable, load_entries
from megatron.planner.published.prediction import Prediction, predict
from megatron.planner.search import Training
from megatron.planner.time.calibration import default_constants
from tests.planner.search.helper import run

FILE = Path(__file__).parents[3] / "benchmarks" / "published" / "hopper_blackwell.json"
ABOUT = json.loads(FILE.read_text())["about"]


@cache
def entries() -> list[Entry | Unpredictable]:
    return load_entries(FILE)


@cache
def predictions() -> dict[str, Prediction]:
    """By id."""
    found = (each for each in entries() if isinstance(each, Entry))
    return {entry.id: predict(entry, default_constants()) for entry in found}


def kind_of(entry: Entry) -> str:
    """As docs/planner.md has it in its table."""
    if entry.model.experts is not None:
        kind = "experts"
    elif entry.configuration.sharding is not None:
        kind = "FSDP"
    else:
        kind = "context" if entry.configuration.context > 1 else "dense"
    return f"{kind}, {'H100' if entry.cluster.gpu == 'H100' else 'Blackwell'}"


def errors() -> dict[str, list[float]]:
    """Predicted over measured times, less 1, by kind."""
    found = defaultdict(list)
    for each in predictions().values():
        found[kind_of(each.entry)].append(each.errors["iteration"])
    return found


def test_each_is_predicted_or_refused_for_the_reason_that_the_file_names():
    refused = [each for each in entries() if isinstance(each, Unpredictable)]
    assert len(entries()) == 79 and len(refused) == 9
    for each in refused:
        assert each.reason.partition(";")[0] in ABOUT, each
    assert all(each.errors for each in predictions().values())


def test_nothing_of_a_run_is_left_unread():
    """No measurement, no guess of what a recipe says: precision, overlaps with replicas, recomputation apart, which
    none of them has."""
    for each in entries():
        if isinstance(each, Entry):
            assert not each.unread
            assert not [text for text in each.assumed if "reductions over" in text or "GPU " in text], each.id


@pytest.mark.parametrize(
    ("kind", "count", "bar"),
    [
        ("dense, H100", 15, 0.06), ("context, H100", 8, 0.06), ("FSDP, H100", 2, 0.10), ("dense, Blackwell", 14, 0.15),
        ("context, Blackwell", 5, 0.18), ("experts, H100", 10, 0.20), ("experts, Blackwell", 16, 0.12),
    ],
)  # fmt: skip
def test_mean_errors_by_kind(kind, count, bar):
    """No bar is tight: a rule that is lost shows, and no constant is fitted to these runs."""
    found = errors()[kind]
    assert len(found) == count
    assert sum(map(abs, found)) / count < bar


def test_copies_beside_another_microbatch_save_what_they_saved():
    """The matched pair: 24.7 s without, 21.0 s with."""
    without, beside = (
        predictions()[f"bridge-2026-07-h100-qwen3-30b-a3b-bf16-overlap-{each}"] for each in ("off", "on")
    )
    saved = 1 - beside.estimate.seconds / without.estimate.seconds
    assert saved == pytest.approx(1 - 20.9920 / 24.7138, abs=0.03)
    assert abs(without.errors["iteration"]) < 0.05 and abs(beside.errors["iteration"]) < 0.05
    assert abs(beside.peak_error) < 0.05


def test_a_search_finds_the_degrees_of_the_fastest_published_run():
    """Of that model on 16 H100, over t, p, microbatches and stages on a rank, with 8 and 16 ranks that have different
    experts."""
    entry = predictions()["bridge-2026-07-h100-qwen3-30b-a3b-bf16-overlap-on"].entry
    asked = entry.configuration
    outcome = run(
        entry.model, entry.cluster, entry.software, Training(saves_scores=False, fuses_softmax=False),
        global_batch_size=asked.global_batch_size, expert=(8, 16), expert_tensor=1, schedules=("flush", "interleaved"),
    )  # fmt: skip
    best = outcome.best.estimate.configuration
    for name in ("tensor", "pipeline", "data", "expert", "micro_batch_size", "recompute"):
        assert getattr(best, name) == getattr(asked, name), name


def test_memory_of_runs_that_ran():
    """All of these ran. One is taken not to: whether its weights were in FP8 alone, which would do, is not printed."""
    outside = [each.entry.id for each in predictions().values() if each.estimate.verdict.free_gib < 0]
    assert outside == ["nemo-24.07-nemotron-340b"]
    (entry,) = [each for each in entries() if each.id == outside[0]]
    alone = replace(entry, software=replace(entry.software, fp8_weights=True))
    assert predict(alone, default_constants()).estimate.verdict.free_gib > 0
