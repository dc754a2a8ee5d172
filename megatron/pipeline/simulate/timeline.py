"""The times at which the instructions of a program ran, or would run.

A plan and its measurement should be compared span by span, counted by the same functions and drawn by the same code. So
the simulator and the runtime's tracer both yield a `Timeline`: the rows of executed instructions, with a start and an
end in seconds for each instruction. A span covers the *work* of its instruction and not the wait before it:

- a computation or STEP: from the moment at which its inputs are available until it is done;
- a transfer (SEND, RECV): from the start of the transfer until it is complete, in the sender's and in the receiver's
  row;
- a move of saved activations (EVICT, ACCEPT, RETURN, LOAD): from its posting by the rank's queue of moves until it is
  complete; if the other end is posted later, the span is longer than the transfer;
- a reduction: from its start until it is complete;
- a word to or from the host (FETCH, STORE_GRAD, UPDATE, OFFLOAD, RELOAD): from its start on its lane until it is
  complete.

A rank is idle while it neither computes nor steps. A timeline keeps flat lists per rank, aligned with the rows, since a
long run has millions of spans; `spans` yields objects, for reading a few of them.
"""

import json
import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from megatron.documents.files import write_whole
from megatron.pipeline.program.copies import Copy
from megatron.pipeline.program.edges import Edge, stages_by_rank
from megatron.pipeline.program.extent import Stages
from megatron.pipeline.program.instruction import (
    BUSY,
    ENDS_BACKWARD,
    HOST_WORDS,
    MOVES,
    RESIDENCY_WORDS,
    STASH_WORDS,
    WORDS,
    Instruction,
    Kind,
    Lane,
)

FORMAT = "megatron.pipeline.simulate.timeline/1"


@dataclass(frozen=True, slots=True)
class Span:
    """One executed instruction: its pipeline rank and its start and end in seconds."""

    rank: int
    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class Timeline(Stages):
    """The spans of one run of a pipeline.

    Attributes:
        rows: the instructions of each pipeline rank in the order in which the rank reached them.
        starts, ends: seconds, aligned with `rows`.
        rank_of_stage: the rank of each stage.
        batches: number of microbatches of each batch that the run spans.
        first_batch, first_microbatch: index, over the whole training run, of the first batch and its first
            microbatch.
        name: the timeline's name in a legend.
        edges: the edges between stages; empty for a chain.
        copies: of which stage of the model each stage is a copy; empty: each is a stage of the model.

    Raises:
        ValueError: for lists of different lengths, and for a span that ends before it starts.
    """

    rows: tuple[Sequence[Instruction], ...]
    starts: tuple[Sequence[float], ...]
    ends: tuple[Sequence[float], ...]
    rank_of_stage: tuple[int, ...]
    batches: tuple[int, ...]
    first_batch: int = 0
    first_microbatch: int = 0
    name: str = ""
    edges: tuple[Edge, ...] = ()
    copies: tuple[Copy, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.rows) == len(self.starts) == len(self.ends):
            raise ValueError(
                f"a timeline of {len(self.rows)} ranks has starts of {len(self.starts)} and ends of {len(self.ends)}"
            )
        if self.copies and len(self.copies) != self.num_stages:
            raise ValueError(
                f"there are {self.num_stages} stages and {len(self.copies)} copies; say for each stage what it is"
            )
        for rank, (row, starts, ends) in enumerate(zip(self.rows, self.starts, self.ends, strict=True)):
            if not len(row) == len(starts) == len(ends):
                raise ValueError(
                    f"rank {rank} has {len(row)} instructions, {len(starts)} starts, {len(ends)} ends; give one of each"
                )
            if not all(map(operator.le, starts, ends)):
                spans = zip(row, starts, ends, strict=True)
                bad, start, end = next(span for span in spans if not span[1] <= span[2])
                raise ValueError(f"rank {rank}: {bad} starts at {start} and ends at {end}; a span ends after it starts")

    # --- size

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    @property
    def spans(self) -> Iterator[Span]:
        """All spans, rank by rank in program order."""
        for rank, row in enumerate(self.rows):
            for instruction, start, end in zip(row, self.starts[rank], self.ends[rank], strict=True):
                yield Span(rank, instruction, start, end)

    def batch_borders(self) -> list[int]:
        """First microbatch of each batch, and one past the last."""
        return [self.first_microbatch + count for count in accumulate(self.batches, initial=0)]

    # --- times

    @property
    def start(self) -> float:
        """Start of the first computation, seconds; 0 for an empty timeline."""
        return min((span.start for span in self.computations()), default=0.0)

    @property
    def end(self) -> float:
        """End of the last computation or STEP, seconds."""
        return max((span.end for span in self.computations()), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first computation's start to the last computation's or STEP's end."""
        return self.end - self.start

    def computations(self, rank: int | None = None) -> Iterator[Span]:
        """The spans of computations and STEPs, of one rank or of all."""
        for owner in range(self.num_ranks) if rank is None else [rank]:
            for instruction, start, end in zip(self.rows[owner], self.starts[owner], self.ends[owner], strict=True):
                if instruction.kind in BUSY:
                    yield Span(owner, instruction, start, end)

    def busy(self, rank: int) -> float:
        """Seconds that the rank computes or steps."""
        return math.fsum(span.end - span.start for span in self.computations(rank))

    def busy_lanes(self, rank: int) -> dict[Lane, float]:
        """Seconds for which each of the rank's lanes to and from the host works; empty if it has no such lane."""
        spent: dict[Lane, list[float]] = {}
        for instruction, start, end in zip(self.rows[rank], self.starts[rank], self.ends[rank], strict=True):
            if instruction.kind in HOST_WORDS:
                spent.setdefault(WORDS[instruction.kind].lane, []).append(end - start)
        return {lane: math.fsum(spent[lane]) for lane in Lane if lane in spent}

    def idle(self, rank: int) -> float:
        """Seconds of the makespan in which the rank neither computes nor steps."""
        return self.makespan - self.busy(rank)

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time over the makespan, 0 to 1."""
        return (
            1.0 - math.fsum(map(self.busy, range(self.num_ranks))) / (self.num_ranks * self.makespan)
            if self.makespan
            else 0.0
        )

    def batch_starts(self) -> list[float]:
        """Start of the first forward of each batch on stage 0, seconds; with copies, on the first of its copies."""
        borders, starts = self.batch_borders(), [math.inf] * len(self.batches)
        for stage in self._first_stages:
            for span in self.computations(self.rank_of_stage[stage]):
                each = span.instruction
                if each.kind is Kind.FORWARD and each.stage == stage and borders[0] <= each.microbatch < borders[-1]:
                    batch = bisect_right(borders, each.microbatch) - 1
                    starts[batch] = min(starts[batch], span.start)
        return [math.nan if start == math.inf else start for start in starts]

    @property
    def _first_stages(self) -> list[int]:
        """Stage 0; with copies, all copies of stage 0 of the model."""
        return [stage for stage, copy in enumerate(self.copies) if copy.stage == 0] or [0]

    def steady_starts(self) -> list[float]:
        """The starts of the batches in the second half of the run, from which the time of a steady batch is computed.

        In the first half the pipeline fills and settles; the drain at the end does not affect starts. Batches that
        stage 0 starts before its first backward still fill the pipeline, so they are left out as well.
        """
        starts = self.batch_starts()
        filled = max(map(self._first_backward, self._first_stages))
        first = max(1, len(starts) // 2 - 1)
        return [start for start in starts[first:] if start >= filled]

    def _first_backward(self, stage: int) -> float:
        """The end of a stage's first backward, seconds; 0 without one."""
        return next((span.end for span in self.computations(self.rank_of_stage[stage])
                     if span.instruction.stage == stage and span.instruction.kind in ENDS_BACKWARD), 0.0)  # fmt: skip

    def steady_time_per_batch(self) -> float:
        """Seconds from the start of a batch to the start of the next on stage 0, averaged over `steady_starts`.

        Raises:
            ValueError: for too few batches to have a steady state.
        """
        starts = self.steady_starts()
        if len(starts) < 2:
            raise ValueError(
                f"a timeline of {len(self.batches)} batches has no steady state; it takes 3 and more, and two that "
                "start when the pipeline is full"
            )
        return (starts[-1] - starts[0]) / (len(starts) - 1)

    # --- memory

    def saved_microbatches(self, stage: int) -> list[tuple[float, int]]:
        """The number of microbatches whose activations a stage holds, as (seconds, number from then on).

        A microbatch counts from the start of its forward (or of its LOAD or ACCEPT) to the end of its backward, or of
        its weight half if it is split (or of its EVICT or RETURN). A frozen stage holds none.
        """
        return self._saved(self.rank_of_stage[stage], {stage})

    def saved_on_rank(self, rank: int, stages: Iterable[int] | None = None) -> list[tuple[float, int]]:
        """`saved_microbatches` summed over the given stages of a rank (default: all); (seconds, number from then on).

        A microbatch counts once at each stage.
        """
        return self._saved(rank, set(self.stages_of(rank) if stages is None else stages))

    def peak_deferred_microbatches(self, stage: int) -> int:
        """The largest number of a stage's microbatches between the end of I and the end of W."""
        row = self.rows[self.rank_of_stage[stage]]
        return max(accumulate((WORDS[each.kind].deferred for each in row if each.stage == stage), initial=0))

    def peak_saved_microbatches(self, stage: int) -> int:
        return max((count for _, count in self.saved_microbatches(stage)), default=0)

    def peak_saved_on_rank(self, rank: int) -> int:
        return max((count for _, count in self.saved_on_rank(rank)), default=0)

    def _saved(self, rank: int, stages: set[int]) -> list[tuple[float, int]]:
        row = self.rows[rank]
        stages = {stage for stage in stages if not self.graph.is_forward_only(stage)}
        moves, events = False, []
        for instruction, start, end in zip(row, self.starts[rank], self.ends[rank], strict=True):
            if instruction.stage not in stages:
                continue
            change = WORDS[instruction.kind].saved
            if change:
                events.append((start if change > 0 else end, change))
            moves |= instruction.kind in MOVES or instruction.kind in STASH_WORDS
        if moves:
            events.sort()  # moves run beside the row; at the same time, freed microbatches come first
        return list(zip((time for time, _ in events), accumulate(change for _, change in events), strict=True))

    # --- parts and conversions

    def shifted(self, seconds: float) -> "Timeline":
        """The same timeline, later by `seconds`."""
        return self._timed(lambda time: time + seconds)

    def scaled(self, factor: float) -> "Timeline":
        """The same timeline in a smaller or larger unit of time: all times are multiplied by `factor`."""
        return self._timed(lambda time: time * factor)

    def _timed(self, change: Callable[[float], float]) -> "Timeline":
        starts, ends = (tuple(list(map(change, row)) for row in times) for times in (self.starts, self.ends))
        return replace(self, starts=starts, ends=ends)

    def of_batches(self, first: int, count: int) -> "Timeline":
        """The part of the timeline that belongs to `count` batches from batch `first` on.

        It has the microbatches of these batches, the fetches of weights for them, and the reductions, STEPs and UPDATEs
        that apply their gradients.

        Raises:
            ValueError: if the timeline does not contain these batches.
        """
        last, end = first + count, self.first_batch + len(self.batches)
        if not self.first_batch <= first < last <= end:
            raise ValueError(
                f"this timeline has batches {self.first_batch} to {end - 1}; {count} from batch {first} are not in it"
            )
        lowest, highest = (self.batch_borders()[batch - self.first_batch] for batch in (first, last))

        def belongs(instruction: Instruction) -> bool:
            if instruction.kind in RESIDENCY_WORDS:
                return first <= instruction.version < last
            if instruction.microbatch is None:
                return first < (instruction.version or 0) <= last
            return lowest <= instruction.microbatch < highest

        kept = [[position for position, instruction in enumerate(row) if belongs(instruction)] for row in self.rows]

        def chosen(lists: Sequence[Sequence]) -> tuple:
            return tuple([values[position] for position in places] for values, places in zip(lists, kept, strict=True))

        return replace(
            self,
            rows=chosen(self.rows),
            starts=chosen(self.starts),
            ends=chosen(self.ends),
            batches=self.batches[first - self.first_batch : last - self.first_batch],
            first_batch=first,
            first_microbatch=lowest,
        )

    def named(self, name: str) -> "Timeline":
        return replace(self, name=name)

    # --- on disk

    @classmethod
    def from_spans(
        cls, spans: Iterable[Span], *, rank_of_stage: Sequence[int], batches: Sequence[int], **fields: object
    ) -> "Timeline":
        """Make a timeline of spans. The spans of one rank must be in program order; ranks may be interleaved."""
        num_ranks = max(rank_of_stage) + 1
        rows, starts, ends = ([[] for _ in range(num_ranks)] for _ in range(3))
        for span in spans:
            rows[span.rank].append(span.instruction)
            starts[span.rank].append(float(span.start))
            ends[span.rank].append(float(span.end))
        return cls(tuple(rows), tuple(starts), tuple(ends), tuple(rank_of_stage), tuple(batches), **fields)

    def to_dict(self) -> dict:
        """The timeline as plain data for JSON; per rank a list of [text of the instruction, start, end] in seconds."""
        return {
            "format": FORMAT,
            "name": self.name,
            "rank_of_stage": list(self.rank_of_stage),
            "batches": list(self.batches),
            "first_batch": self.first_batch,
            "first_microbatch": self.first_microbatch,
            **({"edges": list(map(str, self.edges))} if self.edges else {}),
            **({"copies": list(map(str, self.copies))} if self.copies else {}),
            "rows": [
                [[str(instruction), start, end] for instruction, start, end in zip(*lists, strict=True)]
                for lists in zip(self.rows, self.starts, self.ends, strict=True)
            ],
        }

    @classmethod
    def from_dict(cls, data: dict) -> "Timeline":
        """The timeline that `to_dict` has converted to `data`. Raises ValueError for data in another format."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"a timeline has format {FORMAT!r}, this is {found!r}; write it with Timeline.save")
        try:
            rows = tuple([Instruction.parse(text) for text, _, _ in row] for row in data["rows"])
            starts = tuple([float(start) for _, start, _ in row] for row in data["rows"])
            ends = tuple([float(end) for _, _, end in row] for row in data["rows"])
            rank_of_stage = tuple(data["rank_of_stage"])
            _require_owners(rows, rank_of_stage)
            return cls(
                rows, starts, ends, rank_of_stage, tuple(data["batches"]),
                data["first_batch"], data["first_microbatch"], data["name"],
                tuple(map(Edge.parse, data.get("edges", ()))), tuple(map(Copy.parse, data.get("copies", ()))),
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"this is no complete timeline ({type(error).__name__}: {error}); write it with Timeline.save"
            ) from error

    def save(self, path: str | Path) -> None:
        write_whole(Path(path), json.dumps(self.to_dict(), separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Timeline":
        """Read a timeline that `save` has written. Raises ValueError, with the path, for any other file."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except ValueError as error:
            raise ValueError(f"{path} is no timeline: {error}") from error


def _require_owners(rows: Sequence[Sequence[Instruction]], rank_of_stage: Sequence[int]) -> None:
    """Check that each rank has a stage, and only instructions of its stages in its row. Raises ValueError if not."""
    if sorted(set(rank_of_stage)) != list(range(len(rows))) or not rows:
        raise ValueError(f"its stages are on ranks {list(rank_of_stage)}, and it has rows of {len(rows)} ranks")
    stages = stages_by_rank(rank_of_stage)
    for rank, row in enumerate(rows):
        own = set(stages[rank])
        strange = next((each for each in row if each.stage not in own), None)
        if strange is not None:
            raise ValueError(f"rank {rank} has {strange}, and its stages are {sorted(own)}")
