"""One verdict on all ranks.

Problem: where one rank finds a damaged file or a full disk and raises while the others enter a collective, those hang
until a timeout, and the log shows the timeout instead of the cause.

Solution: at fixed points every rank says whether it failed and why, over a gloo group of its own (so it neither needs
GPU memory nor queues behind training traffic, and may be used from a background thread), and all raise the same error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from megatron.training.checkpoint.errors import CheckpointError

_groups: list[tuple[dist.ProcessGroup, dist.ProcessGroup]] = []
_timeout: timedelta | None = None


def set_timeout(timeout: timedelta) -> None:
    """How long ranks wait for each other, from the first `control_group` on; without it torch's default, 30 minutes."""
    global _timeout
    _timeout = timeout


def control_group() -> dist.ProcessGroup:
    """A gloo group of all ranks for control messages. The first call is collective."""
    world = dist.group.WORLD
    if not _groups or _groups[0][0] is not world:
        _groups[:] = [(world, dist.new_group(backend="gloo", timeout=_timeout))]
    return _groups[0][1]


def agree(problem: str | None) -> None:
    """Collective: raise CheckpointError on every rank if any rank reports a problem."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem, group=control_group())
    distinct = list(dict.fromkeys(text for text in problems if text))
    if distinct:
        shown = distinct[:4] + ([f"and {len(distinct) - 4} more"] if len(distinct) > 4 else [])
        raise CheckpointError("; ".join(shown))


@contextmanager
def agreed() -> Iterator[None]:
    """Collective: the block has succeeded on all ranks when it is left; else every rank raises CheckpointError.

    The block must contain no collective that a failing rank would miss.
    """
    problem, cause = None, None
    try:
        yield
    except Exception as error:
        problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        cause = error
    try:
        agree(problem)
    except CheckpointError as verdict:
        raise verdict from cause


def on_rank_zero(function: Callable[[], object]) -> object:
    """Collective: run `function` on rank 0 and return its (picklable) result everywhere; all raise where it fails."""
    result = [None]
    with agreed():
        if dist.get_rank() == 0:
            result[0] = function()
    dist.broadcast_object_list(result, src=0, group=control_group())
    return result[0]
