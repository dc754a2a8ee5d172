"""TensorBoard and Weights & Biases: the values of a run by name and step, on the first rank.

A tracker that fails does not end the run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from importlib.util import find_spec

from megatron.trainer.report.metrics import ByProduct


def settle(args: argparse.Namespace) -> None:
    """Set `args.report_to` to the names of the trackers. Raises ValueError for one that is not installed."""
    asked, args.report_to = args.report_to, [name for name in args.report_to or () if name != "none"]
    if asked is not None and args.report_to and "none" in asked:
        raise ValueError(f"--report_to none contradicts {' '.join(args.report_to)}; leave one out")
    if asked is None and args.logging_dir is not None:
        if find_spec("tensorboard") is not None:
            args.report_to = ["tensorboard"]
        else:
            args.notes.append("--logging_dir has no effect: the package tensorboard is not installed; pip install it")
    for name in args.report_to:
        if find_spec(name) is None:
            raise ValueError(
                f"--report_to {name}: the package {name} is not installed; pip install {name}, or give none"
            )
    if "tensorboard" in args.report_to and args.logging_dir is None:
        if args.output_dir is None:
            raise ValueError("--report_to tensorboard has nowhere to write: give --logging_dir")
        args.logging_dir = f"{args.output_dir}/runs"
    elif asked is not None and args.logging_dir is not None and "tensorboard" not in args.report_to:
        args.notes.append(f"--logging_dir {args.logging_dir} means nothing without --report_to tensorboard")
    if args.run_name is not None and "wandb" not in args.report_to:
        args.notes.append(f"--run_name {args.run_name} means nothing without --report_to wandb")


Tracker = tuple[Callable[[Mapping[str, float], int], None], Callable[[], None]]
"""(show values by name at a step, close the tracker)."""


class Trackers:
    """The trackers of --report_to. They must be installed, which the command line has checked."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._made: list[tuple[ByProduct, Tracker]] = []
        for name in args.report_to:
            output = ByProduct(f"--report_to {name}", consequence="without it from now on", failures=(Exception,))
            with output.attempt():
                self._made.append((output, _KINDS[name](args)))

    def show(self, prefix: str, values: Mapping[str, float | None], step: int) -> None:
        """Show values as `prefix/name`; None is left out."""
        named = {f"{prefix}/{name}": value for name, value in values.items() if value is not None}
        for output, (show, _) in self._made:
            with output.attempt():
                show(named, step)
        self._made = [(output, tracker) for output, tracker in self._made if not output.fails]

    def close(self) -> None:
        for output, (_, close) in self._made:
            with output.attempt():
                close()


def _tensorboard(args: argparse.Namespace) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=args.logging_dir)

    def show(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return show, writer.close


def _weights_and_biases(args: argparse.Namespace) -> Tracker:
    """wandb reads the project from WANDB_PROJECT, the mode from WANDB_MODE and so on."""
    import wandb

    config = {name: value for name, value in vars(args).items() if isinstance(value, (bool, int, float, str))}
    run = wandb.init(name=args.run_name, dir=args.output_dir, config=config)
    return lambda values, step: run.log(dict(values), step=step), run.finish


_KINDS = {"tensorboard": _tensorboard, "wandb": _weights_and_biases}
