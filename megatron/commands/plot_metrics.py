"""Draw the loss curves of one or several runs from their metrics files.

    python tools/plot_metrics.py flush.jsonl 2bw.jsonl --labels flush 2bw --output loss.png

A metrics file is what `pretrain_gpt.py --metrics-file` writes. Training losses are drawn thin, validation losses as
marked lines; where a resumed run repeats iterations, the later figures count. The last validation losses are printed.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron.commands.common import command_line
from megatron.trainer.report.metrics import read_metrics


@dataclass(frozen=True)
class Curves:
    """Losses of one run, iteration -> nats per token, by iteration."""

    label: str
    training: dict[int, float]
    validation: dict[int, float]


def read_curves(path: Path, label: str) -> Curves:
    """Raises ValueError where the file is missing or holds no loss."""
    try:
        records = read_metrics(str(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    curves = Curves(label, _by_iteration(records, "lm_loss", "loss"), _by_iteration(records, "validation_loss"))
    if not curves.training and not curves.validation:
        raise ValueError(
            f"{path} holds neither lm_loss, nor loss, nor validation_loss; is it what --metrics-file wrote?"
        )
    return curves


def _by_iteration(records: list[dict], *names: str) -> dict[int, float]:
    found = {record["iteration"]: record[name] for record in records for name in names if record.get(name) is not None}
    return dict(sorted(found.items()))


def draw(runs: list[Curves], path: Path, *, title: str = "") -> None:
    """Write a picture; the suffix of `path` chooses its format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for position, run in enumerate(runs):
        color = f"C{position}"
        name = f"{run.label}: " if len(runs) > 1 else ""
        if run.training:
            axes.plot(*_points(run.training), color=color, linewidth=0.8, alpha=0.45, label=f"{name}training")
        if run.validation:
            axes.plot(*_points(run.validation), color=color, marker="o", markersize=3.5, label=f"{name}validation")
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _points(curve: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(curve), list(curve.values())


def largest_difference(runs: list[Curves]) -> float:
    """Largest difference of a run's last validation loss from the first run's, as a share of it; infinite where a run
    has none."""
    if not all(run.validation for run in runs):
        return math.inf
    losses = [run.validation[max(run.validation)] for run in runs]
    return max(abs(loss / losses[0] - 1) for loss in losses)


def validation_fall(run: Curves) -> float:
    """How far the last validation loss lies below the first, as a share of it; 0 without two of them."""
    if not run.validation:
        return 0.0
    return 1 - run.validation[max(run.validation)] / run.validation[min(run.validation)]


def main(arguments: list[str] | None = None) -> None:
    parser = command_line.parser_of(__doc__)
    parser.add_argument("metrics", type=Path, nargs="+", help="metrics files")
    parser.add_argument("--labels", nargs="+", help="a name for each file (default: its file name)")
    parser.add_argument("--output", type=Path, default=Path("loss.png"), help="picture to write (default: %(default)s)")
    parser.add_argument("--title", default="", help="above the picture")
    text = "exit with 1 if the last validation losses differ by more than this share of the first run's"
    parser.add_argument("--tolerance", type=command_line.time, metavar="X", help=text)
    text = "exit with 1 unless each run's last validation loss lies this share below its first"
    parser.add_argument("--fall", type=command_line.time, metavar="X", help=text)
    args = parser.parse_args(arguments)
    labels = args.labels or [path.stem for path in args.metrics]
    if len(labels) != len(args.metrics):
        parser.error(f"--labels gives {len(labels)} names for {len(args.metrics)} files; give one for each")
    try:
        runs = [read_curves(path, label) for path, label in zip(args.metrics, labels, strict=True)]
        draw(runs, args.output, title=args.title)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    for run in runs:
        if run.validation:
            first, last = min(run.validation), max(run.validation)
            losses = f"{run.validation[first]:.4f} at iteration {first}, {run.validation[last]:.4f} at iteration {last}"
            print(f"{run.label}: validation loss {losses}")
    print(f"Loss curve: {args.output}")
    failed = False
    if args.tolerance is not None:
        difference = largest_difference(runs)
        print(f"The last validation losses differ by {difference:.2%}, {args.tolerance:.2%} are allowed.")
        failed = difference > args.tolerance
    if args.fall is not None:
        fall = min(map(validation_fall, runs))
        print(f"The validation loss has fallen by {fall:.1%}, {args.fall:.1%} are expected.")
        failed = failed or fall < args.fall
    sys.exit(failed)
