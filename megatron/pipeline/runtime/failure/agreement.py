"""One verdict on all ranks: if any rank has a problem, every rank raises it.

Problem: one rank finds a wrong flag, a damaged file or a full disk and raises while the others enter a collective. The
others hang until a timeout, and the log shows the timeout instead of the cause.

Solution: at fixed points every rank reports whether it failed and why, and if one failed, all raise. Before the process
group forms, they report through the job's store. Later they report over a separate gloo group. It needs no GPU memory,
does not queue behind training traffic, and may be used from a background thread. Control messages have another gloo
group. A rank that fails before a control message enters its next verdict while the others wait for that message; in one
group the message and the verdict would be mixed up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.pipeline.runtime.contract.meetings import meets
from megatron.pipeline.runtime.failure.errors import ERROR_PATIENCE, AgreedError, OnThisRank, SameEverywhere

# --- before the run: over the store -----------------------------------------------------------------------------------


def agree_to_start(store: dist.Store, *, rank: int, world_size: int, problem: str | None, timeout: timedelta) -> None:
    """Return only if no rank has found a problem. Collective over the job's `store`; needs no process group.

    `problem`: this rank's problem in one sentence, or None.

    Raises:
        SameEverywhere: on every rank, if any rank has a problem. Names the ranks unless all have the same problem.
        OnThisRank: a rank did not report within `timeout`.
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
    """Make rank 0, which may host the store, return last. Collective over `store`; only once per job.

    Rank 0 waits at most `ERROR_PATIENCE` seconds.
    """
    meets(store, "start/read", world_size, ERROR_PATIENCE if rank == 0 else 0.0)


# --- at fixed points: over groups of gloo -----------------------------------------------------------------------------

_groups: list[tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]] = []  # world, messages, verdicts
_timeout: timedelta | None = None


def set_timeout(timeout: timedelta) -> None:
    """Set how long ranks wait for each other in control messages and verdicts (default: torch's 30 minutes).

    Call it before the first `control_group`, which makes the groups.
    """
    global _timeout
    _timeout = timeout


def control_group() -> dist.ProcessGroup:
    """Return the gloo group of all ranks for control messages. The first call is collective."""
    return _own_groups()[1]


def _own_groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]:
    world = dist.group.WORLD
    if not _groups or _groups[0][0] is not world:
        _groups[:] = [(world, *(dist.new_group(backend="gloo", timeout=_timeout) for _ in range(2)))]
    return _groups[0]


def agree(problem: str | None, *, patience: timedelta | None = None) -> None:
    """Collective: raise AgreedError on every rank if any rank reports a problem.

    `patience`: how long a rank with a problem waits for the others (default: the group's timeout). Raises RuntimeError
    if they do not arrive in time.
    """
    *_, verdicts = _own_groups()
    has_failed = torch.tensor([problem is not None], dtype=torch.int32)
    work = dist.all_reduce(has_failed, op=dist.ReduceOp.MAX, group=verdicts, async_op=True)
    work.wait(*([] if problem is None or patience is None else [patience]))
    if not has_failed.item():
        return
    distinct = list(dict.fromkeys(text for text in gathered(problem, verdicts) if text))
    shown = distinct[:4] + ([f"and {len(distinct) - 4} more"] if len(distinct) > 4 else [])
    raise AgreedError("; ".join(shown))


@contextmanager
def agreed(*, patience: timedelta | None = None) -> Iterator[None]:
    """Collective: leave the block only when it has succeeded on all ranks; if it fails on one, all raise AgreedError.

    Blocks may be nested: if a rank fails between two inner blocks, the next inner block raises on the other ranks. A
    block should contain no collective that a failing rank would miss, since the others wait in it until its timeout. If
    it contains one, set `patience`: a failing rank waits no longer than that for the others, then raises its own error.
    """
    cause: Exception | None = None
    try:
        yield
    except AgreedError:  # all ranks raise it
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
    """Collective: run `function` on rank 0 and return its (picklable) result on all ranks; if it fails, all raise."""
    result = [None]
    with agreed():
        if dist.get_rank() == 0:
            result[0] = function()
    dist.broadcast_object_list(result, src=0, group=control_group())
    return result[0]


class Agreement:
    """Verdicts of a job's ranks, which need not be the whole world. If one rank fails, every rank raises an error.

    Args:
        ranks: global ranks of the job, ascending.
        group: the gloo group of these ranks; None if there is one rank.
        is_one_pipeline: whether the ranks form one pipeline, not several replicas.

    Attributes:
        refusal: the last error that all ranks of the job have raised together, if any.
    """

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup | None, *, is_one_pipeline: bool) -> None:
        self._ranks, self._group, self._is_one_pipeline = ranks, group, is_one_pipeline
        self.refusal: Exception | None = None

    def gathered(self, value: Any) -> list[Any]:
        """Collective: return the values of all ranks of the job, in the order of their global ranks."""
        return [value] if self._group is None else gathered(value, self._group)

    def on(self, function: Callable[[], Any]) -> Any:
        """Collective: return the result of `function`, which must contain no collective.

        Raises:
            ValueError: the function has raised on another rank. If it has raised on this rank, this rank raises its
                own error.
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
        """Context for a block whose ValueErrors all ranks of a pipeline raise. Keeps such an error as `refusal`."""
        try:
            yield
        except ValueError as error:
            if self._is_one_pipeline:
                self.refusal = error
            raise


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Collective: return the picklable values of all ranks of `group`, or of the job, in rank order."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


# --- errors that all ranks share --------------------------------------------------------------------------------------


@contextmanager
def guarded(guard: AbstractContextManager) -> Iterator[None]:
    """Run the block inside `guard`, but raise a ValueError that all ranks share outside of it, as `SameEverywhere`.

    So `guard` sees a normal end and does not report a failure.
    """
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
    """Raise `SameEverywhere` if every rank of the job has arrived here with an error, else `error` itself.

    Uses the process group's store and no collective, so a rank that hangs elsewhere costs only `ERROR_PATIENCE`
    seconds.
    """
    if getattr(error, "pipeline_instruction", None) is not None:  # an error of one stage
        raise error
    if dist.is_initialized() and dist.get_world_size() > 1:
        store = dist.distributed_c10d._get_default_store()
        if not meets(store, "user_errors", dist.get_world_size(), ERROR_PATIENCE):
            raise error
    raise SameEverywhere(str(error)) from error
