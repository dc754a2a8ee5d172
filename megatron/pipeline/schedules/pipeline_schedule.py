"""What every schedule is: stages on ranks, rules, and programs of any number of batches.

`Schedule` builds its programs from choices, `ProgramSchedule` continues the rows of a program that a user wrote. The
planner, the trainer and the runtime need not know which of the two they have.

Whether a run stops, saves or evaluates is decided while it runs, and a ramp-up changes the size of its batches. So the
runtime asks a `ProgramStream` for one batch's instructions at a time. Each segment is cut from a whole program that the
checker has proved: the batches that can still matter to the segment, and the drain that may come next. That program
depends on nothing but the sizes of its batches, so it is built and proved once and shifted to each place of the run.

The segment of a batch is what a rank does from its first forward of that batch up to where the first forward of the
next batch stands. After it the run may go on with another batch, whose size nobody had to know before, or drain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain

from megatron.pipeline.check import check
from megatron.pipeline.graph.row_graph import forget_graph
from megatron.pipeline.program.edges import Edge, StageGraph, stages_of
from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import Kind, Row, Rows
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.move_order import Pairs
from megatron.pipeline.program.program import PeriodicProgram, Program, shifted_row
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.passes import Segments
from megatron.pipeline.schedules.passes.communication import add_communication
from megatron.pipeline.schedules.passes.residency import add_residency


@dataclass(frozen=True)
class ProgramInSegments:
    """A program, cut into segments.

    `borders[rank][i]` is the position in the rank's row at which segment i begins; the drain is the last segment, and
    the length of the row the last border.
    """

    program: Program
    borders: tuple[tuple[int, ...], ...]

    @staticmethod
    def join(extent: Extent, segments_of_rank: Sequence[Segments]) -> ProgramInSegments:
        """The program of the rows that the ranks' segments make up."""
        rows = tuple(
            tuple(instruction for segment in segments for instruction in segment) for segments in segments_of_rank
        )
        borders = tuple(tuple(accumulate(map(len, segments), initial=0)) for segments in segments_of_rank)
        return ProgramInSegments(Program.of(extent, rows), borders)

    def segments(self, first: int, end: int) -> Rows:
        """What each rank does in the segments from `first` up to, and without, `end`."""
        rows = zip(self.program.rows, self.borders, strict=True)
        return tuple(row[borders[first] : borders[end]] for row, borders in rows)

    @property
    def drain(self) -> Rows:
        """What each rank does after the last batch's segment."""
        num_batches = len(self.program.batches)
        return self.segments(num_batches, num_batches + 1)


class ShiftedRows(Sequence[Row]):
    """Rows later in the run, each made when it is asked for: a rank asks for its own alone."""

    def __init__(self, rows: Rows, *, microbatches: int, versions: int) -> None:
        self._rows = rows
        self._microbatches = microbatches
        self._versions = versions

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rank: int) -> Row:
        return shifted_row(self._rows[rank], microbatches=self._microbatches, versions=self._versions)


class PipelineSchedule(ABC):
    """Builds the programs of batches that `validate` accepts.

    Attributes:
        num_stages: of the whole pipeline, over all ranks.
        num_ranks: of the pipeline, Megatron's p.
        num_virtual_stages: the most stages of any rank, Megatron's v.
        rank_of_stage: the rank of each stage.
        edges: which stages hand tensors to which; none: a chain.
        graph: the stages with their edges.
        pairs: which stages exchange saved activations, where the schedule balances them.
        num_frozen: stages in front that are frozen.
        weights: the weight policy.
        name_of_weights: the weight policy, behind the preset's name where that is another.
        residency: weights live on the host, and how; None: on the device.
        recompute: backwards are preceded by a recompute.
        balance: saved activations move between the stages of a pair.
        splits_backward: backwards are computed in halves, I and W.
        tied_embeddings: the first and the last stage share an embedding.
        data_parallel: the pipeline has replicas.
        provisional_microbatches: where the weights predict, how many microbatches each prediction reads; None: all that
            are done.
        reduce_partial: predictions read the sum over the replicas.
        max_in_flight: the most microbatches between forward and end of backward at any stage, without moves; None: a
            whole batch.
        report_lag: by the end of batch i's segment every rank has stepped batch i - report_lag and posted its norm.
        settling_batches: how many of the batches before a batch can matter to its segment, and to a drain after it.
    """

    num_stages: int
    num_ranks: int
    num_virtual_stages: int
    rank_of_stage: tuple[int, ...]
    edges: tuple[Edge, ...]
    graph: StageGraph
    pairs: Pairs
    num_frozen: int
    weights: WeightPolicy
    name_of_weights: str
    residency: Residency | None
    recompute: bool
    balance: bool
    splits_backward: bool
    tied_embeddings: bool
    data_parallel: bool
    provisional_microbatches: int | None
    reduce_partial: bool
    max_in_flight: int | None
    report_lag: int
    settling_batches: int

    # --- what a kind of schedule says

    @abstractmethod
    def validate(self, num_microbatches: int) -> None:
        """Raises ValueError where a batch of this size cannot be run."""

    @abstractmethod
    def recomputes(self, stage: int) -> bool:
        """Whether backwards at the stage are preceded by a recompute."""

    @abstractmethod
    def max_saved_microbatches(self, batches: Sequence[int]) -> tuple[int, ...]:
        """For each stage, the most microbatches whose activations it holds at once in a program of these batches."""

    @abstractmethod
    def max_saved_on_rank(self, batches: Sequence[int]) -> tuple[int, ...]:
        """For each rank, the most saved microbatches over all its stages; a microbatch counts once at each of them."""

    @abstractmethod
    def evicting_ranks(self, batches: Sequence[int]) -> tuple[int, ...]:
        """The ranks that move saved activations away in a program of these batches; none: there is nothing to balance.

        That is so without `balance`, and with it for few ranks that train (1F1B: fewer than 4), or batches too small to
        fill the pipeline.
        """

    @abstractmethod
    def remaining_backwards(self, num_microbatches: int) -> tuple[int, ...]:
        """For each stage, how many backwards of a batch of this size are to come where the next batch begins."""

    @abstractmethod
    def window(self, batches: Sequence[int]) -> tuple[int, ...]:
        """The last of the batches that follow a drain, after which a run goes on or drains as after all of them."""

    @abstractmethod
    def build_periodic(self, num_microbatches: int) -> PeriodicProgram:
        """The run from batch 0 on of any number of batches of this size."""

    @abstractmethod
    def _build(self, batches: Sequence[int], first_batch: int, first_microbatch: int) -> ProgramInSegments:
        """The program of batches that `validate` accepts."""

    @property
    @abstractmethod
    def _evaluation_order(self) -> Order:
        """The order whose forwards an evaluation runs."""

    # --- what follows for each kind

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on a rank, ascending."""
        return stages_of(self.rank_of_stage, rank)

    @property
    def first_settled_batch(self) -> int:
        """From this batch of a run on, the versions of all batches lie equally far behind."""
        return self.weights.first_settled_batch

    def accepts(self, num_microbatches: int) -> bool:
        """Whether `validate` accepts a batch of this size."""
        try:
            self.validate(num_microbatches)
        except ValueError:
            return False
        return True

    def build(self, batches: Sequence[int], *, first_batch: int = 0, first_microbatch: int = 0) -> Program:
        """The program of `batches`, the number of microbatches of each, from a drained state to a drained state.

        Raises:
            ValueError: no batches, or a batch that the schedule cannot run.
        """
        return self.build_in_segments(batches, first_batch=first_batch, first_microbatch=first_microbatch).program

    def build_in_segments(
        self, batches: Sequence[int], *, first_batch: int = 0, first_microbatch: int = 0
    ) -> ProgramInSegments:
        """The program that `build` returns, with the places at which a run could be drained."""
        if not batches:
            raise ValueError("a program needs a batch; give the number of microbatches of each")
        for num_microbatches in batches:
            self.validate(num_microbatches)
        return self._build(batches, first_batch, first_microbatch)

    def interleaves_batches(self, batches: Sequence[int]) -> bool:
        """Whether in the program of these batches some rank has a backward of a batch, or a half of one, after one of a
        later batch. Raises ValueError as `build`.
        """
        return self.build(batches).interleaves_batches

    def build_evaluation(self, num_microbatches: int, *, version: int, first_microbatch: int = 0) -> Program:
        """Forwards of one batch, of any size, with one weight version, the newest of a drained state.

        Raises:
            ValueError: no microbatches.
        """
        if num_microbatches < 1:
            raise ValueError(f"an evaluation cannot have {num_microbatches} microbatches; give 1 and more")
        extent = Extent(
            rank_of_stage=self.rank_of_stage,
            edges=self.edges,
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
            segments = [[replace(each, version=version) for each in computations if each.kind is Kind.FORWARD]]
            segments_of_rank.append(add_residency(segments, extent) if extent.residency else segments)
        return ProgramInSegments.join(extent, add_communication(segments_of_rank, extent)).program

    def stream(self, *, first_batch: int = 0, first_microbatch: int = 0) -> ProgramStream:
        """The batches of a run one at a time, from a drained state before `first_batch` on."""
        return ProgramStream(self, first_batch=first_batch, first_microbatch=first_microbatch)


class ProgramStream:
    """The rows of a run, batch by batch. It begins drained, and may be drained between any two batches.

    Attributes:
        next_batch: index, over the whole run, of the batch to be started next.
        next_microbatch: index, over the whole run, of that batch's first microbatch.
    """

    def __init__(self, schedule: PipelineSchedule, *, first_batch: int = 0, first_microbatch: int = 0) -> None:
        self.next_batch = first_batch
        self.next_microbatch = first_microbatch
        self._schedule = schedule
        self._sizes: tuple[int, ...] = ()  # of the batches since the last drain, as far back as they matter
        self._drained_at = first_batch

    @property
    def entry_versions(self) -> tuple[int, ...]:
        """The weight versions alive at the last drained state."""
        return self._schedule.weights.entry_versions(self._drained_at)

    def start_batch(self, num_microbatches: int) -> Sequence[Row]:
        """The segment of the next batch, as one row for each rank.

        It reaches from the rank's first instruction of the batch to just before its first of the batch after it, and
        so includes the STEP that stands there.

        Raises:
            ValueError: the schedule cannot run a batch of this size.
        """
        self._schedule.validate(num_microbatches)
        self._sizes = self._schedule.window((*self._sizes, num_microbatches))
        self.next_batch += 1
        self.next_microbatch += num_microbatches
        window = self._window()
        return self._placed(window, window.segments(len(self._sizes) - 1, len(self._sizes)))

    def drain(self) -> Sequence[Row]:
        """What is left of the batches that were started, as one row for each rank. The stream may then go on."""
        if not self._sizes:
            return ((),) * self._schedule.num_ranks
        window = self._window()
        self._sizes = ()
        self._drained_at = self.next_batch
        return self._placed(window, window.drain)

    def evaluation(self, num_microbatches: int) -> Sequence[Row]:
        """Forwards of that many microbatches, counted from 0, with the newest version; for a drained stream."""
        assert not self._sizes, "evaluation needs a drained stream"
        program = _proved_evaluation(self._schedule, num_microbatches)
        return ShiftedRows(program.rows, microbatches=0, versions=self.next_batch)

    def _window(self) -> ProgramInSegments:
        first_batch = self.next_batch - len(self._sizes)
        return _proved(self._schedule, self._sizes, min(first_batch, self._schedule.first_settled_batch))

    def _placed(self, window: ProgramInSegments, rows: Rows) -> Sequence[Row]:
        program = window.program
        return ShiftedRows(
            rows,
            microbatches=self.next_microbatch - program.num_microbatches,
            versions=self.next_batch - len(program.batches) - program.first_batch,
        )


@lru_cache(maxsize=64)  # a file's period may be as many batches long
def _proved(schedule: PipelineSchedule, batches: tuple[int, ...], first_batch: int) -> ProgramInSegments:
    """The program of `batches`. `first_batch` matters for the first few batches alone (`first_settled_batch`)."""
    built = schedule.build_in_segments(batches, first_batch=first_batch)
    check(
        built.program,
        max_saved=schedule.max_saved_microbatches(batches),
        max_saved_on_rank=schedule.max_saved_on_rank(batches),
    )
    forget_graph()  # a run keeps its programs
    return built


@lru_cache(maxsize=16)
def _proved_evaluation(schedule: PipelineSchedule, num_microbatches: int) -> Program:
    program = schedule.build_evaluation(num_microbatches, version=0)
    check(program)
    forget_graph()
    return program
