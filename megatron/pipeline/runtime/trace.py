"""Tracing: when each instruction of a rank started and ended, in bounded memory.

A rank records three tracks: `compute` (an instruction without its waiting), `wait` (how long it waited for a transfer or
for the chain before that) and `chain` (the reductions on the background thread). Only the last batches are kept. The
tracks of all ranks are gathered on one rank and written in Chrome's trace-event format, which Perfetto reads, or turned
into the Timeline that the simulator yields, so that the same drawing shows the plan and the measured run.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.pipeline.instruction import Instruction

COMPUTE, WAIT, CHAIN = "compute", "wait", "chain"


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One traced interval of a rank; `start` and `end` in seconds of a clock that all ranks share."""

    rank: int
    track: str
    instruction: Instruction
    start: float
    end: float


class HostClock:
    """Seconds of this process's steady clock; marks are plain floats."""

    now = staticmethod(time.perf_counter)

    def seconds(self, mark: float) -> float:
        return mark


class CudaClock:
    """Marks are CUDA events on the current stream, so spans show when the device did the work, not when it was queued."""

    def __init__(self) -> None:
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record()
        self._origin.synchronize()
        self._origin_seconds = time.perf_counter()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return self._origin_seconds + self._origin.elapsed_time(mark) / 1000


class Tracer:
    """Collects the spans of one rank. `num_batches`: how many of the latest batches are kept."""

    def __init__(self, *, num_batches: int = 16, clock: HostClock | CudaClock | None = None) -> None:
        self._clock = clock or HostClock()
        self.now = self._clock.now
        self._legs: deque[list[tuple[Instruction, Any, Any, Any]]] = deque(maxlen=num_batches)
        self._chains: deque[tuple[Instruction, Any, Any]] = deque(maxlen=num_batches * 8)
        self.begin_leg()

    def begin_leg(self) -> None:
        """What follows belongs to the next batch; the oldest batch beyond the bound is forgotten."""
        self._legs.append([])
        self.record = self._legs[-1].append  # the hot loop calls this with (instruction, start, ready, end)

    def record_chain(self, instruction: Instruction, start: Any, end: Any) -> None:
        self._chains.append((instruction, start, end))

    def spans(self, rank: int) -> list[TraceSpan]:
        """The kept spans in seconds since the epoch (so that ranks on hosts with synchronised clocks line up)."""
        offset = time.time() - time.perf_counter()
        seconds = self._clock.seconds
        spans = []
        for leg in list(self._legs):
            for instruction, start, ready, end in list(leg):
                first, middle, last = (offset + seconds(mark) for mark in (start, ready, end))
                if middle > first:
                    spans.append(TraceSpan(rank, WAIT, instruction, first, middle))
                spans.append(TraceSpan(rank, COMPUTE, instruction, middle, last))
        for instruction, start, end in list(self._chains):
            spans.append(TraceSpan(rank, CHAIN, instruction, offset + seconds(start), offset + seconds(end)))
        return spans


def gather_spans(spans: list[TraceSpan], *, group: Any, group_rank: int, group_size: int) -> list[TraceSpan] | None:
    """All ranks' spans on the group's first rank, sorted by start; None on the others. Collective over `group` (gloo)."""
    if group_size == 1:
        return sorted(spans, key=lambda span: span.start)
    packed = [(span.rank, span.track, str(span.instruction), span.start, span.end) for span in spans]
    gathered: list[Any] | None = [None] * group_size if group_rank == 0 else None
    torch.distributed.gather_object(packed, gathered, group=group, group_dst=0)
    if gathered is None:
        return None
    everything = [
        TraceSpan(rank, track, Instruction.parse(text), start, end)
        for part in gathered
        for rank, track, text, start, end in part
    ]
    return sorted(everything, key=lambda span: span.start)


def chrome_trace(spans: Iterable[TraceSpan]) -> dict[str, Any]:
    """Chrome trace events: a process per rank, a thread per track, times in microseconds from the first span."""
    spans = list(spans)
    origin = min((span.start for span in spans), default=0.0)
    threads = {COMPUTE: 0, WAIT: 1, CHAIN: 2}
    events: list[dict[str, Any]] = []
    for rank in sorted({span.rank for span in spans}):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for track, thread in threads.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": track}})
    for span in spans:
        instruction = span.instruction
        arguments = {
            name: value
            for name, value in (
                ("stage", instruction.stage),
                ("microbatch", instruction.microbatch),
                ("version", instruction.version),
            )
            if value is not None
        }
        events.append(
            {
                "ph": "X",
                "name": str(instruction),
                "cat": instruction.kind.value,
                "pid": span.rank,
                "tid": threads[span.track],
                "ts": (span.start - origin) * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": arguments,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(spans: Iterable[TraceSpan], path: str | Path) -> None:
    """Write the trace where Perfetto (ui.perfetto.dev) or chrome://tracing can open it."""
    Path(path).write_text(json.dumps(chrome_trace(spans)))
