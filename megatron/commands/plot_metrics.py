"""Draw the loss curves of one or several runs from their metrics files.

    python tools/plot_metrics.py flush.jsonl 2bw.jsonl --labels flush 2bw --output loss.png

`pretrain_gpt.py --metrics-file` writes a metrics file. Training losses are drawn as thin lines, validation losses as
lines with marks. If a resumed run repeats iterations, the later figures are used. The first and last validation losses
are printed.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron.documents import command_line, flag_types
from megatron.documents.picture import one_panel
from megatron.trainer.report.metrics import read_metrics, validation_losses

_TRAINING = ("lm_loss", "loss")


@dataclass(frozen=True)
class Curves:
    """The losses of one run: iteration -> nats per token, in the order of iterations.

    A training loss that was not finite is left out; such a validation loss is infinite.
    """

    label: str
    training: dict[int, float]
    validation: dict[int, float]


def read_curves(path: Path, label: str) -> Curves:
    """Read the losses of a run from a metrics file. Raises ValueError if the file is missing or has no loss."""
    records = read_metrics(path, needs={name: ("iteration",) for name in (*_TRAINING, "validation_loss")})
    curves = Curves(label, _by_iteration(records, *_TRAINING), dict(sorted(validation_losses(records).items())))
    if not curves.training and not curves.validation:
        raise ValueError(
            f"{path} holds neither lm_loss, nor loss, nor validation_loss; is it what --metrics-file wrote?"
        )
    return curves


def _by_iteration(records: list[dict], *names: str) -> dict[int, float]:
    found = {record["iteration"]: record[name] for record in records for name in names if record.get(name) is not None}
    return dict(sorted(found.items()))


def draw(runs: list[Curves], path: Path, *, title: str = "") -> None:
    """Write the picture of the losses; the suffix of `path` chooses its format."""
    with one_panel(path, 7.5, 4.5, title=title) as axes:
        for position, run in enumerate(runs):
            color = f"C{position}"
            name = f"{run.label}: " if len(runs) > 1 else ""
            for curve, label, style in (
                (run.training, "training", {"linewidth": 0.8, "alpha": 0.45}),
                (run.validation, "validation", {"marker": "o", "markersize": 3.5}),
            ):
                if curve:
                    axes.plot(list(curve), list(curve.values()), color=color, label=f"{name}{label}", **style)
        axes.set_xlabel("iteration")
        axes.set_ylabel("loss (nats per token)")
        axes.grid(alpha=0.3)


def largest_difference(runs: list[Curves]) -> float:
    """The largest relative difference of a run's last validation loss from the first run's.

    Infinite if a run has no validation loss, or its last one was not finite.
    """
    if not all(run.validation for run in runs):
        return math.inf
    losses = [run.validation[max(run.validation)] for run in runs]
    if math.inf in losses or not losses[0]:
        return math.inf
    return max(abs(loss / losses[0] - 1) for loss in losses)


def problem_with_checks(runs: list[Curves], *, tolerance: bool, fall: bool) -> str | None:
    """Why the runs' validation losses cannot be compared as --tolerance or --fall asks; None if they can."""
    ends = {run.label: max(run.validation) for run in runs if run.validation}
    if tolerance and len(set(ends.values())) > 1:
        last = ", ".join(f"{label}'s {iteration}" for label, iteration in ends.items())
        return f"--tolerance compares the last validation losses, of iterations that differ: {last}; train all alike"
    single = next((run.label for run in runs if len(run.validation) == 1), None)
    if fall and single is not None:
        return (
            f"--fall compares the first validation loss with the last, and {single} has one, of iteration "
            f"{ends[single]}; train longer, or evaluate more often with --eval-interval"
        )
    return None


def validation_fall(run: Curves) -> float:
    """The relative fall from the first to the last validation loss of a run; 0 without any.

    Minus infinity if the last one was not finite.
    """
    if not run.validation:
        return 0.0
    first, last = run.validation[min(run.validation)], run.validation[max(run.validation)]
    if last == math.inf:
        return -math.inf
    return 1 - last / first if first else 0.0


def main(arguments: list[str] | None = None) -> None:
    parser = command_line.metrics_parser_of(__doc__, output="loss.png", help_of_output="picture to write")
    text = "exit with 1 if the last validation losses differ by more than this share of the first run's"
    parser.add_argument("--tolerance", type=flag_types.time, metavar="X", help=text)
    text = "exit with 1 unless each run's last validation loss lies this share below its first"
    parser.add_argument("--fall", type=flag_types.time, metavar="X", help=text)
    args = parser.parse_args(arguments)
    runs = command_line.read_and_draw(parser, args, read_curves, draw)
    for run in runs:
        if run.validation:
            first, last = min(run.validation), max(run.validation)
            losses = f"{run.validation[first]:.4f} at iteration {first}, {run.validation[last]:.4f} at iteration {last}"
            print(f"{run.label}: validation loss {losses}")
    print(f"Loss curve: {args.output}")
    if problem := problem_with_checks(runs, tolerance=args.tolerance is not None, fall=args.fall is not None):
        parser.exit(1, f"{parser.prog}: {problem}\n")
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
