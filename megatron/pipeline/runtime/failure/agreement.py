"""One verdict on all ranks: what any of them refuses, each of them raises.

Problem: where one rank finds a wrong flag, a damaged file or a full disk and raises while the others enter a
collective, those hang until a timeout, and the log shows the timeout instead of the cause.

Solution: at fixed points every rank says whether it failed and why, and all raise. Before the process group forms they
say it through the job's store. Later they say it over a gloo group of its own, which neither needs GPU memory nor
queues behind training traffic, and may be used from a background thread. That group is another than the one for control
messages: a rank that failed before a message on the latter comes to its next verdict alone, and must not be taken for
that message's sender.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.pipeline.runtime.failure.errors import PATIENCE, AgreedError, OnThisRank, SameEverywhere

# --- before the run: over the store -----------------------------------------------------------------------------------


def agree_to_start(store: dist.Store, *, rank: int, world_size: int, problem: str | None, timeout: timedelta) -> None:
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


def wait_for_readers(store: dist.Store, rank: int, world_size: int) -> None:
    """Make rank 0, which may host the store, leave last. Collective over `store`, once."""
    count = store.add("start/read", 1)
    deadline = time.monotonic() + PATIENCE
    while rank == 0 and count < world_size and time.monotonic() < deadline:
        time.sleep(0.05)
        count = store.add("start/read", 0)


# --- at fixed points: over groups of gloo -----------------------------------------------------------------------------

_groups: list[tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]] = []  # the job's, messages, verdicts
_timeout: timedelta | None = None


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
    distinct = list(dict.fromkeys(text for text in _gathered(problem, verdicts) if text))
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


class Agreement:
    """Verdicts of the ranks of a job that need not be the whole world: every rank raises an error of its own.

    Args:
        ranks: the job's, ascending.
        group: theirs, of gloo; None: there is one rank.
        is_one_pipeline: whether they are the ranks of one pipeline, and not of several replicas.

    Attributes:
        refusal: the last error that all ranks of the job have raised alike, if any.
    """

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup | None, *, is_one_pipeline: bool) -> None:
        self._ranks, self._group, self._is_one_pipeline = ranks, group, is_one_pipeline
        self.refusal: Exception | None = None

    def gathered(self, value: Any) -> list[Any]:
        """Collective: the values of all ranks of the job, in the order of their global ranks."""
        return [value] if self._group is None else _gathered(value, self._group)

    def on(self, function: Callable[[], Any]) -> Any:
        """Collective: the result of a function without collectives.

        Raises:
            ValueError: on all ranks, where it raises on one. That one raises its own error.
        """
        result, problem = None, None
        try:
            result = function()
        except Exception as error:
            problem = error
        problems = self.gathered(None if problem is None else f"{problem}")
        for rank, text in zip(self._ranks, problems, strict=True):
            if text is not None:
                self.refusal = problem or ValueError(f"rank {rank}: {text}")
                raise self.refusal
        return result

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """A block whose ValueErrors all ranks of the pipeline raise."""
        try:
            yield
        except ValueError as error:
            if self._is_one_pipeline:
                self.refusal = error
            raise


def _gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Collective: the picklable values of all ranks of `group`, in the order of the ranks."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


# --- errors that all ranks have alike ---------------------------------------------------------------------------------


@contextmanager
def guarded(guard: AbstractContextManager) -> Iterator[None]:
    """The block within `guard`, which a ValueError that all ranks have alike leaves in peace, as `SameEverywhere`."""
    outcome = None
    with guard:
        try:
            yield
        except ValueError as error:
            try:
                _raise_shared(error)
            except SameEverywhere as same:
                outcome = same
    if outcome is not None:
        raise outcome


def _raise_shared(error: ValueError) -> None:
    """Raise `SameEverywhere` if every rank of the job has come here with an error, else `error` itself.

    Needs the process group's store, no collective, so a rank that hangs elsewhere costs `PATIENCE` seconds and no
    more.
    """
    if getattr(error, "pipeline_instruction", None) is not None:  # one stage's own trouble
        raise error
    if dist.is_initialized() and dist.get_world_size() > 1:
        store = dist.distributed_c10d._get_default_store()
        count = store.add("user_errors", 1)
        deadline = time.monotonic() + PATIENCE
        while count < dist.get_world_size():
            if time.monotonic() > deadline:
                raise error
            time.sleep(0.05)
            count = store.add("user_errors", 0)
    raise SameEverywhere(str(error)) from error
