"""One verdict on all ranks.

Problem: where one rank finds a damaged file or a full disk and raises while the others enter a collective, those hang
until a timeout, and the log shows the timeout instead of the cause.

Solution: at fixed points every rank says whether it failed and why, over a gloo group of its own (so it neither needs
GPU memory nor queues behind training traffic, and may be used from a background thread), and all raise the same error.
That group is another than the one for control messages: a rank that failed before a message on the latter comes to its
next verdict alone, and must not be taken for that message's sender.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.trainer.ranks.checkpoint_error import CheckpointError

_groups: list[tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]] = []  # the job's, messages, verdicts
_timeout: timedelta | None = None


class AgreedError(CheckpointError):
    """What every rank raises, since at least one has failed."""


def set_timeout(timeout: timedelta) -> None:
    """How long ranks wait for each other, from the first `control_group` on; without it torch's default, 30 minutes."""
    global _timeout
    _timeout = timeout


def control_group() -> dist.ProcessGroup:
    """A gloo group of all ranks for control messages. The first call is collective."""
    return _own_groups()[1]


def _own_groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]:
    world = dist.group.WORLD
    if not _groups or _groups[0][0] is not world:
        _groups[:] = [(world, *(dist.new_group(backend="gloo", timeout=_timeout) for _ in range(2)))]
    return _groups[0]


def agree(problem: str | None, *, patience: timedelta | None = None) -> None:
    """Collective: raise AgreedError on every rank if any rank reports a problem.

    `patience`: how long one that has a problem waits for the others; default: the group's timeout. Raises RuntimeError
    where they do not come.
    """
    *_, verdicts = _own_groups()
    has_failed = torch.tensor([problem is not None], dtype=torch.int32)
    work = dist.all_reduce(has_failed, op=dist.ReduceOp.MAX, group=verdicts, async_op=True)
    work.wait(*([] if problem is None or patience is None else [patience]))
    if not has_failed.item():
        return
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem, group=verdicts)
    distinct = list(dict.fromkeys(text for text in problems if text))
    shown = distinct[:4] + ([f"and {len(distinct) - 4} more"] if len(distinct) > 4 else [])
    raise AgreedError("; ".join(shown))


@contextmanager
def agreed(*, patience: timedelta | None = None) -> Iterator[None]:
    """Collective: the block has succeeded on all ranks when it is left; else every rank raises CheckpointError.

    Blocks may lie in each other; then a rank that fails between two inner ones ends the next of them on the others.
    What a failing rank would miss must be no collective: the others wait in that until its timeout. Where one may be
    missed, the failing rank waits no longer than `patience` for them, and raises its own error.
    """
    cause: Exception | None = None
    try:
        yield
    except AgreedError:  # all ranks are on their way out
        raise
    except Exception as error:
        cause = error
    try:
        agree(None if cause is None else _sentence(cause), patience=patience)
    except AgreedError as verdict:
        raise verdict from cause
    except RuntimeError:
        if cause is None:
            raise
    if cause is not None:
        raise cause


def _sentence(error: Exception) -> str:
    return (str(error) if isinstance(error, ValueError) else None) or f"{type(error).__name__}: {error}"


def on_rank_zero(function: Callable[[], object]) -> object:
    """Collective: run `function` on rank 0 and return its (picklable) result everywhere; all raise where it fails."""
    result = [None]
    with agreed():
        if dist.get_rank() == 0:
            result[0] = function()
    dist.broadcast_object_list(result, src=0, group=control_group())
    return result[0]
