"""Draw how a run that changes its pipeline went, from its metrics file.

    python tools/plot_changes.py metrics.jsonl --output changes.png

A metrics file is what a training program writes with --metrics-file; with --freeze-training or --elastic-pipeline it
has the changes. Above: samples a second, measured batch by batch and as predicted at each change. Below: ranks of a
pipeline, replicas and frozen layers. Time goes from left to right, and changes are shaded.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # where the next one is
import command_line

from megatron.training.metrics import read_metrics


@dataclass(frozen=True)
class Stretch:
    """Between two changes: frozen layers, ranks and replicas (None before the first change), when it began and ended,
    and samples a second as predicted, where that was.
    """

    frozen: int | None
    ranks: int | None
    replicas: int | None
    begin: float
    end: float
    predicted: float | None


@dataclass(frozen=True)
class Course:
    """A run in seconds from its first batch on: batches (end, samples a second), stretches, changes (begin, end)."""

    batches: list[tuple[float, float]]
    stretches: list[Stretch]
    changes: list[tuple[float, float]]


def read_course(path: Path) -> Course:
    """Raises ValueError where the file is missing, or holds no change."""
    try:
        records = read_metrics(str(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    now, begin, samples = 0.0, 0.0, 0
    batches, stretches, changes = [], [], []
    said, predicted, size = {}, None, 0
    for record in records:
        if "iteration_time_ms" in record:
            seconds = record["iteration_time_ms"] / 1000
            now += seconds
            size, samples = record["consumed_samples"] - samples, record["consumed_samples"]
            batches.append((now, size / seconds))
        elif "frozen_layers" in record:
            stretches.append(_stretch(said, begin, now, predicted))
            changes.append((now, now + record["change_seconds"]))
            now += record["change_seconds"]
            begin, said = now, record
            after = record.get("seconds_predicted")
            predicted = size / after if after else None
    if not changes:
        raise ValueError(
            f"{path} has no change of a pipeline; was it written with --freeze-training and --metrics-file?"
        )
    return Course(batches, [*stretches, _stretch(said, begin, now, predicted)], changes)


def _stretch(said: dict, begin: float, end: float, predicted: float | None) -> Stretch:
    names = ("frozen_layers", "pipeline_ranks", "replicas")
    return Stretch(*(said.get(name) for name in names), begin, end, predicted)


def draw(course: Course, path: Path, *, title: str = "") -> None:
    """Write a picture; the suffix of `path` chooses its format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    speed, steps = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    speed.plot(*zip(*course.batches, strict=True), ".", markersize=2.5, color="C7", label="measured, a batch")
    for number, each in enumerate(course.stretches):
        if each.predicted is not None:
            label = "predicted" if number == len(course.stretches) - 1 else None
            speed.hlines(each.predicted, each.begin, each.end, color="C3", linewidth=1.6, label=label)
    for name, color in (("ranks", "C0"), ("replicas", "C1"), ("frozen", "C2")):
        label = {"ranks": "ranks of a pipeline", "replicas": "replicas", "frozen": "frozen layers"}[name]
        for each in course.stretches[1:]:
            steps.hlines(getattr(each, name), each.begin, each.end, color=color, linewidth=2.2, label=label)
            label = None
    for axes in (speed, steps):
        for begin, end in course.changes:
            axes.axvspan(begin, end, color="0.85", linewidth=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", fontsize="small")
    speed.set_ylabel("samples / s")
    speed.set_ylim(bottom=0)
    speed.set_title(title)
    steps.yaxis.set_major_locator(MaxNLocator(integer=True))
    steps.set_ylim(bottom=0)
    steps.set_xlabel("seconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def show(options: argparse.Namespace) -> int:
    """Draw, and print a line for each stretch."""
    course = read_course(options.metrics)
    draw(course, options.output, title=options.title)
    for each in course.stretches:
        measured = sorted(speed for end, speed in course.batches if each.begin < end <= each.end)
        median = measured[len(measured) // 2] if measured else 0.0
        where = "at first" if each.ranks is None else f"{each.frozen} frozen, {each.ranks} x {each.replicas}"
        said = "" if each.predicted is None else f", predicted {each.predicted:.1f}"
        print(f"{where}: {len(measured)} batches, {median:.1f} samples/s{said}")
    return 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, help="what --metrics-file wrote")
    parser.add_argument("--output", type=Path, required=True, help="the picture")
    parser.add_argument("--title", default="", help="above it")
    return command_line.run(show, parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
