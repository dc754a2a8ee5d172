"""The benchmark of split backwards without a clock: it measures what it says, at tiny sizes."""

import pytest

from tests.benchmarks.test_emulated import rows_of

TINY = "--layers 1 --hidden-size 32 --heads 2 --seq-length 16 --micro-batch-size 1 --vocab-size 63"


@pytest.mark.full
def test_halves_of_every_stage_and_scope(tmp_path):
    """A time for each repeat; the last stage keeps its output layer's factors, too, whatever is recomputed."""
    rows = rows_of(
        "papers.zero_bubble", f"halves {TINY} --repeats 3 --places middle last --recompute none layer", tmp_path
    )
    assert [(row["place"], row["recompute"]) for row in rows] == [
        (place, scope) for place in ("middle", "last") for scope in ("none", "layer")
    ]
    for row in rows:
        assert all(len(row[name]) == 3 and min(row[name]) > 0 for name in ("backward", "input", "weight", "products"))
    kept = {(row["place"], row["recompute"]): row["kept_bytes"] for row in rows}
    assert kept["middle", "none"] == kept["middle", "layer"] == 4 * 16 * 16 * 32
    assert kept["last", "none"] == kept["last", "layer"] > kept["middle", "none"]
    assert rows[1]["saved_bytes"] < rows[0]["saved_bytes"]


@pytest.mark.full
def test_both_schedules_are_measured_and_simulated(tmp_path):
    """For each round a measured and a simulated batch, which takes at least what a stage computes."""
    rows = rows_of("papers.zero_bubble", f"pipeline {TINY} --rounds 2 --batches 2", tmp_path)
    assert [row["schedule"] for row in rows] == ["zb-h1", "flush"]
    for row in rows:
        assert len(row["measured"]) == len(row["simulated"]) == len(row["own"]) == 2
        for own, simulated in zip(row["own"], row["simulated"], strict=True):
            halves = "input", "weight"
            parts = ("forward", *halves) if row["schedule"] == "zb-h1" else ("forward", "backward")
            assert simulated >= max(2 * sum(own[name][stage] for name in parts) for stage in (0, 1))


@pytest.mark.full
def test_modules_of_plain_torch(tmp_path):
    """Both ways to split are timed in each repeat, and both keep something."""
    rows = rows_of("papers.zero_bubble", f"modules {TINY} --repeats 3", tmp_path)
    names = ("whole", "input", "weight", "torch_input", "torch_weight")
    for row in rows:
        assert all(len(row[name]) == 3 and min(row[name]) >= 0 for name in names)
        assert row["kept_bytes"] == 4 * 16 * 32 * (1 + 4 + 4 + 1) and row["torch_kept_bytes"] > 0
