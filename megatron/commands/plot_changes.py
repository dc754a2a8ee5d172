"""Draw the course of a run that changes its pipeline, from its metrics file.

    python tools/plot_changes.py metrics.jsonl --output changes.png

A training program writes a metrics file with --metrics-file; with --freeze-training or --elastic-pipeline it has the
changes. The upper panels show the ranks of a pipeline, the replicas and the frozen layers as steps. The lower panel
shows samples a second: measured for each batch, their median, and the prediction made at each change. Time goes from
left to right, and changes are shaded. If a resumed run repeats iterations, the later figures are used.
"""

import argparse
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from megatron.documents import command_line
from megatron.documents.picture import new_figure, save
from megatron.trainer.report.metrics import read_metrics

_SHAPE = ("pipeline_ranks", "replicas", "frozen_layers")
_TITLES = ("ranks of\na pipeline", "replicas", "frozen\nlayers")
_NARROW = 0.015  # share of the picture's width below which a stretch has no room for its number
_INITIAL = "initial_"
"""The prefix of the names in a record that describes how a run begins, or resumes from a checkpoint."""
_NEEDS = {
    "iteration_time_ms": ("iteration", "consumed_samples"),
    "frozen_layers": ("iteration", *_SHAPE, "change_seconds"),
    f"{_INITIAL}frozen_layers": ("iteration", *(f"{_INITIAL}{name}" for name in _SHAPE), f"{_INITIAL}samples"),
}


@dataclass(frozen=True)
class Shape:
    """The numbers of ranks of a pipeline, of replicas and of frozen layers."""

    ranks: int
    replicas: int
    frozen: int

    def __str__(self) -> str:
        return f"{self.frozen} frozen, {self.ranks} x {self.replicas}"


@dataclass
class Stretch:
    """The part of a run between two changes.

    Attributes:
        shape: None if the file does not say how the run began.
        begin, end: seconds since the run's first batch.
        predicted: samples a second; None without a prediction.
        measured: samples a second of each batch.
    """

    shape: Shape | None
    begin: float
    end: float
    predicted: float | None = None
    measured: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Course:
    """The course of a run, in seconds since its first batch.

    Attributes:
        batches: (end, samples a second) of each batch.
        changes: (begin, end) of each change.
    """

    batches: list[tuple[float, float]]
    stretches: list[Stretch]
    changes: list[tuple[float, float]]


def read_course(path: Path) -> Course:
    """Read the course of a run from a metrics file.

    Raises ValueError if the file is missing, or has no change, or no batch of a pipeline whose shape it says.
    """
    records = _last_of_each(read_metrics(path, needs=_NEEDS))
    if not any(_is_change(each) for each in records):
        raise ValueError(
            f"{path} has no change of a pipeline; was it written with --freeze-training and --metrics-file?"
        )
    course = _course(records) if any(_is_batch(each) for each in records) else None
    if course is None or all(each.shape is None for each in course.stretches):
        raise ValueError(f"{path} has no batch of a pipeline whose ranks it says; train further, and draw it again")
    return course


def _is_batch(record: dict) -> bool:
    return "iteration_time_ms" in record


def _is_change(record: dict) -> bool:
    return "frozen_layers" in record


def _is_beginning(record: dict) -> bool:
    return f"{_INITIAL}frozen_layers" in record


def _last_of_each(records: Iterable[dict]) -> list[dict]:
    """The records of batches, changes and beginnings, without those that a resumed run has repeated."""
    kept: list[dict] = []
    for record in records:
        if _is_batch(record) or _is_beginning(record):
            first_again = record["iteration"] + _is_beginning(record)
            while kept and kept[-1]["iteration"] >= first_again:
                kept.pop()
        if _is_batch(record) or _is_beginning(record) or _is_change(record):
            kept.append(record)
    return kept


def _batch_sizes(records: list[dict]) -> dict[int, float]:
    """Iteration -> its number of samples: those consumed since the previous batch, or since the beginning.

    A first batch without an earlier record gets the number of the second.
    """
    known = [
        (each["iteration"], each["consumed_samples"] if _is_batch(each) else each[f"{_INITIAL}samples"])
        for each in records
        if _is_batch(each) or _is_beginning(each)
    ]
    if known[0][0] == 1:
        known.insert(0, (0, 0))
    sizes = {
        last: (after - before) / (last - first) for (first, before), (last, after) in pairwise(known) if last > first
    }
    (first, consumed), *_ = known
    return {first: next(iter(sizes.values()), consumed / max(first, 1)), **sizes}


def _course(records: list[dict]) -> Course:
    sizes, size, now = _batch_sizes(records), 0.0, 0.0
    course = Course([], [Stretch(None, 0.0, 0.0)], [])
    for record in records:
        last = course.stretches[-1]
        if _is_batch(record):
            seconds, size = record["iteration_time_ms"] / 1000, sizes[record["iteration"]]
            now += seconds
            course.batches.append((now, size / seconds))
            last.measured.append(size / seconds)
        elif _is_change(record):
            course.changes.append((now, now + record["change_seconds"]))
            now += record["change_seconds"]
            after = record.get("seconds_predicted")
            course.stretches.append(Stretch(_shape(record), now, now, size / after if after else None))
        elif (shape := _shape(record, _INITIAL)) != last.shape:
            course.stretches.append(Stretch(shape, now, now))
        course.stretches[-1].end = now
    return Course(course.batches, [each for each in course.stretches if each.measured], course.changes)


def _shape(record: dict, prefix: str = "") -> Shape:
    return Shape(*(record[f"{prefix}{name}"] for name in _SHAPE))


def draw(course: Course, path: Path, *, title: str = "") -> None:
    """Write the picture of a run; the suffix of `path` chooses its format."""
    figure = new_figure(8, 6, layout="constrained")
    *steps, speed = figure.subplots(4, 1, sharex=True, height_ratios=[1, 1, 1, 5])
    for number, axes in enumerate(steps):
        _draw_steps(axes, course, number)
    _draw_speed(speed, course)
    for axes in (*steps, speed):
        axes.grid(alpha=0.3)
        axes.margins(x=0.01)
    steps[0].set_title(title)
    figure.align_ylabels()
    save(figure, path)


def _shade(axes, changes: list[tuple[float, float]], label: str | None = None) -> None:
    for number, (begin, end) in enumerate(changes):
        axes.axvspan(begin, end, color="0.85", linewidth=0, label=None if number else label)


def _draw_steps(axes, course: Course, number: int) -> None:
    """Draw ranks, replicas or frozen layers as steps; a new value begins at the end of its change."""
    known = [each for each in course.stretches if each.shape is not None]
    values = [(each.shape.ranks, each.shape.replicas, each.shape.frozen)[number] for each in known]
    times = [*(each.begin for each in known), known[-1].end]
    _shade(axes, course.changes)
    axes.step(times, [*values, values[-1]], where="post", color=f"C{number + 1}", linewidth=2)
    for each, value in zip(known, values, strict=True):
        if each.end - each.begin < _NARROW * known[-1].end:
            continue
        axes.annotate(
            str(value), ((each.begin + each.end) / 2, value), xytext=(0, 3), textcoords="offset points",
            ha="center", fontsize="small",
        )  # fmt: skip
    axes.set_ylim(-0.1 * max(1, *values), 1.45 * max(1, *values))
    axes.set_yticks([0, max(1, *values)])
    axes.set_ylabel(_TITLES[number], fontsize="small")


def _draw_speed(axes, course: Course) -> None:
    _shade(axes, course.changes, label="transition")
    axes.plot(*zip(*course.batches, strict=True), ".", markersize=2.5, color="C7", label="measured, a batch")
    drawn: set[str] = set()
    for each in course.stretches:
        lines = [("measured, median", statistics.median(each.measured), "C0")]
        lines += [("predicted", each.predicted, "C3")] if each.predicted is not None else []
        for label, value, color in lines:
            axes.hlines(
                value, each.begin, each.end, color=color, linewidth=1.8, label=None if label in drawn else label
            )
            drawn.add(label)
    axes.legend(loc="upper left", ncols=2, fontsize="small")
    axes.set_ylabel("samples / s")
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])
    axes.set_xlabel("seconds")


def show(options: argparse.Namespace) -> int:
    """Draw the picture, and print a line for each stretch. Returns the exit status."""
    course = read_course(options.metrics)
    draw(course, options.output, title=options.title)
    for each in course.stretches:
        said = "" if each.predicted is None else f", predicted {each.predicted:.1f}"
        print(
            f"{each.shape or 'at first'}: {len(each.measured)} batches, "
            f"{statistics.median(each.measured):.1f} samples/s{said}"
        )
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = command_line.parser_of(__doc__)
    parser.add_argument("metrics", type=Path, help="what --metrics-file wrote")
    parser.add_argument("--output", type=Path, required=True, help="the picture")
    parser.add_argument("--title", default="", help="above it")
    return command_line.run(show, parser.parse_args(argv))
