"""Draw the peak of saved activations on each pipeline rank, from the metrics files of one or several runs.

    python tools/plot_memory.py flush.jsonl bpipe.jsonl --labels flush bpipe --output memory.png

The runs must have counted their saved activations (`pretrain_gpt.py --log-saved-activations`, or a schedule that moves
them). A bar is the largest count of any iteration. The numbers are also printed as a table, in MiB.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.documents import command_line
from megatron.documents.picture import one_panel
from megatron.documents.tables import console, lined_table
from megatron.trainer.report.metrics import read_metrics

METRIC = "saved_activation_bytes"


@dataclass(frozen=True)
class Peaks:
    """The largest number of bytes of saved activations on each pipeline rank of one run."""

    label: str
    num_bytes: tuple[int, ...]

    @property
    def mebibytes(self) -> list[float]:
        return [each / 2**20 for each in self.num_bytes]


def read_peaks(path: Path, label: str) -> Peaks:
    """Read the peaks of a run from a metrics file. Raises ValueError if the file is missing or has no counts."""
    counts = [record[METRIC] for record in read_metrics(path) if METRIC in record]
    if not counts:
        raise ValueError(f"{path} holds no {METRIC}; train with --log-saved-activations or --balance-activations")
    if len({len(each) for each in counts}) > 1:
        raise ValueError(f"{path} holds runs with different numbers of pipeline ranks; give one file for each")
    return Peaks(label, tuple(map(max, zip(*counts, strict=True))))


def draw(runs: Sequence[Peaks], path: Path, *, title: str = "") -> None:
    """Write a picture with bars for each pipeline rank, and a dashed line at the largest value of each run.

    The suffix of `path` chooses the format.
    """
    width = 0.8 / len(runs)
    with one_panel(path, 7.5, 4.0, title=title) as axes:
        for position, run in enumerate(runs):
            places = [rank + (position + 0.5) * width - 0.4 for rank in range(len(run.num_bytes))]
            axes.bar(places, run.mebibytes, width=0.92 * width, color=f"C{position}", label=run.label)
            axes.axhline(max(run.mebibytes), color=f"C{position}", linestyle="--", linewidth=0.9)
        axes.set_xticks(range(max(len(run.num_bytes) for run in runs)))
        axes.set_xlabel("pipeline rank")
        axes.set_ylabel("saved activations at their fullest (MiB)")
        axes.set_ylim(top=1.12 * max(max(run.mebibytes) for run in runs))  # room for the legend
        axes.legend(ncols=len(runs), loc="upper right", framealpha=1)


def show(runs: Sequence[Peaks]) -> None:
    """Print the numbers as a table with one row for each run."""
    ranks, rows = range(max(len(run.num_bytes) for run in runs)), []
    for run in runs:
        values = run.mebibytes
        cells = [*values, *[None] * (len(ranks) - len(values)), max(values), max(values) - min(values)]
        rows.append((run.label, *("" if cell is None else f"{cell:.1f}" for cell in cells)))
    columns = ("", *(f"rank {rank}" for rank in ranks), "largest", "spread")
    table = lined_table("saved activations at their fullest (MiB)", columns, rows, left=("",))
    console(120, highlight=True).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line.metrics_parser_of(__doc__, output="memory.png", help_of_output="picture")
    args = parser.parse_args(arguments)
    runs = command_line.read_and_draw(parser, args, read_peaks, draw)
    show(runs)
    print(f"Picture: {args.output}")
