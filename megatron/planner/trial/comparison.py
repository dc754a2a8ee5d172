"""Measured beside predicted: a table and a picture."""

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from megatron.planner.trial.results import Result, Status


def table_of(results: Sequence[Result]) -> Table:
    """A row for each, the fastest first; failures last, with their sentence."""
    table = Table(title="seconds per iteration")
    for column in ("configuration", "predicted", "measured", "eight of ten", "predicted too long by", "ended"):
        table.add_column(column, justify="left" if column in ("configuration", "ended") else "right", overflow="fold")
    for each in sorted(results, key=lambda result: (result.status is not Status.DONE, result.seconds or 0.0)):
        done = each.status is Status.DONE
        table.add_row(
            each.name,
            "" if each.predicted_seconds is None else f"{each.predicted_seconds:.4g}",
            f"{each.seconds:.4g}" if done else "",
            f"{each.low:.4g}-{each.high:.4g}" if done else "",
            "" if each.error is None else f"{each.error:+.1%}",
            each.status.value if done else escape(f"{each.status.value}: {each.sentence}"),
        )
    return table


def draw(results: Sequence[Result], path: Path) -> None:
    """Predicted against measured seconds, with the line on which both agree; the suffix chooses the format.

    Raises ValueError where nothing has both.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    both = [each for each in results if each.error is not None]
    if not both:
        raise ValueError("no configuration has both a prediction and a measured time; there is nothing to draw")
    figure = Figure(figsize=(6.0, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for position, schedule in enumerate(dict.fromkeys(each.configuration["schedule"] for each in both)):
        those = [each for each in both if each.configuration["schedule"] == schedule]
        measured = [each.seconds for each in those]
        spread = [
            [each.seconds - each.low for each in those],
            [each.high - each.seconds for each in those],
        ]
        axes.errorbar(
            measured, [each.predicted_seconds for each in those], xerr=spread, fmt="o", color=f"C{position}",
            elinewidth=0.8, capsize=2, label=schedule,
        )  # fmt: skip
    ends = [value for each in both for value in (each.seconds, each.predicted_seconds)]
    low, high = 0.9 * min(ends), 1.1 * max(ends)
    axes.plot([low, high], [low, high], color="0.4", linewidth=0.9)
    axes.fill_between([low, high], [0.95 * low, 0.95 * high], [1.05 * low, 1.05 * high], color="0.9", label="within 5%")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("measured seconds per iteration (eight of ten)")
    axes.set_ylabel("predicted")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
