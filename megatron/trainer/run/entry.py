"""The start of a job from a command line, and its end after any error.

Errors in the command line are found before torch is imported. Rank 0 prints them, and every rank ends with status 2.
Ranks exchange the problems that they find at the start (such as a checkpoint that a node cannot see) before they form a
group; rank 0 prints them once, with the names of the ranks, and all ranks end with status 2. An error that all ranks
find later (a missing file, a damaged checkpoint, a loss that is not finite) is also printed once. The failure guard
handles any other error on one rank: it ends all ranks with status 1 and names rank, stage and cause. The launcher
receives all of these sentences, since its summary is the last text on the screen. Ctrl-C ends a program that was
started without a launcher with one line and status 130; torchrun receives Ctrl-C as well, and prints its own traceback.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from megatron.pipeline.runtime.failure.errors import (
    ERROR_PATIENCE,
    USER_ERROR,
    OnThisRank,
    SameEverywhere,
    end,
    number_of,
    write_error_file,
)
from megatron.pipeline.start_up.core_version import require_trained_core
from megatron.trainer.arguments import parse_args, validate_args
from megatron.trainer.arguments.flags.parallel import AUTO
from megatron.trainer.ranks import StopSignal

if TYPE_CHECKING:
    from megatron.trainer.start_up.run import TrainingProgram


def run(prog: str, program: Callable[[], TrainingProgram], *, defaults: dict | None = None) -> int:
    """Parse the command line, install the device layer, and train `program()`; return the exit status."""
    started = time.time()
    stop = StopSignal().install()
    try:
        args = parse_args(prog=prog, defaults=defaults)
        if args.dry_run is not None:
            _require_torch("--dry-run builds what megatron.core makes of the flags")
            return _dry_run(args, prog)
        notes, job = None, {"world_size": number_of("WORLD_SIZE", 1), "rank": number_of("RANK", 0)}
        if args.pipeline_schedule == AUTO:  # the program is made after the rendezvous
            if not args.use_checkpoint_args:
                from megatron.trainer.plan import auto_program  # other runs start without the planner

                auto_program.require(args, **job)
        elif not args.use_checkpoint_args:
            notes = validate_args(args, **job)
    except ValueError as error:
        return end(prog, error)

    def train() -> None:
        from megatron.trainer.run.pretraining import pretrain  # imports torch

        pretrain(args, program(), stop, started=started, notes=notes)

    return start(prog, train, stop)


def start(prog: str, main: Callable[[], None], stop: StopSignal) -> int:
    """Install the device layer and run `main`, whose command line has been checked; return the exit status."""
    try:
        _require_torch(f"{prog} trains with it")
    except ValueError as error:
        return end(prog, error)
    from megatron import backend  # imports torch

    try:
        require_trained_core()
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
    except Exception as error:  # a job of one rank has no guard
        write_error_file(f"{prog}: {type(error).__name__}: {' '.join(str(error).split())}")
        raise
    return 0


def _require_torch(why: str) -> None:
    """Raise ValueError if torch is not installed; does not import it."""
    if find_spec("torch") is None:
        raise ValueError(
            f"torch is not installed, and {why}; pip install '.[core]' (a CPU is enough), or price the job without it "
            "(tools/grid_search.py estimate)"
        )


def _dry_run(args: argparse.Namespace, prog: str) -> int:
    """Check the job without running it; return the exit status."""
    from megatron import backend  # imports torch

    try:
        require_trained_core()
        backend.install()
    except ValueError as error:
        return end(prog, error)
    from megatron.trainer.dry_run.dry_run import run_dry

    return run_dry(args, prog)


def _end_alone(prog: str, error: Exception, stop: StopSignal) -> int:
    """Print the error on this rank, unless the launcher ends the job first because rank 0 has printed its own error."""
    rank = number_of("RANK", 0)
    deadline = time.monotonic() + (ERROR_PATIENCE if rank > 0 else 0.0)
    while time.monotonic() < deadline and not stop.received:
        time.sleep(0.05)
    if rank == 0 or not stop.received:
        write_error_file(f"{prog}: error: rank {rank}: {error}")
        sys.stderr.write(f"{prog}: error: rank {rank}: {error}\n")
        sys.stderr.flush()
    return USER_ERROR
