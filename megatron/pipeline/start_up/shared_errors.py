"""Errors that ranks tell each other before any of them ends: a user reads each once."""

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

from megatron.pipeline.runtime.failure.user_error import PATIENCE


class SameEverywhere(Exception):
    """An error that every rank knows; its text is for the user."""


class OnThisRank(Exception):
    """An error of a rank that cannot reach the others to tell them; its text is for the user."""


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
    deadline = time.monotonic() + PATIENCE
    while rank == 0 and count < world_size and time.monotonic() < deadline:
        time.sleep(0.05)
        count = store.add("start/read", 0)


def agree_or_raise(error: ValueError) -> None:
    """Raise `SameEverywhere` if every rank of the job has come here with an error, else `error` itself.

    Needs the process group's store, no collective, so a rank that hangs elsewhere costs `PATIENCE` seconds and no
    more.
    """
    import torch

    if getattr(error, "pipeline_instruction", None) is not None:  # one stage's own trouble
        raise error
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        store = torch.distributed.distributed_c10d._get_default_store()
        count = store.add("user_errors", 1)
        deadline = time.monotonic() + PATIENCE
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
