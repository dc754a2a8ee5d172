"""From a command line to a running job, and from any error to one clear end.

Errors in the command line are found before torch is imported, printed by rank 0 only, and end every rank with status
2. What ranks find when they start (a checkpoint that a node does not see) they tell each other before they form a
group; rank 0 prints it once, with the ranks named, and all end with status 2. What all ranks find alike later (a
missing file, a damaged checkpoint, a loss that is no number) is printed once too. Whatever else goes wrong on one rank
is the failure guard's business: it ends all ranks with status 1 and names rank, stage and cause. All of these
sentences go to the launcher, too, whose summary is the last on the screen. Ctrl-C ends a program that was started
without a launcher with one line and status 130; torchrun gets it too, and prints a traceback of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from megatron.pipeline.runtime.failure.errors import (
    PATIENCE,
    USER_ERROR,
    OnThisRank,
    SameEverywhere,
    end,
    number_of,
    write_error_file,
)
from megatron.trainer.arguments import parse_args, validate_args
from megatron.trainer.ranks import StopSignal

if TYPE_CHECKING:
    from megatron.trainer.start_up.program import TrainingProgram


def run(prog: str, program: Callable[[], TrainingProgram], *, defaults: dict | None = None) -> int:
    """Parse the command line, install the device layer, train what `program()` says; returns the exit status."""
    started = time.time()
    stop = StopSignal().install()
    try:
        args = parse_args(prog=prog, defaults=defaults)
        if args.dry_run is not None:
            _require_torch("--dry-run builds what megatron.core makes of the flags")
            return _dry_run(args, prog)
        notes = None
        if not args.use_checkpoint_args:
            notes = validate_args(args, world_size=number_of("WORLD_SIZE", 1), rank=number_of("RANK", 0))
    except ValueError as error:
        return end(prog, error)

    def train() -> None:
        from megatron.trainer.run.pretraining import pretrain  # imports torch

        pretrain(args, program(), stop, started=started, notes=notes)

    return start(prog, train, stop)


def start(prog: str, main: Callable[[], None], stop: StopSignal) -> int:
    """Install the device layer and run `main`, whose command line is right; returns the exit status."""
    try:
        _require_torch(f"{prog} trains with it")
    except ValueError as error:
        return end(prog, error)
    from megatron import backend  # imports torch

    try:
        backend.install()
    except ValueError as error:
        return end(prog, error)
    backend.keep_freed_memory()
    try:
        main()
    except SameEverywhere as error:
        return end(prog, error)
    except OnThisRank as error:
        return _end_alone(prog, error, stop)
    except Exception as error:  # of a job of one rank, which has no guard
        write_error_file(f"{prog}: {type(error).__name__}: {' '.join(str(error).split())}")
        raise
    return 0


def _require_torch(why: str) -> None:
    """Does not import it. Raises ValueError where it is not installed."""
    if find_spec("torch") is None:
        raise ValueError(
            f"torch is not installed, and {why}; pip install '.[core]' (a CPU is enough), or price the job without it "
            "(tools/grid_search.py estimate)"
        )


def _dry_run(args: argparse.Namespace, prog: str) -> int:
    """Check the job without running it; returns the exit status."""
    from megatron import backend  # imports torch

    backend.install()
    from megatron.trainer.dry_run.dry_run import run_dry

    return run_dry(args, prog)


def _end_alone(prog: str, error: Exception, stop: StopSignal) -> int:
    """Print the error on this rank, unless the launcher ends the job meanwhile because rank 0 has printed its own."""
    rank = number_of("RANK", 0)
    deadline = time.monotonic() + (PATIENCE if rank > 0 else 0.0)
    while time.monotonic() < deadline and not stop.received:
        time.sleep(0.05)
    if rank == 0 or not stop.received:
        write_error_file(f"{prog}: error: rank {rank}: {error}")
        sys.stderr.write(f"{prog}: error: rank {rank}: {error}\n")
        sys.stderr.flush()
    return USER_ERROR
