"""From a command line to a running job, and from any error to one clear end.

Errors in the command line are found before torch is imported, printed by rank 0 only, and end every rank with status
2. What all ranks find alike during start-up or training (a missing file, a damaged checkpoint) is printed once too.
What goes wrong on one rank alone is the failure guard's business: it ends all ranks with status 1 and names rank,
stage and cause.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable

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
        if not args.use_checkpoint_args:
            args.notes_for_log = validate_args(args, world_size=_number("WORLD_SIZE", 1), rank=_number("RANK", 0))
    except ValueError as error:
        return _end(prog, error)
    from megatron import backend  # imports torch

    backend.install()
    try:
        main(args, stop, started)
    except SameEverywhere as error:
        return _end(prog, error)
    return 0


class SameEverywhere(Exception):
    """An error that every rank has found; its text is for the user."""


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


def _end(prog: str, error: Exception) -> int:
    """Print the error once in the job: rank 0 prints and ends first, and the launcher then ends the others."""
    if _number("RANK", 0) == 0:
        sys.stderr.write(f"{prog}: error: {error}\n")
        sys.stderr.flush()
    else:
        time.sleep(_PATIENCE)
    return USER_ERROR


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
