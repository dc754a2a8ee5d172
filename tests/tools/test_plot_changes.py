"""The picture of a run that changed its pipeline."""

import json

import pytest

from tools import plot_changes

CHANGE = {"frozen_layers": 2, "pipeline_ranks": 2, "replicas": 2, "change_seconds": 0.5, "seconds_predicted": 0.04}
RECORDS = [
    {"iteration": 1, "consumed_samples": 8, "iteration_time_ms": 100.0},
    {"iteration": 2, "consumed_samples": 16, "iteration_time_ms": 100.0},
    {"iteration": 2, **CHANGE},
    {"iteration": 2, "validation_loss": 1.0},
    {"iteration": 3, "consumed_samples": 24, "iteration_time_ms": 50.0},
]


def written(path, records):
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def test_a_run_in_seconds(tmp_path):
    """Changes take their time between batches; a prediction holds from its change on."""
    course = plot_changes.read_course(written(tmp_path / "m.jsonl", RECORDS))
    assert [each for pair in course.batches for each in pair] == pytest.approx([0.1, 80.0, 0.2, 80.0, 0.75, 160.0])
    assert course.changes == [pytest.approx((0.2, 0.7))]
    first, second = course.stretches
    assert (first.ranks, first.predicted) == (None, None)
    assert (second.frozen, second.ranks, second.replicas) == (2, 2, 2)
    assert second.predicted == pytest.approx(200.0)


def test_draws_and_prints(tmp_path, capsys):
    metrics, picture = written(tmp_path / "m.jsonl", RECORDS), tmp_path / "out" / "changes.png"
    assert plot_changes.main([str(metrics), "--output", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert capsys.readouterr().out.splitlines() == [
        "at first: 2 batches, 80.0 samples/s", "2 frozen, 2 x 2: 1 batches, 160.0 samples/s, predicted 200.0",
    ]  # fmt: skip


@pytest.mark.parametrize("records", [[], RECORDS[:2]])
def test_without_a_change(records, tmp_path, capsys):
    metrics = written(tmp_path / "m.jsonl", records)
    assert plot_changes.main([str(metrics), "--output", str(tmp_path / "x.png")]) == 1
    assert "has no change of a pipeline" in capsys.readouterr().err
