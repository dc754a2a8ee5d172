"""The study of freezing in finetune.py: what it reads of runs, what an arm runs, and all of it once."""

import argparse
import json

import pytest

from papers.pipetransformer import freeze_finetune

RECORDS = [
    {"step": 1, "loss": 1.0, "step_time_ms": 500.0},
    {"step": 2, "loss": 0.9, "step_time_ms": 750.0},
    {"step": 2, "eval_accuracy": 0.5, "eval_time_ms": 99.0},
    {"step": 2, "frozen_layers": 4, "change_time_ms": 250.0},
    {"step": 3, "loss": 0.8, "step_time_ms": 250.0},
    {"step": 3, "eval_accuracy": 0.75, "eval_time_ms": 99.0},
]


def write(path, records):
    path.write_text("".join(json.dumps(each) + "\n" for each in records))


def test_seconds_of_batches_and_changes(tmp_path):
    """Evaluations do not count; each batch is simulated with the layers that were frozen."""
    write(tmp_path / "metrics.jsonl", RECORDS)
    assert freeze_finetune.read_run(tmp_path / "metrics.jsonl", [0.4, 0.0, 0.0, 0.0, 0.1], start=2) == {
        "seconds": 1.75,
        "validation": [[1.25, 0.5], [1.75, 0.75]],
        "test": None,
        "changes": [[2, 4, 2, 1, 0.25]],
        "simulated": 0.9,
        "as_at_first": 1.875,
    }


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study whose launches write what a run would have written; `launched` has their commands."""
    options = argparse.Namespace(output=tmp_path, model="vit", epochs=None, reviews=None)
    made = freeze_finetune.VisionStudy(options, epochs=24, epochs_of_interval=2)
    made.launched = []

    def launch(function, folder, commands, **content):
        folder.mkdir(parents=True, exist_ok=True)
        if function.endswith("plan"):
            (folder / "partition.json").write_text("")
            (folder / "simulated.json").write_text("[0.4, 0, 0, 0, 0.1]")
            return
        made.launched.append(commands)
        (folder / "model").mkdir()
        write(folder / "metrics.jsonl", RECORDS)
        write(folder / "test.jsonl", [{"step": 0, "eval_accuracy": 0.7}])

    monkeypatch.setattr(freeze_finetune, "launch", launch)
    return made


def test_an_arm_reads_its_test_data_once_and_when_asked(study):
    pytest.importorskip("sklearn")
    assert study.arm("frozen", 3, (6, 0.5), test=False)["test"] is None
    [[tried]] = study.launched
    assert not [word for word in tried if "test.jsonl" in word]
    assert study.arm("frozen", 3, (6, 0.5), test=True)["test"] == 0.7
    trained, tested = study.launched[-1]
    assert trained[:-4] == tried[:-4] and "--do_train" not in tested
    assert tested[tested.index("--validation_file") + 1].endswith("data-3/test.jsonl")
    study.arm("frozen", 3, (6, 0.5), test=True)
    assert len(study.launched) == 2


def test_arms_differ_in_their_flags_of_freezing(study):
    pytest.importorskip("sklearn")
    flags = {}
    for name in study.arms:
        study.arm(name, 0, (6, 0.5), test=False)
        [command] = study.launched[-1]
        start = command.index("--overwrite_output_dir") + 1
        flags[name] = command[start : command.index("--seed")]
    batches = study.batches(0)
    rule = ["--freeze_training", "--freeze_alpha", "0.5", "--freeze_start", str(6 * batches)]
    rule += ["--freeze_interval", str(2 * batches)]
    assert flags == {"dense": [], "frozen": rule, "watched": [*rule, "--freeze_watch_validation", "0.02"]}


@pytest.mark.full
def test_all_of_it(tmp_path, capsys, monkeypatch):
    """A short run of each arm."""
    pytest.importorskip("sklearn")
    monkeypatch.setattr(freeze_finetune.VisionStudy, "pretraining_epochs", 1)
    argv = ["", "vit", "--output", str(tmp_path), "--seeds", "1", "--epochs", "4", "--way", "1", "0.5"]
    monkeypatch.setattr("sys.argv", argv)
    assert freeze_finetune.main() == 0
    runs = json.loads((tmp_path / "vit.json").read_text())["runs"]
    for name, (found,) in runs.items():
        assert len(found["validation"]) == 4 and 0 <= found["test"] <= 1 and found["seconds"] > 0
        assert bool(found["changes"]) == (name != "dense")
    assert runs["frozen"][0]["simulated"] < runs["dense"][0]["simulated"]
    assert "simulated sooner" in " ".join(capsys.readouterr().out.split())
