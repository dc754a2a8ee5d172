"""Compare schedules over learning rates and seeds: their final validation losses relative to one schedule's.

    python tools/compare_runs.py outputs/sweep --reference flush --output sweep.png

The command reads the metrics files `SCHEDULE_lrRATE_seedSEED.jsonl` of a folder, which `examples/convergence_sweep.sh`
writes. The ratio of a run is its last validation loss divided by the reference's at the same rate and seed, less 1. For
each rate and schedule the table has the median of the ratios over the seeds. In brackets are the least and the greatest
ratio, or from 5 seeds on the 90% interval of the median. A second table has the iterations lost: how many iterations
before its end the reference had the last loss of the run. The picture shows every run.
"""

import argparse
import math
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import binom

from megatron.documents import command_line, flag_types
from megatron.documents.picture import one_panel
from megatron.trainer.report.metrics import read_metrics, validation_losses

_NAME = re.compile(r"(?P<schedule>.+)_lr(?P<rate>[0-9.e+-]+)_seed(?P<seed>[0-9]+)")


@dataclass(frozen=True)
class Run:
    """The result of a run.

    `losses`: iteration -> validation loss in nats per token, in ascending order; infinite where it was not finite.
    """

    schedule: str
    rate: float
    seed: int
    losses: dict[int, float]

    @property
    def loss(self) -> float:
        return list(self.losses.values())[-1]

    def iterations_lost(self, reference: "Run") -> float:
        """How many iterations before its end the reference first reached this run's last loss, interpolated linearly.

        Negative if the reference ends with the greater loss: then the lead of this run, from its own curve.
        """
        if self.loss < reference.loss:
            return -reference.iterations_lost(self)
        earlier: tuple[int, float] | None = None
        for iteration, loss in reference.losses.items():
            if loss == math.inf:  # never the last one
                continue
            if loss <= self.loss:
                break
            earlier = iteration, loss
        if earlier is not None:
            share = (earlier[1] - self.loss) / (earlier[1] - loss)
            iteration = earlier[0] + share * (iteration - earlier[0])
        return max(reference.losses) - iteration


@dataclass(frozen=True)
class Comparison:
    """A schedule at a learning rate.

    Attributes:
        over: seed -> its last loss divided by the reference's, less 1.
        lost: seed -> `Run.iterations_lost`.
    """

    schedule: str
    rate: float
    over: dict[int, float]
    lost: dict[int, float]

    @property
    def median(self) -> float:
        return statistics.median(self.over.values())

    @property
    def interval(self) -> tuple[float, float]:
        """With 5 seeds or more, a confidence interval of the median of at least 90%; else the least and the greatest.

        Of n independent runs k or fewer lie below the median with the probability of k or fewer heads in n tosses.
        """
        ordered = sorted(self.over.values())
        left_out = max(int(binom.ppf(0.05, len(ordered), 0.5)) - 1, 0)
        return ordered[left_out], ordered[-1 - left_out]

    def __str__(self) -> str:
        if len(self.over) == 1:
            return f"{self.median:+.1%}"
        least, greatest = self.interval
        return f"{self.median:+.1%} ({least:+.1%} to {greatest:+.1%})"


def read_runs(folder: Path) -> list[Run]:
    """Read the runs of a folder.

    Raises:
        ValueError: if no file has the name of a run, or a file has no validation loss.
    """
    runs = []
    for path in sorted(folder.glob("*.jsonl")):
        if match := _NAME.fullmatch(path.stem):
            losses = validation_losses(read_metrics(path, needs={"validation_loss": ("iteration",)}))
            if not losses:
                raise ValueError(f"{path} holds no validation_loss; train with --eval-interval and --eval-iters")
            runs.append(Run(match["schedule"], float(match["rate"]), int(match["seed"]), losses))
    if not runs:
        raise ValueError(f"{folder} holds no SCHEDULE_lrRATE_seedSEED.jsonl; give the folder of a sweep")
    return runs


def compare(runs: list[Run], reference: str) -> list[Comparison]:
    """Compare each other schedule with the reference at each learning rate.

    A run whose last loss was not finite lies infinitely far over the reference.

    Raises:
        ValueError: if the reference lacks a run at a rate and seed that another schedule has, the last loss of such a
            run was not finite, or 0, or the two runs end at different iterations.
    """
    known = {(run.rate, run.seed): run for run in runs if run.schedule == reference}
    others: dict[tuple[str, float], list[Run]] = {}
    for run in runs:
        if run.schedule == reference:
            continue
        if (run.rate, run.seed) not in known:
            raise ValueError(f"{reference} has no run with rate {run.rate:g} and seed {run.seed}; {run.schedule} has")
        if not 0 < known[run.rate, run.seed].loss < math.inf:
            raise ValueError(
                f"{reference} with rate {run.rate:g} and seed {run.seed} ends with a validation loss of "
                f"{known[run.rate, run.seed].loss:g}, over which nothing lies; take these runs out of the folder"
            )
        ends = max(run.losses), max(known[run.rate, run.seed].losses)
        if ends[0] != ends[1]:
            raise ValueError(
                f"{run.schedule} with rate {run.rate:g} and seed {run.seed} has its last validation loss at iteration "
                f"{ends[0]}, and {reference} at {ends[1]}; train both alike"
            )
        others.setdefault((run.schedule, run.rate), []).append(run)
    return [
        Comparison(
            *key,
            over={run.seed: run.loss / known[run.rate, run.seed].loss - 1 for run in own},
            lost={run.seed: run.iterations_lost(known[run.rate, run.seed]) for run in own},
        )
        for key, own in sorted(others.items())
    ]


def table(runs: list[Run], compared: list[Comparison], reference: str, cell: Callable[[Comparison], str]) -> str:
    """The comparison as a Markdown table with a row for each rate and a column of cells for each schedule."""
    schedules = list(dict.fromkeys(each.schedule for each in compared))
    lines = [
        f"| peak learning rate | seeds | {reference} | " + " | ".join(schedules) + " |",
        "|---" * (3 + len(schedules)) + "|",
    ]
    for rate in sorted({run.rate for run in runs}):
        losses = [run.loss for run in runs if (run.schedule, run.rate) == (reference, rate)]
        found = {each.schedule: cell(each) for each in compared if each.rate == rate}
        cells = [f"{rate:g}", str(len(losses)), f"{statistics.median(losses):.3f}" if losses else ""]
        cells += [found.get(name, "") for name in schedules]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(compared: list[Comparison], reference: str, path: Path, *, title: str = "") -> None:
    """Write the picture of the comparison; the suffix of `path` chooses its format."""
    with one_panel(path, 7.5, 4.5, title=title) as axes:
        for position, schedule in enumerate(dict.fromkeys(each.schedule for each in compared)):
            own = [each for each in compared if each.schedule == schedule]
            color = f"C{position}"
            axes.plot([each.rate for each in own], [100 * each.median for each in own], color=color, label=schedule)
            points = [(each.rate, 100 * value) for each in own for value in each.over.values()]
            axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, linestyle="none")
        axes.axhline(0.0, color="0.4", linewidth=0.8, linestyle="--")
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=2.0)
        rates = sorted({each.rate for each in compared})
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("peak learning rate")
        axes.set_ylabel(f"last validation loss over {reference}'s (%)")
        axes.grid(alpha=0.3)


def main(arguments: list[str] | None = None) -> None:
    parser = command_line.parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="of a sweep")
    parser.add_argument("--reference", default="flush", help="schedule to compare with (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="picture to write (default: sweep.png in the folder)")
    parser.add_argument("--title", default="", help="above the picture")
    parser.add_argument(
        "--most", action="append", default=[], metavar="SCHEDULE=X", type=_limit,
        help="exit with 1 where a schedule's median lies more than this share over the reference; may be repeated",
    )  # fmt: skip
    args = parser.parse_args(arguments)
    try:
        runs = read_runs(args.folder)
        compared = compare(runs, args.reference)
        if not compared:
            raise ValueError(f"{args.folder} has no runs but those of {args.reference}; there is nothing to compare")
        if unknown := {schedule for schedule, _ in args.most} - (known := {each.schedule for each in compared}):
            raise ValueError(
                f"--most limits {', '.join(sorted(unknown))}, which is compared with nothing; name one of "
                f"{', '.join(sorted(known))}"
            )
        picture = args.output or args.folder / "sweep.png"
        draw(compared, args.reference, picture, title=args.title)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(f"Last validation loss over that of {args.reference}\n")
    print(table(runs, compared, args.reference, str))
    print(f"\nIterations lost to {args.reference}, median\n")
    print(table(runs, compared, args.reference, lambda each: f"{statistics.median(each.lost.values()):.0f}"))
    print(f"Picture: {picture}")
    failed = False
    for schedule, most in args.most:
        for each in compared:
            if each.schedule == schedule and each.median > most:
                print(
                    f"{schedule} at {each.rate:g} lies {each.median:.2%} over {args.reference}, {most:.2%} are allowed."
                )
                failed = True
    sys.exit(failed)


def _limit(text: str) -> tuple[str, float]:
    name, equals, share = text.rpartition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"'{text}' is no SCHEDULE=X, such as provisional=0.01")
    return name, flag_types.time(share)
