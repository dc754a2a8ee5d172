"""The study of freezing in finetune.py: what it reads of runs, what an arm runs, and all of it once."""

import argparse
import json

import pytest

from papers.pipetransformer import freeze_finetune, freeze_study

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


def test_the_reviews_are_cut_to_the_batches_that_freezing_counts(tmp_path, monkeypatch, capsys):
    """The BERT's data and model come from one call, which needs the archive; its intervals are of the samples kept."""
    options = argparse.Namespace(output=tmp_path, model="bert", epochs=None, reviews=None)
    study = freeze_finetune.STUDIES["bert"](options)
    with pytest.raises(ValueError, match=r"--reviews is needed: the archive that examples/sentiment\.py names"):
        study.prepare()
    calls = []
    monkeypatch.setattr(freeze_finetune, "python", lambda *argv: calls.append(argv))
    options.reviews = tmp_path / "archive.tar.gz"
    study.prepare()
    [made] = calls
    assert made[0] == "examples/sentiment.py" and made[-2:] == ("--layers", "8")
    command = study.command(0, test=False)
    (kept,) = (int(command[at + 1]) for at, word in enumerate(command) if word == "--max_train_samples")
    assert study.batches(0) == kept / freeze_finetune.BATCH and study.epochs_of_interval * study.batches(0) % 1 == 0
    assert command[command.index("--train_file") + 1] == str(study.files(0)["train"]) == f"{made[3]}/train.jsonl"


def test_frozen_layers_over_time_are_shown(capsys):
    run = {"seconds": 1.0, "validation": [[1.0, 0.5]], "test": 0.5, "changes": []}
    frozen = {**run, "changes": [[30, 4, 2, 1, 0.1], [60, 0, 2, 1, 0.1]]}
    result = {"model": "bert", "epochs": 1, "way": [1, 0.5], "tried": {}, "runs": {"dense": [run], "watched": [frozen]}}
    freeze_study.show(result, freeze_study.terminal(120))
    assert "watched, run 1: frozen layers: 4 from batch 30 on, 0 from batch 60 on" in capsys.readouterr().out


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
