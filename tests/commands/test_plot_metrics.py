"""The loss-curve tool: what it reads from metrics files, what it draws, and how it refuses."""

import json

import pytest

from megatron.commands import plot_metrics


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_repeated_iterations_count_once(tmp_path):
    """Where a resumed run repeats an iteration, its later figure is drawn; what was not finite is left out."""
    path = write(
        tmp_path / "run.jsonl",
        {"iteration": 1, "lm_loss": 4.0},
        {"iteration": 2, "lm_loss": 3.0},
        {"iteration": 2, "validation_loss": 3.5, "validation_ppl": 33.1},
        {"iteration": 2, "lm_loss": 3.25},
        {"iteration": 3, "lm_loss": None},
    )
    curves = plot_metrics.read_curves(path, "run")
    assert curves.training == {1: 4.0, 2: 3.25}
    assert curves.validation == {2: 3.5}


def test_runs_share_one_picture(tmp_path, capsys):
    """Two runs give one picture, and their last validation losses are printed under their labels."""
    for name, loss in (("a", 2.0), ("b", 2.5)):
        write(tmp_path / f"{name}.jsonl", {"iteration": 5, "lm_loss": loss}, {"iteration": 5, "validation_loss": loss})
    picture = tmp_path / "made" / "loss.png"
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    with pytest.raises(SystemExit) as exit_info:
        plot_metrics.main([*files, "--labels", "flush", "2bw", "--output", str(picture)])
    assert exit_info.value.code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "flush: validation loss 2.0000" in printed and "2bw: validation loss 2.5000" in printed


def test_files_without_losses_are_refused(tmp_path, capsys):
    """A missing file, one without losses and one of other lines end with one sentence that names the file."""
    empty = write(tmp_path / "empty.jsonl", {"iteration": 1})
    other = write(tmp_path / "other.jsonl", [1, 2])
    for path in (empty, other, tmp_path / "missing.jsonl"):
        with pytest.raises(SystemExit) as exit_info:
            plot_metrics.main([str(path)])
        assert exit_info.value.code == 1
        assert path.name in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--tolerance", "--fall"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_share_that_is_no_number_is_refused(capsys, flag, value):
    """With nan every comparison would pass."""
    with pytest.raises(SystemExit) as end:
        plot_metrics.main(["none.jsonl", flag, value])
    assert end.value.code == 2 and f"argument {flag}: '{value}' is no finite number" in capsys.readouterr().err


@pytest.mark.parametrize(("other", "status"), [(2.01, 0), (2.03, 1), (None, 1)])
def test_tolerance_decides_the_exit_status(tmp_path, other, status):
    """Validation losses 0.5% apart pass a tolerance of 1%, 1.5% fail it, and so does a run without any."""
    files = []
    for name, loss in (("a", 2.0), ("b", other)):
        records = [{"iteration": 5, "lm_loss": 2.0}, {"iteration": 5, "validation_loss": loss}]
        files.append(str(write(tmp_path / f"{name}.jsonl", *records)))
    with pytest.raises(SystemExit) as exit_info:
        plot_metrics.main([*files, "--output", str(tmp_path / "loss.png"), "--tolerance", "0.01"])
    assert exit_info.value.code == status


@pytest.mark.parametrize("check", ["--tolerance", "--fall"])
def test_a_run_that_ends_without_a_number_fails_every_check(tmp_path, check):
    """The metrics file has null for what is not finite. The losses before it do not count."""
    records = [{"iteration": each, "validation_loss": loss} for each, loss in ((5, 4.0), (9, 3.0), (12, None))]
    path = write(tmp_path / "run.jsonl", *records)
    whole = write(tmp_path / "whole.jsonl", *records[:2])
    for files in ([whole, path], [path, whole]):
        with pytest.raises(SystemExit) as exit_info:
            plot_metrics.main([*map(str, files), "--output", str(tmp_path / "loss.png"), check, "0.1"])
        assert exit_info.value.code == 1


@pytest.mark.parametrize(("last", "status"), [(3.0, 0), (3.9, 1)])
def test_fall_decides_the_exit_status(tmp_path, last, status):
    """A validation loss that falls from 4 to 3 is 10% lower, one that falls to 3.9 is not."""
    records = [{"iteration": 5, "validation_loss": 4.0}, {"iteration": 9, "validation_loss": last}]
    path = write(tmp_path / "run.jsonl", *records)
    with pytest.raises(SystemExit) as exit_info:
        plot_metrics.main([str(path), "--output", str(tmp_path / "loss.png"), "--fall", "0.1"])
    assert exit_info.value.code == status


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--tolerance", "of iterations that differ: one's 5, two's 9; train all alike"),
        ("--fall", "and one has one, of iteration 5; train longer, or evaluate more often"),
    ],
)
def test_losses_that_cannot_be_compared_are_refused(tmp_path, capsys, flag, message):
    """The last losses of a short and a long run say nothing of their schedules; a single loss has not fallen."""
    records = [{"iteration": each, "validation_loss": 4.0} for each in (5, 9)]
    files = [write(tmp_path / "one.jsonl", records[0]), write(tmp_path / "two.jsonl", *records)]
    with pytest.raises(SystemExit) as exit_info:
        plot_metrics.main([*map(str, files), "--output", str(tmp_path / "loss.png"), flag, "0.1"])
    assert exit_info.value.code == 1 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "record", [{"step": 1, "loss": 2.0}, {"iteration": 1, "loss": "2"}, {"iteration": None, "validation_loss": 2.0}]
)
def test_other_values_than_a_training_program_writes_are_refused(tmp_path, capsys, record):
    """Metrics of fine-tuning, which count steps, and a text for a number: one sentence with file and line."""
    path = write(tmp_path / "run.jsonl", {"iteration": 1, "lm_loss": 2.0}, record)
    with pytest.raises(SystemExit) as exit_info:
        plot_metrics.main([str(path), "--output", str(tmp_path / "loss.png")])
    assert exit_info.value.code == 1 and "run.jsonl, line 2, " in capsys.readouterr().err
