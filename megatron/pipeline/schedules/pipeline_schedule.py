"""The base class of schedules: stages on ranks, rules, and programs of any number of batches.

`Schedule` builds its programs from choices, and `ProgramSchedule` continues the rows of a program that a user wrote.
The planner, the trainer and the runtime treat both alike.

Problem: a run decides during training whether it stops, saves or evaluates, and a ramp-up changes the size of its
batches.

Solution: the runtime asks a `ProgramStream` for the instructions of one batch at a time, a segment. Each segment is cut
from a whole program that the checker has proved. That program has the batches that can affect the segment, and the
drain that may come next. It depends only on the sizes of its batches, so it is built and proved once and then shifted
to each place of the run.

The segment of a batch reaches from a rank's first forward of that batch to just before the place of its first forward
of the next batch. After a segment the run may drain, or go on with another batch of any size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain

from megatron.pipeline.check import check
from megatron.pipeline.graph.row_graph import forget_graph
from megatron.pipeline.program.copies import Copy
from megatron.pipeline.program.edges import Edge, StageGraph, stages_of
from megatron.pipeline.program.extent import Extent, Predicting, Tied
from megatron.pipeline.program.instruction import Kind, Row, Rows
from megatron.pipeline.program.lane_order import Pairs, Residency
from megatron.pipeline.program.program import PeriodicProgram, Program, shifted_row
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.passes import Segments
from megatron.pipeline.schedules.passes.communication import add_communication
from megatron.pipeline.schedules.passes.residency import add_residency
from megatron.pipeline.schedules.passes.validation import continuation, refusing


@dataclass(frozen=True)
class ProgramInSegments:
    """A program that is cut into segments.

    `borders[rank][i]` is the position in the rank's row at which segment i begins. The drain is the last segment, and
    the last border is the length of the row.
    """

    program: Program
    borders: tuple[tuple[int, ...], ...]

    @staticmethod
    def join(extent: Extent, segments_of_rank: Sequence[Segments]) -> ProgramInSegments:
        """Join the segments of each rank into the rows of a program."""
        rows = tuple(
            tuple(instruction for segment in segments for instruction in segment) for segments in segments_of_rank
        )
        borders = tuple(tuple(accumulate(map(len, segments), initial=0)) for segments in segments_of_rank)
        return ProgramInSegments(Program.of(extent, rows), borders)

    def segments(self, first: int, end: int) -> Rows:
        """Return the rows of the segments from `first` to `end` - 1."""
        rows = zip(self.program.rows, self.borders, strict=True)
        return tuple(row[borders[first] : borders[end]] for row, borders in rows)

    @property
    def drain(self) -> Rows:
        """The rows after the segment of the last batch."""
        num_batches = len(self.program.batches)
        return self.segments(num_batches, num_batches + 1)


class ShiftedRows(Sequence[Row]):
    """Rows at a later place in the run. A row is made only on access, because a rank needs only its own row."""

    def __init__(self, rows: Rows, *, microbatches: int, versions: int) -> None:
        self._rows = rows
        self._microbatches = microbatches
        self._versions = versions

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rank: int) -> Row:
        return shifted_row(self._rows[rank], microbatches=self._microbatches, versions=self._versions)


class PipelineSchedule(Tied, Predicting, ABC):
    """Builds the programs of batches that `validate` accepts.

    Attributes:
        num_stages: the number of stages of the whole pipeline.
        num_ranks: the number of ranks of the pipeline, Megatron's p.
        num_virtual_stages: the largest number of stages on a rank, Megatron's v.
        rank_of_stage: the rank of each stage.
        edges: which stages hand tensors to which; empty: a chain.
        copies: of which stage of the model each stage is a copy; empty: each is a stage of the model.
        graph: the stages with their edges.
        pairs: the pairs of stages that exchange saved activations if the schedule balances them.
        num_frozen: the number of frozen stages, which are the first ones.
        weights: the weight policy.
        name_of_weights: the name of the weight policy, after the name of the preset if the two differ.
        residency: how weights live on the host; None: they live on the device.
        recompute: a recompute precedes each backward.
        balance: saved activations move between the stages of a pair.
        swaps: saved activations move to the host and back.
        splits_backward: backwards are computed in halves, I and W.
        tied_embeddings: the first and another stage share an embedding.
        tied_stage: that other stage; None: the last.
        data_parallel: the pipeline has replicas.
        provisional_microbatches: if the weights predict, the number of microbatches that each prediction reads; None:
            all whose backwards are done.
        reduce_partial: predictions read the sum of the gradients over the replicas.
        optimistic: each rank steps before the norm of all gradients is known, and validates the step in the next batch.
        max_in_flight: the largest number of microbatches between forward and end of backward at any stage, without
            moves; None: a whole batch.
        report_lag: at the end of the segment of batch i, every rank has stepped batch i - report_lag and posted its
            norm.
        settling_batches: the number of batches before a batch that can affect its segment and a drain after it.
    """

    num_stages: int
    num_ranks: int
    num_virtual_stages: int
    edges: tuple[Edge, ...]
    graph: StageGraph
    pairs: Pairs
    num_frozen: int
    weights: WeightPolicy
    name_of_weights: str
    residency: Residency | None
    recompute: bool
    balance: bool
    swaps: bool
    splits_backward: bool
    data_parallel: bool
    provisional_microbatches: int | None
    reduce_partial: bool
    optimistic: bool
    copies: tuple[Copy, ...] = ()
    max_in_flight: int | None
    report_lag: int
    settling_batches: int

    # --- defined by each kind of schedule

    @abstractmethod
    def validate(self, num_microbatches: int) -> None:
        """Raise ValueError if the schedule cannot run a batch of this size."""

    @abstractmethod
    def recomputes(self, stage: int) -> bool:
        """Whether a recompute precedes each backward at the stage, except for the microbatches that it `keeps`."""

    def keeps(self, stage: int) -> frozenset[int]:
        """Return the positions in a batch of the microbatches that a stage keeps although it recomputes others."""
        return frozenset()

    @abstractmethod
    def max_saved_microbatches(self, batches: Sequence[int]) -> tuple[int, ...]:
        """Return a bound on the saved microbatches of each stage in a program of these batches."""

    @abstractmethod
    def max_saved_on_rank(self, batches: Sequence[int]) -> tuple[int, ...]:
        """Return a bound on the saved microbatches of each rank in a program of these batches.

        A microbatch counts once at each stage of the rank that saves it.
        """

    @abstractmethod
    def evicting_ranks(self, batches: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that move saved activations away in a program of these batches.

        There are none without `balance`, with few trained ranks (1F1B: fewer than 4), and with batches that are too
        small to fill the pipeline.
        """

    @abstractmethod
    def remaining_backwards(self, num_microbatches: int) -> tuple[int, ...]:
        """Return, for each stage, how many backwards of a batch of this size remain when the next batch begins."""

    @abstractmethod
    def window(self, batches: Sequence[int]) -> tuple[int, ...]:
        """Return the last ones of the `batches` since a drain, those that determine how the run goes on or drains."""

    @abstractmethod
    def build_periodic(self, num_microbatches: int) -> PeriodicProgram:
        """Build a run from batch 0 on of any number of batches of this size."""

    @abstractmethod
    def _build(self, batches: Sequence[int], first_batch: int, first_microbatch: int) -> ProgramInSegments:
        """Build the program of batches that `validate` has accepted."""

    @property
    @abstractmethod
    def _evaluation_order(self) -> Order:
        """The order whose forwards an evaluation runs."""

    # --- the same for each kind

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that live on a rank, ascending."""
        return stages_of(self.rank_of_stage, rank)

    @property
    def first_settled_batch(self) -> int:
        """The first batch of a run from which on batches use versions of a constant age in batches."""
        return self.weights.first_settled_batch

    @property
    def moves_activations(self) -> bool:
        """Whether saved activations may leave their stages, for a pair rank or for the host."""
        return self.balance or self.swaps

    def bounds(self, batches: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the bounds on saved microbatches in a program of these batches, as keyword arguments of `check`."""
        return {
            "max_saved": self.max_saved_microbatches(batches), "max_saved_on_rank": self.max_saved_on_rank(batches),
        }  # fmt: skip

    def accepts(self, num_microbatches: int) -> bool:
        """Whether `validate` accepts a batch of this size."""
        try:
            self.validate(num_microbatches)
        except ValueError:
            return False
        return True

    def build(self, batches: Sequence[int], *, first_batch: int = 0, first_microbatch: int = 0) -> Program:
        """Build a program from a drained state to a drained state.

        Args:
            batches: the number of microbatches of each batch.
            first_batch, first_microbatch: the numbers, counted over the whole run, of the first batch and microbatch.

        Raises:
            ValueError: there are no batches, or the schedule cannot run a batch of such a size.
        """
        return self.build_in_segments(batches, first_batch=first_batch, first_microbatch=first_microbatch).program

    def build_in_segments(
        self, batches: Sequence[int], *, first_batch: int = 0, first_microbatch: int = 0
    ) -> ProgramInSegments:
        """Build the program that `build` returns, with the places at which a run could drain. Raises as `build`."""
        if not batches:
            raise ValueError("a program needs a batch; give the number of microbatches of each")
        for num_microbatches in batches:
            self.validate(num_microbatches)
        return self._build(batches, first_batch, first_microbatch)

    def interleaves_batches(self, batches: Sequence[int]) -> bool:
        """Whether the program of these batches has a backward, or half of one, behind one of a later batch in its row.

        Raises:
            ValueError: as for `build`.
        """
        return self.build(batches).interleaves_batches

    def build_evaluation(self, num_microbatches: int, *, version: int, first_microbatch: int = 0) -> Program:
        """Build the program of an evaluation: the forwards of one batch of any size.

        Args:
            num_microbatches: the size of the batch.
            version: the weight version that all forwards use, which is the newest one of a drained state.
            first_microbatch: the number of the first microbatch.

        Raises:
            ValueError: there are no microbatches.
        """
        if num_microbatches < 1:
            raise ValueError(f"an evaluation cannot have {num_microbatches} microbatches; give 1 and more")
        extent = Extent(
            rank_of_stage=self.rank_of_stage,
            edges=self.edges,
            copies=self.copies,
            batches=(num_microbatches,),
            weights=self.weights,
            first_batch=version,
            first_microbatch=first_microbatch,
            residency=self.residency,
            forward_only=True,
        )
        microbatches = range(first_microbatch, first_microbatch + num_microbatches)
        segments_of_rank = []
        for rank in range(self.num_ranks):
            computations = chain.from_iterable(self._evaluation_order.segments_of_rank(rank, [microbatches]))
            forwards = (each for each in computations if each.kind is Kind.FORWARD)
            taken = (each for each in forwards if extent.takes(each.stage, each.microbatch))
            segments = [[replace(each, version=version) for each in taken]]
            segments_of_rank.append(add_residency(segments, extent) if extent.residency else segments)
        return ProgramInSegments.join(extent, add_communication(segments_of_rank, extent)).program

    def stream(self, *, first_batch: int = 0, first_microbatch: int = 0) -> ProgramStream:
        """Return a stream of the batches of a run, from a drained state before `first_batch`."""
        return ProgramStream(self, first_batch=first_batch, first_microbatch=first_microbatch)


class ProgramStream:
    """The rows of a run, batch by batch. A stream begins drained, and may be drained between any two batches.

    Attributes:
        next_batch: the number, counted over the whole run, of the next batch to be started.
        next_microbatch: the number, counted over the whole run, of the first microbatch of that batch.
    """

    def __init__(self, schedule: PipelineSchedule, *, first_batch: int = 0, first_microbatch: int = 0) -> None:
        self.next_batch = first_batch
        self.next_microbatch = first_microbatch
        self._schedule = schedule
        self._sizes: tuple[int, ...] = ()  # sizes of the batches since the last drain that still matter
        self._last_sizes: tuple[int, ...] = ()  # the same at the last drain
        self._drained_at = first_batch

    @property
    def entry_versions(self) -> tuple[int, ...]:
        """The weight versions that were alive in the last drained state."""
        return self._schedule.weights.entry_versions(self._drained_at)

    def start_batch(self, num_microbatches: int) -> Sequence[Row]:
        """Start the next batch and return its segment, as one row for each rank.

        The segment reaches from the rank's first instruction of the batch to just before its first instruction of the
        batch after it. So the segment includes a STEP that stands there.

        Raises:
            ValueError: the schedule cannot run a batch of this size.
        """
        self._schedule.validate(num_microbatches)
        self._sizes = self._schedule.window((*self._sizes, num_microbatches))
        self.next_batch += 1
        self.next_microbatch += num_microbatches
        window = self._window()
        if self._schedule.optimistic and len(self._sizes) > 1:
            self.refused()  # proved before the row begins
        return self._placed(window, window.segments(len(self._sizes) - 1, len(self._sizes)))

    def drain(self) -> Sequence[Row]:
        """Drain the stream: return the rest of the started batches, as one row for each rank.

        The stream may go on afterwards.
        """
        if not self._sizes:
            return ((),) * self._schedule.num_ranks
        window, self._last_sizes = self._window(), self._sizes
        self._sizes = ()
        self._drained_at = self.next_batch
        if self._schedule.optimistic:
            self.refused()
        return self._placed(window, window.drain)

    def refused(self) -> Sequence[Row]:
        """Return the instructions of each rank after the VALIDATE in the rows returned last, if the step is refused.

        They replace the rest of the rows returned last, and end at the same place in the run.
        """
        drains = not self._sizes
        sizes = self._last_sizes if drains else self._sizes
        window = self._window(sizes)
        return self._placed(window, _proved_continuation(self._schedule, sizes, window.program.first_batch, drains))

    def evaluation(self, num_microbatches: int) -> Sequence[Row]:
        """Return the forwards of an evaluation with the newest version, as one row for each rank.

        The stream has to be drained. Microbatches are numbered from 0.
        """
        assert not self._sizes, "evaluation needs a drained stream"
        program = _proved_evaluation(self._schedule, num_microbatches)
        return ShiftedRows(program.rows, microbatches=0, versions=self.next_batch)

    def _window(self, sizes: tuple[int, ...] | None = None) -> ProgramInSegments:
        sizes = self._sizes if sizes is None else sizes
        first_batch = self.next_batch - len(sizes)
        return _proved(self._schedule, sizes, min(first_batch, self._schedule.first_settled_batch))

    def _placed(self, window: ProgramInSegments, rows: Rows) -> Sequence[Row]:
        program = window.program
        return ShiftedRows(
            rows,
            microbatches=self.next_microbatch - program.num_microbatches,
            versions=self.next_batch - len(program.batches) - program.first_batch,
        )


@lru_cache(maxsize=64)  # the period of a file may have as many batches
def _proved(schedule: PipelineSchedule, batches: tuple[int, ...], first_batch: int) -> ProgramInSegments:
    """Build and prove the program of `batches`; results are cached.

    `first_batch` makes a difference only before `first_settled_batch`.
    """
    built = schedule.build_in_segments(batches, first_batch=first_batch)
    check(built.program, **schedule.bounds(batches))
    forget_graph()  # a run keeps its programs, but does not need their graphs
    return built


@lru_cache(maxsize=64)
def _proved_continuation(schedule: PipelineSchedule, batches: tuple[int, ...], first_batch: int, drains: bool) -> Rows:
    """Build and prove what ranks do if the step before the last of `batches` (`drains`: after it) is refused."""
    built = _proved(schedule, batches, first_batch)
    index = len(batches) - (not drains)
    begins, ends = ([border[place] for border in built.borders] for place in (index, index + 1))
    rows = continuation(built.program, first_batch + index, begins, ends)
    check(refusing(built.program, first_batch + index, rows, ends))
    forget_graph()
    return rows


@lru_cache(maxsize=16)
def _proved_evaluation(schedule: PipelineSchedule, num_microbatches: int) -> Program:
    program = schedule.build_evaluation(num_microbatches, version=0)
    check(program)
    forget_graph()
    return program
