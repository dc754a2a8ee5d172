"""The study of freezing on real data: what it reads of runs, how it chooses, and all of it once."""

import argparse
import json
import math

import pytest
from rich.console import Console

from papers.pipetransformer import freeze_peers, freeze_study


def run(seconds: float, accuracies: list[float], test: float | None, frozen: int) -> dict:
    return {
        "seconds": seconds,
        "validation": [[(place + 1) * seconds / len(accuracies), each] for place, each in enumerate(accuracies)],
        "test": test,
        "changes": [[1, frozen, 1, 2, 0.5]] if frozen else [],
    }


def test_seconds_of_batches_and_changes(tmp_path):
    """Evaluations do not count; validation accuracies stand where they were found."""
    records = [
        {"iteration": 1, "iteration_time_ms": 500.0},
        {"iteration": 1, "validation_accuracy": 0.5, "evaluation_time_ms": 99.0},
        {"iteration": 1, "frozen_layers": 2, "pipeline_ranks": 1, "replicas": 2, "change_seconds": 0.25},
        {"iteration": 2, "iteration_time_ms": 250.0},
        {"iteration": 2, "validation_accuracy": 0.75},
        {"iteration": 2, "test_accuracy": 0.7},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    assert freeze_study.read_run(path) == {
        "seconds": 1.0,
        "validation": [[0.5, 0.5], [1.0, 0.75]],
        "test": 0.7,
        "changes": [[1, 2, 1, 2, 0.25]],
    }


class Tried:
    """A study whose runs are given: seconds and validation accuracy by way."""

    ways = (1, 0.2), (1, 0.4), (1, 0.6)
    tried_seeds, tried_arm = (7,), "all"
    found: dict

    def __init__(self, **found: tuple[float, float]) -> None:
        self.options = argparse.Namespace(sooner=1.2)
        self.found = found

    def arm(self, name, seed, way, *, test):
        assert not test and seed == 7
        seconds, accuracy = self.found["dense" if name == "dense" else f"a{round(10 * way[1])}"]
        return run(seconds, [accuracy], None, 0)


@pytest.mark.parametrize(
    ("found", "way"),
    [
        ({"a2": (9.0, 0.90), "a4": (8.0, 0.85), "a6": (7.0, 0.89)}, (1, 0.4)),
        ({"a2": (8.0, 0.80), "a4": (7.5, 0.95), "a6": (7.0, 0.95)}, (1, 0.2)),
        ({"a2": (9.5, 0.95), "a4": (8.6, 0.85), "a6": (9.0, 0.95)}, (1, 0.4)),
    ],
    ids=["the latest that is soon enough", "all are", "none is: the soonest"],
)
def test_the_way_is_chosen_by_seconds_alone(found, way):
    """Ways stand from the latest to the earliest; accuracies do not matter."""
    assert freeze_study.choose(Tried(dense=(10.0, 0.90), **found))[0] == way


def test_the_interval_of_a_mean():
    """Student's t for five values."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    half = 2.776 * math.sqrt(2.5) / math.sqrt(5)
    assert freeze_study.interval(values) == f"{3.0:+.2f} ± {half:.2f}"


def test_the_table(capsys):
    """Ratios are within a seed; dense's accuracy is reached where it first is."""
    runs = {
        "dense": [run(10.0, [0.5, 0.8], 0.9, 0), run(20.0, [0.8, 0.8], 0.8, 0)],
        "frozen": [run(8.0, [0.6, 0.8], 0.88, 3), run(10.0, [0.5, 0.7], 0.8, 3)],
        "all": [run(5.0, [0.8, 0.9], 0.9, 3), run(10.0, [0.8, 0.8], 0.8, 3)],
    }
    result = {"model": "vit", "epochs": 2, "way": (1, 0.5), "tried": {"dense": [(1.0, 0.5)]}, "runs": runs}
    freeze_study.show(result, Console(width=140, no_color=True))
    text = capsys.readouterr().out
    assert "1.62 (1.25-2.00)" in text and "2.00 (2.00-2.00)" in text
    assert "0.80 (1 of 2)" in text and "0.38 (2 of 2)" in text


def test_depths_of_the_bound():
    assert freeze_peers.depths(0.5, 5) == [0, 4, 6, 7, 7]


@pytest.mark.full
def test_all_of_it(tmp_path, capsys, monkeypatch):
    """A short run of each arm; the test data are read once a run."""
    pytest.importorskip("sklearn")
    monkeypatch.setattr(
        "sys.argv", ["", "vit", "--output", str(tmp_path), "--seeds", "1", "--epochs", "4", "--way", "1", "0.5"]
    )
    assert freeze_study.main() == 0
    runs = json.loads((tmp_path / "vit.json").read_text())["runs"]
    for name, (found,) in runs.items():
        assert len(found["validation"]) == 4 and 0 <= found["test"] <= 1 and found["seconds"] > 0
        assert bool(found["changes"]) == (name != "dense")
    capsys.readouterr()


@pytest.mark.full
@pytest.mark.parametrize("contender", [*freeze_peers.PEERS, "all"])
def test_a_turn(tmp_path, contender):
    """Peers with a stage that is frozen as a whole, and this project's way, begin with one loss."""
    pytest.importorskip("sklearn")
    freeze_study.python("examples/digits.py", "--classes", "5-9", "--folder", str(tmp_path))
    seconds, loss = freeze_peers.turn(contender, 6, tmp_path)
    assert seconds > 0 and loss == pytest.approx(freeze_peers.turn("frozen", 0, tmp_path)[1], rel=1e-5)
