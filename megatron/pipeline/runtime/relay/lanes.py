"""The lanes of a rank whose weights live on the host: to the device, from the device, and the host's optimizer.

Problem: FETCH, FREE, STORE_GRAD and UPDATE run at the same time as the computation. Each of them must wait for other
instructions: in its own lane, in another lane, in the chain of reductions, or in the row.

Solution: three `LaneThread`s, and the rules of `program.lane_order.LaneOrder`, which checker and simulator use, too. An
instruction begins when its predecessor in its lane and its dependencies are complete, and on CUDA also when the device
has done the earlier work of the row. Computations on the main thread and reductions on the thread of the chain wait for
their dependencies. An instruction is complete when its call has returned and the stream of its lane has done the work.
Other streams wait for this stream, and where the host itself accesses host memory, the host waits for the stream.

A failure on any of these threads ends all waits at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.backend.streams import Event, streams_of
from megatron.pipeline.program.instruction import AWAITED, Instruction
from megatron.pipeline.program.instruction import Lane as LaneName
from megatron.pipeline.program.lane_order import LaneOrder
from megatron.pipeline.runtime.contract.trace import Tracer
from megatron.pipeline.runtime.transport.lane import LaneThread

_LANES = (LaneName.H2D, LaneName.D2H, LaneName.HOST)


@dataclass(eq=False, slots=True)
class _Posted:
    """An instruction for which others may wait. `event` marks the end of its work on the stream of its thread."""

    instruction: Instruction
    is_complete: bool = False
    event: Event = None


class Lanes:
    """The three lanes of one rank.

    Each instruction of the row that waits, or for which others wait, must be passed to `request`, `in_chain` or
    `wait_for`, in the order of the row.

    Args:
        order: the dependencies of the instructions.
        device: the device of the rank.
        timeout: the seconds that a computation waits at most.
        tracer: records the instructions of the lanes.
        on_error: called with the first error of a lane or of the chain, on the thread that failed.
        annotate: called by a lane with an error and the instruction that failed.
        on_awaited: called on the main thread with each instruction for which a computation has waited.

    Attributes:
        traced: whether instructions that are requested from now on are traced.
        waiting: the instruction for which a computation waits now, or None.
    """

    def __init__(
        self,
        order: LaneOrder,
        *,
        device: torch.device,
        timeout: float,
        tracer: Tracer | None = None,
        on_error: Callable[[Exception], None] = lambda error: None,
        annotate: Callable[[Exception, Instruction], None] = lambda error, instruction: None,
        on_awaited: Callable[[Instruction], None] = lambda word: None,
    ) -> None:
        self.traced = True
        self.waiting: Instruction | None = None
        self._order = order
        self._timeout = timeout
        self._streams = streams_of(device)
        self._on_error = on_error
        self._on_awaited = on_awaited
        self._error: Exception | None = None
        self._progress = threading.Condition()
        self._num_told = 0
        self._posted: dict[int, _Posted] = {}  # number in the row -> an instruction that may be awaited
        self._most_kept = 64
        self._last: dict[LaneName, _Posted] = {}
        self._lanes = {
            name: LaneThread(name.value, device=device, tracer=tracer, on_error=self.fail, annotate=annotate)
            for name in _LANES
        }

    @property
    def num_incomplete(self) -> int:
        return sum(lane.num_incomplete for lane in self._lanes.values())

    def request(self, instruction: Instruction, call: Callable[[], Any]) -> None:
        """Queue `call` in the lane of the instruction.

        The instruction is complete when `call` has returned and its work on the device is done.
        """
        self._raise_error()
        name = instruction.kind.row.lane
        posted, awaited = self._tell(instruction)
        given = self._streams.record()
        on_host = name is LaneName.HOST  # the host reads copied data itself, without a stream

        def ready() -> None:
            self._join(awaited, on_host=on_host)
            self._streams.wait(given)

        def carry_out() -> None:
            call()
            self._complete(posted)

        self._last[name] = posted
        self._lanes[name].request(instruction, carry_out, ready=ready, traced=self.traced)

    def in_chain(self, instruction: Instruction, call: Callable[[], None]) -> Callable[[], None]:
        """Wrap the call of a reduction that waits for lanes, or for which lanes wait; the chain calls the result."""
        posted, awaited = self._tell(instruction)

        def reduce() -> None:
            self._join(awaited, on_host=True)
            call()
            self._complete(posted)

        return reduce

    def wait_for(self, computation: Instruction) -> bool:
        """Wait until the dependencies of `computation` are complete. Return whether there was anything to wait for.

        On CUDA the host waits until their work is queued on the device, and the current stream waits until it is done.

        Raises:
            TimeoutError: the wait took longer than `timeout`. The message has the awaited and the running instructions.
            Exception: the error of a lane or a reduction.
        """
        _, awaited = self._tell(computation)
        waits = any(not each.is_complete for each in awaited)
        if waits:
            self.waiting = next((each.instruction for each in awaited if not each.is_complete), None)
        self._join(awaited, timeout=self._timeout, waiting=computation)
        self.waiting = None
        for each in awaited:
            self._on_awaited(each.instruction)
        return waits or (self._streams.runs_ahead and bool(awaited))

    def settle(self) -> None:
        """Wait until all requests are complete. Called while drained."""
        self._join(list(self._last.values()), timeout=self._timeout, on_host=True)
        self._last.clear()
        for lane in self._lanes.values():
            lane.wait(lane.num_requested, self._timeout)

    def fail(self, error: Exception) -> None:
        """Store an error of a lane or of the chain, which ends all waits. Only the first error is stored."""
        with self._progress:
            if self._error is not None:
                return
            self._error = error
            self._progress.notify_all()
        self._on_error(error)

    def close(self, timeout: float = 5.0) -> None:
        """Stop the threads after all requests. Waits at most `timeout` seconds for each thread."""
        for lane in self._lanes.values():
            lane.close(timeout)

    def abandon(self, timeout: float) -> bool:
        """End all waits with an error, so that the threads stop. Return whether each ends within `timeout` seconds."""
        with self._progress:
            self._error = self._error or RuntimeError("the engine was given up")
            self._progress.notify_all()
        return all([lane.abandon(timeout) for lane in self._lanes.values()])

    def _tell(self, instruction: Instruction) -> tuple[_Posted, list[_Posted]]:
        """Pass an instruction to the order. Return its record and the records of its dependencies."""
        awaited = [self._posted[number] for number in self._order.awaited(instruction)]
        posted = _Posted(instruction)
        if instruction.kind in AWAITED:
            self._posted[self._num_told] = posted
        self._num_told += 1
        if len(self._posted) > self._most_kept:
            still = frozenset(self._order.still_awaited())
            self._posted = {number: each for number, each in self._posted.items() if number in still}
            self._most_kept = 2 * len(self._posted) + 64
        return posted, awaited

    def _complete(self, posted: _Posted) -> None:
        event = self._streams.record()
        with self._progress:
            posted.event, posted.is_complete = event, True
            self._progress.notify_all()

    def _join(
        self,
        awaited: Sequence[_Posted],
        *,
        on_host: bool = False,
        timeout: float | None = None,
        waiting: Instruction | None = None,
    ) -> None:
        """Wait until all of `awaited` are complete.

        The host waits for their calls. Then the current stream waits for their work on the device; with `on_host` the
        host waits for it instead.
        """
        if not awaited:
            return
        with self._progress:
            self._progress.wait_for(
                lambda: self._error is not None or all(each.is_complete for each in awaited), timeout
            )
            late = next((each.instruction for each in awaited if not each.is_complete), None)
        if late is not None:
            self._raise_error()
            raise self._overdue(late, waiting)
        for each in awaited:
            (self._streams.finish if on_host else self._streams.wait)(each.event)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _overdue(self, late: Instruction, waiting: Instruction | None) -> TimeoutError:
        who = "the end of the segment" if waiting is None else str(waiting)
        under_way = [str(lane.current) for lane in self._lanes.values() if lane.current not in (None, late)]
        beside = f"; {' and '.join(under_way)} {'are' if len(under_way) > 1 else 'is'} under way" if under_way else ""
        return TimeoutError(f"{who} waited {self._timeout:g} s for {late} ({late.kind.row.lane.value}){beside}")
