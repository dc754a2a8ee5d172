"""The picture of a run that changed its pipeline."""

import json

import pytest

from megatron.commands import plot_changes
from megatron.commands.plot_changes import Shape

CHANGE = {"frozen_layers": 2, "pipeline_ranks": 2, "replicas": 2, "change_seconds": 0.5, "seconds_predicted": 0.04}
RECORDS = [
    {"iteration": 1, "consumed_samples": 8, "iteration_time_ms": 100.0},
    {"iteration": 2, "consumed_samples": 16, "iteration_time_ms": 100.0},
    {"iteration": 2, **CHANGE},
    {"iteration": 2, "validation_loss": 1.0},
    {"iteration": 3, "consumed_samples": 24, "iteration_time_ms": 50.0},
]


def beginning(iteration, samples, frozen=0, ranks=4, replicas=1):
    """The record with which a run begins, or goes on from a checkpoint."""
    shape = {"frozen_layers": frozen, "pipeline_ranks": ranks, "replicas": replicas}
    return {"iteration": iteration, "initial_samples": samples, **{f"initial_{key}": x for key, x in shape.items()}}


def written(path, records):
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def speeds(course):
    return [round(speed, 6) for _, speed in course.batches]


def test_a_run_in_seconds(tmp_path):
    """Changes take their time between batches; a prediction holds from its change on."""
    course = plot_changes.read_course(written(tmp_path / "m.jsonl", [beginning(0, 0), *RECORDS]))
    assert [each for pair in course.batches for each in pair] == pytest.approx([0.1, 80.0, 0.2, 80.0, 0.75, 160.0])
    assert course.changes == [pytest.approx((0.2, 0.7))]
    first, second = course.stretches
    assert (first.shape, first.predicted, second.shape) == (Shape(4, 1, 0), None, Shape(2, 2, 2))
    assert (first.begin, first.end, second.begin, second.end) == pytest.approx((0.0, 0.2, 0.7, 0.75))
    assert second.predicted == pytest.approx(200.0)


def test_draws_and_prints(tmp_path, capsys):
    metrics, picture = written(tmp_path / "m.jsonl", [beginning(0, 0), *RECORDS]), tmp_path / "out" / "changes.png"
    assert plot_changes.main([str(metrics), "--output", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert capsys.readouterr().out.splitlines() == [
        "0 frozen, 4 x 1: 2 batches, 80.0 samples/s", "2 frozen, 2 x 2: 1 batches, 160.0 samples/s, predicted 200.0",
    ]  # fmt: skip


def test_steps_begin_with_the_first_batch(tmp_path):
    """The steps of ranks, replicas and frozen layers; each in a picture of its own, so that none covers another."""
    from matplotlib.figure import Figure

    course = plot_changes.read_course(written(tmp_path / "m.jsonl", [beginning(0, 0), *RECORDS]))
    for number, values in enumerate(([4, 2, 2], [1, 2, 2], [0, 2, 2])):
        axes = Figure().add_subplot()
        plot_changes._draw_steps(axes, course, number)
        (line,) = axes.lines
        assert line.get_xdata() == pytest.approx([0.0, 0.7, 0.75]) and list(line.get_ydata()) == values


def test_a_file_that_does_not_say_how_the_run_began(tmp_path, capsys):
    """As files of older runs: steps from the first change on."""
    metrics, picture = written(tmp_path / "m.jsonl", RECORDS), tmp_path / "changes.png"
    assert plot_changes.main([str(metrics), "--output", str(picture)]) == 0
    assert capsys.readouterr().out.startswith("at first: 2 batches, 80.0 samples/s\n") and picture.exists()


@pytest.mark.parametrize("known", [True, False])
def test_a_file_that_begins_later(tmp_path, known):
    """Its first batch has the samples since the run went on, or where that is not said, as many as the next one."""
    records = [
        {**each, "iteration": each["iteration"] + 40, **({"consumed_samples": each["consumed_samples"] + 300}
         if "consumed_samples" in each else {})}
        for each in RECORDS
    ]  # fmt: skip
    course = plot_changes.read_course(written(tmp_path / "m.jsonl", [beginning(40, 300)] * known + records))
    assert speeds(course) == [80.0, 80.0, 160.0]


def test_batches_that_grow(tmp_path):
    """Each is as large as what was consumed since the one before; of lines that are lost, the mean."""
    grown = [
        *RECORDS,
        {"iteration": 4, "consumed_samples": 40, "iteration_time_ms": 50.0},
        {"iteration": 6, "consumed_samples": 72, "iteration_time_ms": 50.0},
    ]
    course = plot_changes.read_course(written(tmp_path / "m.jsonl", grown))
    assert speeds(course) == [80.0, 80.0, 160.0, 320.0, 320.0]


def test_a_resumed_run(tmp_path):
    """What it repeats counts as it was the second time; it goes on in the pipeline that its record says."""
    lost = [
        {"iteration": 4, "consumed_samples": 32, "iteration_time_ms": 1.0},
        {"iteration": 4, **CHANGE, "pipeline_ranks": 1, "replicas": 4},
    ]
    again = [
        {"iteration": 3, "consumed_samples": 24, "iteration_time_ms": 40.0},
        {"iteration": 4, "consumed_samples": 32, "iteration_time_ms": 40.0},
    ]
    first = [beginning(0, 0), *RECORDS, *lost]
    course = plot_changes.read_course(written(tmp_path / "m.jsonl", [*first, beginning(2, 16, 2, 2, 2), *again]))
    assert speeds(course) == [80.0, 80.0, 200.0, 200.0] and len(course.changes) == 1
    assert [each.shape for each in course.stretches] == [Shape(4, 1, 0), Shape(2, 2, 2)]
    assert course.stretches[1].predicted == pytest.approx(200.0)
    course = plot_changes.read_course(written(tmp_path / "m.jsonl", [*first, *again]))
    assert speeds(course) == [80.0, 80.0, 200.0, 200.0]
    other = plot_changes.read_course(written(tmp_path / "m.jsonl", [*first, beginning(2, 16, 2, 1, 1), *again]))
    assert (other.stretches[-1].shape, other.stretches[-1].predicted) == (Shape(1, 1, 2), None)


def test_a_new_run_in_the_same_file(tmp_path):
    """Is the one that is drawn."""
    course = plot_changes.read_course(written(tmp_path / "m.jsonl", [*RECORDS, beginning(0, 0), *RECORDS]))
    assert speeds(course) == [80.0, 80.0, 160.0]
    assert [each.shape for each in course.stretches] == [Shape(4, 1, 0), Shape(2, 2, 2)]


@pytest.mark.parametrize(
    ("records", "fault"),
    [
        ([{"step": 3, "frozen_layers": 2, "change_time_ms": 1.0}], "line 1, has frozen_layers and no iteration"),
        (RECORDS[2:3], "has no batch of a pipeline whose ranks it says"),
        (RECORDS[:3], "has no batch of a pipeline whose ranks it says"),
        ([{**RECORDS[0], "iteration_time_ms": "100"}, *RECORDS[1:]], "iteration_time_ms is '100'"),
        ([{**RECORDS[0], "iteration_time_ms": 0.0}, *RECORDS[1:]], "iteration_time_ms is 0.0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(records, fault, tmp_path, capsys):
    """Metrics of fine-tuning, changes without a batch, and values of other types: one sentence names the file."""
    metrics = written(tmp_path / "m.jsonl", records)
    assert plot_changes.main([str(metrics), "--output", str(tmp_path / "x.png")]) == 1
    error = capsys.readouterr().err
    assert "m.jsonl" in error and fault in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("records", [[], RECORDS[:2]])
def test_without_a_change(records, tmp_path, capsys):
    metrics = written(tmp_path / "m.jsonl", records)
    assert plot_changes.main([str(metrics), "--output", str(tmp_path / "x.png")]) == 1
    assert "has no change of a pipeline" in capsys.readouterr().err
