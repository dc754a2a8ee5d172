"""Tracing: when each instruction of a rank started and ended, in bounded memory.

A rank records these tracks:

- `compute`: an instruction without its waiting,
- `wait`: the instruction's wait for a transfer or for the chain, before its work,
- `chain`: the reductions on their background thread,
- `moves`: the moves of saved activations on their background thread, from the start of a move until it is complete,
- where weights live on the host, one track each for the lanes to the host, from the host and of the host's optimizer:
  from the start of an instruction in the lane until it is complete.

Where backwards are split, the rank also records the bytes that it keeps between I and W. Only the last batches are
kept. The tracks of all ranks are gathered on one rank. They are written in Chrome's trace-event format, which Perfetto
reads, or become a Timeline like the simulator's, so that one drawing shows the plan and the measured run.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.documents.files import write_whole
from megatron.pipeline.program.copies import Copy
from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.program.instruction import Instruction, Lane, Tensor
from megatron.pipeline.simulate.timeline import Span, Timeline

COMPUTE, WAIT, CHAIN, MOVES = "compute", "wait", "chain", "moves"
HOST_TRACKS = tuple(lane.value for lane in (Lane.H2D, Lane.D2H, Lane.HOST))


@dataclass(frozen=True, slots=True)
class BatchExtent:
    """A batch and the range of its microbatches, numbered over the whole run."""

    batch: int
    first_microbatch: int
    num_microbatches: int


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One traced interval; `start` and `end` in seconds since the epoch."""

    track: str
    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank.

    Attributes:
        rank: its global rank. Where ranks were lost, these are the ranks of the whole job.
        pipeline: the global ranks of its pipeline, in pipeline order.
        rank_of_stage: stage -> pipeline rank.
        batches: the kept batches.
        spans: intervals of these batches, and of instructions executed during them.
        edges: the edges between stages; empty: a chain.
        copies: for each stage of the program, the copy of a model's stage that it is; empty: there are no copies.
        deferred_bytes: (seconds since the epoch, bytes) at every change of the bytes saved between I and W.
        place: the text that names the rank's place in the job; empty: its rank in the pipeline.
    """

    rank: int
    pipeline: tuple[int, ...]
    rank_of_stage: tuple[int, ...]
    batches: tuple[BatchExtent, ...]
    spans: tuple[TraceSpan, ...]
    edges: tuple[Edge, ...] = ()
    copies: tuple[Copy, ...] = ()
    deferred_bytes: tuple[tuple[float, int], ...] = ()
    place: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.place or f'pipeline rank {self.pipeline.index(self.rank)}'})"


class HostClock:
    """The process's monotonic clock. A mark is a float, in seconds."""

    now = staticmethod(time.perf_counter)

    def reader(self) -> Callable[[float], float]:
        """Return a function that converts a mark to seconds of `time.perf_counter`."""
        return float


class CudaClock:
    """The device's clock. A mark is a CUDA event on the current stream.

    So spans show when the device did the work, not when the work was queued. CUDA gives the time between two events in
    milliseconds with 24 bits: after a day, in steps of 8 ms. So the times of marks are measured from an event recorded
    at the time of reading, not from an event at the beginning of the run.
    """

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reader(self) -> Callable[[torch.cuda.Event], float]:
        """Return a function that converts a mark to seconds of `time.perf_counter`.

        Waits until the device has reached all marks.
        """
        torch.cuda.synchronize()
        end = self.now()
        end.synchronize()
        seconds = time.perf_counter()
        return lambda mark: seconds - mark.elapsed_time(end) / 1000


class Tracer:
    """Collects the spans of one rank for its latest `num_batches` batches."""

    def __init__(self, *, num_batches: int = 16, clock: HostClock | CudaClock | None = None) -> None:
        self._clock = clock or HostClock()
        self.now = self._clock.now
        self._segments: deque[tuple[BatchExtent, list[tuple[Instruction, Any, Any, Any]]]] = deque(maxlen=num_batches)
        self._background: deque[list[tuple[str, Instruction, Any, Any]]] = deque(maxlen=num_batches)  # by batch of end
        self._deferred: deque[list[tuple[Any, int]]] = deque(maxlen=num_batches)

    def begin_batch(self, extent: BatchExtent) -> None:
        """Begin the segment of a batch. Drop the oldest batch where more than `num_batches` are kept."""
        segment: list[tuple[Instruction, Any, Any, Any]] = []
        self._segments.append((extent, segment))
        self._background.append([])
        self._deferred.append([])
        self.record = segment.append  # the hot loop calls this with (instruction, start, ready, end)

    def drop_last(self) -> None:
        """Drop the instructions recorded in the segment of the last batch, because the batch begins again."""
        self._segments[-1][1].clear()

    def record_background(self, track: str, instruction: Instruction, start: Any, end: Any) -> None:
        """Record a span of another thread in the current segment."""
        self._background[-1].append((track, instruction, start, end))

    def record_deferred(self, num_bytes: int) -> None:
        """Record that `num_bytes` are saved between I and W from now on."""
        self._deferred[-1].append((self.now(), num_bytes))

    def deferred_bytes(self) -> tuple[tuple[float, int], ...]:
        """Return how many bytes were saved between I and W, and since when: (seconds since the epoch, bytes)."""
        seconds, offset = self._clock.reader(), time.time() - time.perf_counter()
        return tuple((offset + seconds(mark), num_bytes) for noted in self._deferred for mark, num_bytes in noted)

    def batches(self) -> tuple[BatchExtent, ...]:
        return tuple(extent for extent, _ in self._segments)

    def spans(self) -> tuple[TraceSpan, ...]:
        """Return the kept spans, in seconds since the epoch: ranks line up if the clocks of their hosts agree."""
        seconds, offset = self._clock.reader(), time.time() - time.perf_counter()
        spans = []
        for _, segment in list(self._segments):
            for instruction, start, ready, end in list(segment):
                first, middle, last = (offset + seconds(mark) for mark in (start, ready, end))
                if middle > first:
                    spans.append(TraceSpan(WAIT, instruction, first, middle))
                spans.append(TraceSpan(COMPUTE, instruction, middle, last))
        for segment in list(self._background):
            for track, instruction, start, end in list(segment):
                spans.append(TraceSpan(track, instruction, offset + seconds(start), offset + seconds(end)))
        return tuple(spans)


def gather_traces(trace: RankTrace, *, group: Any = None) -> list[RankTrace] | None:
    """Return the traces of all ranks of `group` on its first rank, None on the others.

    Collective over `group` (default: all ranks).
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size(group) == 1:
        return [trace]
    is_first = torch.distributed.get_rank(group) == 0
    gathered: list[Any] | None = [None] * torch.distributed.get_world_size(group) if is_first else None
    torch.distributed.gather_object(trace, gathered, group=group, group_dst=0)
    return gathered


def timeline(traces: Iterable[RankTrace], *, name: str = "measured") -> Timeline:
    """Return the first pipeline's traces as a Timeline of the kept batches, in seconds from the first span.

    An instruction that another thread executes has the span of that thread. A transfer for which a computation had to
    wait lasts, at both ends, until the computation could continue. Any other transfer has the span of its posting,
    because its arrival is unknown. Raises ValueError if nothing was traced or ranks of the pipeline are missing.
    """
    traces = list(traces)
    if not traces or not traces[0].batches:
        raise ValueError("there is nothing to draw: no batch was traced; give the engine a Tracer and run a batch")
    pipeline = traces[0].pipeline
    of_rank = {trace.rank: trace for trace in traces}
    missing = [rank for rank in pipeline if rank not in of_rank]
    if missing:
        raise ValueError(
            f"the traces of ranks {missing} of the pipeline {list(pipeline)} are missing; gather all of them"
        )
    extents = traces[0].batches
    first = extents[0]
    graph = StageGraph.of(len(traces[0].rank_of_stage), traces[0].edges)
    exposed = _exposed_transfers([of_rank[rank] for rank in pipeline], graph)
    spans = []
    for pipeline_rank, rank in enumerate(pipeline):
        background = _by_posting(of_rank[rank].spans)
        for span in of_rank[rank].spans:
            instruction = span.instruction
            if span.track == COMPUTE and _is_from(first, instruction):
                shown = background.get(id(span), span)
                start, end = exposed.get(_tensor(instruction, graph), (shown.start, shown.end))
                spans.append(Span(pipeline_rank, instruction, start, end))
    origin = min((span.start for span in spans), default=0.0)
    return Timeline.from_spans(
        spans,
        rank_of_stage=traces[0].rank_of_stage,
        batches=[extent.num_microbatches for extent in extents],
        first_batch=first.batch,
        first_microbatch=first.first_microbatch,
        edges=traces[0].edges,
        copies=traces[0].copies,
        name=name,
    ).shifted(-origin)


def _by_posting(spans: Sequence[TraceSpan]) -> dict[int, TraceSpan]:
    """Return id(span of a posted instruction) -> the background thread's span of the same instruction.

    An instruction can occur several times, since a stage is fetched twice a batch. The occurrences are matched from
    the last one backwards, since the first may have been dropped.
    """
    posted: dict[Instruction, list[TraceSpan]] = defaultdict(list)
    done: dict[Instruction, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        if span.track != WAIT:
            (posted if span.track == COMPUTE else done)[span.instruction].append(span)
    return {
        id(one): other
        for instruction, background in done.items()
        for one, other in zip(reversed(posted[instruction]), reversed(background), strict=False)
    }


_Brought = tuple[Tensor, int, int]  # a transferred tensor: its kind, the stage that needs it, the microbatch


def _tensor(instruction: Instruction, graph: StageGraph) -> _Brought | None:
    word = instruction.kind.row
    if word.sends:
        return word.sends, graph.peer_of(instruction), instruction.microbatch
    return (word.receives, instruction.stage, instruction.microbatch) if word.receives else None


def _exposed_transfers(traces: Sequence[RankTrace], graph: StageGraph) -> dict[_Brought | None, tuple[float, float]]:
    """Return the (start, end) of each transfer for which a computation waited.

    It starts when both ends have posted it and ends when the computation could continue.
    """
    posted: dict[_Brought, float] = {}
    waited: dict[_Brought, float] = {}
    for span in (span for trace in traces for span in trace.spans):
        instruction = span.instruction
        if span.track == WAIT and (needs := instruction.kind.row.needs) is not None:
            waited[needs, instruction.stage, instruction.microbatch] = span.end
        elif span.track == COMPUTE and (tensor := _tensor(instruction, graph)) is not None:
            posted[tensor] = max(span.end, posted.get(tensor, span.end))
    return {tensor: (posted[tensor], end) for tensor, end in waited.items() if posted.get(tensor, end) < end}


def _is_from(first: BatchExtent, instruction: Instruction) -> bool:
    """Return whether an instruction belongs to the first kept batch or a later batch.

    Only the tail of earlier batches is kept.
    """
    if instruction.microbatch is None:  # version v is fetched for batch v, and made from the gradients of batch v - 1
        brings = instruction.kind.row.lane is Lane.H2D
        return instruction.version >= first.batch + (not brings)
    return instruction.microbatch >= first.first_microbatch


def chrome_trace(traces: Iterable[RankTrace]) -> dict[str, Any]:
    """Return Chrome trace events: a process per rank, a thread per track, times in microseconds from the first span."""
    traces = list(traces)
    origin = min((span.start for trace in traces for span in trace.spans), default=0.0)
    used = {span.track for trace in traces for span in trace.spans}
    tracks = (COMPUTE, WAIT, CHAIN, MOVES, *(track for track in HOST_TRACKS if track in used))
    threads = {track: thread for thread, track in enumerate(tracks)}
    events: list[dict[str, Any]] = []
    for trace in traces:
        events.append({"ph": "M", "name": "process_name", "pid": trace.rank, "args": {"name": str(trace)}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": trace.rank, "args": {"sort_index": trace.rank}})
        for track, thread in threads.items():
            events.append({"ph": "M", "name": "thread_name", "pid": trace.rank, "tid": thread, "args": {"name": track}})
        for span in trace.spans:
            instruction = span.instruction
            fields = {name: getattr(instruction, name) for name in ("stage", "microbatch", "version")}
            events.append(
                {
                    "ph": "X",
                    "name": str(instruction),
                    "cat": instruction.kind.value,
                    "pid": trace.rank,
                    "tid": threads[span.track],
                    "ts": (span.start - origin) * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                    "args": {name: value for name, value in fields.items() if value is not None},
                }
            )
        for moment, num_bytes in trace.deferred_bytes:
            counter = {"ph": "C", "name": "bytes between I and W", "pid": trace.rank, "args": {"bytes": num_bytes}}
            events.append(counter | {"ts": (moment - origin) * 1e6})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(traces: Iterable[RankTrace], path: str | Path) -> None:
    """Write the traces as a JSON file for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    write_whole(Path(path), json.dumps(chrome_trace(traces)))
