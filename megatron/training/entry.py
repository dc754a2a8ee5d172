"""From a command line to a running job, and from any error to one clear end.

Errors in the command line are found before torch is imported, printed by rank 0 only, and end every rank with status
2. What ranks find when they start (a checkpoint that a node does not see) they tell each other before they form a
group; rank 0 prints it once, with the ranks named, and all end with status 2. What all ranks find alike later (a
missing file, a damaged checkpoint, a loss that is no number) is printed once too. Whatever else goes wrong on one rank
is the failure guard's business: it ends all ranks with status 1 and names rank, stage and cause. All of these
sentences go to the launcher, too, whose summary is the last on the screen. Ctrl-C ends a program that was started
without a launcher with one line and status 130; torchrun gets it too, and prints a traceback of its own.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

from megatron.pipeline.runtime.error_file import write_error_file
from megatron.training.arguments import parse_args, validate_args
from megatron.training.signals import StopSignal

USER_ERROR = 2
_PATIENCE = 3.0  # seconds that ranks wait for each other's same error, and others for rank 0 to print


def run(
    prog: str, main: Callable[[argparse.Namespace, StopSignal, float], None], *, defaults: dict | None = None
) -> int:
    """Parse the command line, install the device layer, run `main(args, stop, started)`; returns the exit status."""
    started = time.time()
    stop = StopSignal().install()
    try:
        args = parse_args(prog=prog, defaults=defaults)
        if args.dry_run is not None:
            return _dry_run(args, prog)
        if not args.use_checkpoint_args:
            args.notes_for_log = validate_args(args, world_size=_number("WORLD_SIZE", 1), rank=_number("RANK", 0))
    except ValueError as error:
        return end(prog, error)
    return start(prog, lambda: main(args, stop, started), stop)


def start(prog: str, main: Callable[[], None], stop: StopSignal) -> int:
    """Install the device layer and run `main`, whose command line is right; returns the exit status."""
    from megatron import backend  # imports torch

    backend.install()
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


def _dry_run(args: argparse.Namespace, prog: str) -> int:
    """Check the job without running it; returns the exit status."""
    from megatron import backend  # imports torch

    backend.install()
    from megatron.training.dry_run import run_dry

    return run_dry(args, prog)


class SameEverywhere(Exception):
    """An error that every rank knows; its text is for the user."""


class OnThisRank(Exception):
    """An error of a rank that cannot reach the others to tell them; its text is for the user."""


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


def environment_ranks() -> tuple[int, int, int]:
    """(rank, world size, local rank) from the environment; (0, 1, 0) without a launcher. Raises ValueError."""
    values = []
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        text = os.environ.get(name, default)
        if not text.isdigit():
            raise ValueError(f"the environment variable {name} is '{text}', not a whole number; start through torchrun")
        values.append(int(text))
    rank, world_size, local_rank = values
    if rank >= world_size:
        raise ValueError(f"RANK {rank} is not below WORLD_SIZE {world_size}; start through torchrun")
    return rank, world_size, local_rank


def end(prog: str, error: Exception) -> int:
    """Print the error once in the job: rank 0 prints and ends first, and the launcher then ends the others. Each host's
    launcher is told by one rank."""
    if _number("LOCAL_RANK", 0) == 0:
        write_error_file(f"{prog}: error: {error}")
    if _number("RANK", 0) == 0:
        sys.stderr.write(f"{prog}: error: {error}\n")
        sys.stderr.flush()
    else:
        time.sleep(_PATIENCE)
    return USER_ERROR


def _end_alone(prog: str, error: Exception, stop: StopSignal) -> int:
    """Print the error on this rank, unless the launcher ends the job meanwhile because rank 0 has printed its own."""
    rank = _number("RANK", 0)
    deadline = time.monotonic() + (_PATIENCE if rank > 0 else 0.0)
    while time.monotonic() < deadline and not stop.received:
        time.sleep(0.05)
    if rank == 0 or not stop.received:
        write_error_file(f"{prog}: error: rank {rank}: {error}")
        sys.stderr.write(f"{prog}: error: rank {rank}: {error}\n")
        sys.stderr.flush()
    return USER_ERROR


def agree_to_start(store, *, rank: int, world_size: int, problem: str | None, timeout: timedelta) -> None:
    """Go on only if no rank has found a problem. Collective over the job's `store`; needs no process group.

    Raises:
        SameEverywhere: on every rank, if any has a problem; names the ranks unless all have the same.
        OnThisRank: some rank did not come within `timeout`.
    """
    keys = [f"start/{each}" for each in range(world_size)]
    store.set(keys[rank], problem or "")
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [str(each) for each, key in enumerate(keys) if not store.check([key])]
        raise OnThisRank(problem or f"rank {', '.join(missing)} did not start within {timeout}") from error
    problems: dict[str, list[str]] = {}
    for each, text in enumerate(store.multi_get(keys)):
        problems.setdefault(text.decode(), []).append(str(each))
    if list(problems) == [""]:
        return
    wait_for_readers(store, rank, world_size)
    if len(problems) == 1:
        raise SameEverywhere(next(iter(problems)))
    told = [f"rank {', '.join(ranks)}: {text}" for text, ranks in problems.items() if text]
    raise SameEverywhere("; ".join(told))


def wait_for_readers(store, rank: int, world_size: int) -> None:
    """Rank 0 may host the store, so it leaves last. Collective over `store`, once."""
    count = store.add("start/read", 1)
    deadline = time.monotonic() + _PATIENCE
    while rank == 0 and count < world_size and time.monotonic() < deadline:
        time.sleep(0.05)
        count = store.add("start/read", 0)


def agree_or_raise(error: ValueError) -> None:
    """Raise `SameEverywhere` if every rank of the job has come here with an error, else `error` itself.

    Needs the process group's store, no collective, so a rank that hangs elsewhere costs `_PATIENCE` seconds and no
    more.
    """
    import torch

    if getattr(error, "pipeline_instruction", None) is not None:  # one stage's own trouble
        raise error
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        store = torch.distributed.distributed_c10d._get_default_store()
        count = store.add("user_errors", 1)
        deadline = time.monotonic() + _PATIENCE
        while count < torch.distributed.get_world_size():
            if time.monotonic() > deadline:
                raise error
            time.sleep(0.05)
            count = store.add("user_errors", 0)
    raise SameEverywhere(str(error)) from error


@contextmanager
def told_once(guard: AbstractContextManager) -> Iterator[None]:
    """The block within `guard`, which a ValueError that all ranks have alike leaves in peace, as `SameEverywhere`."""
    outcome = None
    with guard:
        try:
            yield
        except ValueError as error:
            try:
                agree_or_raise(error)
            except SameEverywhere as same:
                outcome = same
    if outcome is not None:
        raise outcome
