"""The base class of orders: an order says when each stage computes which microbatch.

An order knows nothing of weights, updates or transfers; the passes add them. To add an order, write a file with a
subclass of `Order` and enter the class into the table in `orders`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import ClassVar

from megatron.pipeline.program.edges import Edge, StageGraph, stages_of
from megatron.pipeline.program.instruction import ENDS_BACKWARD, HALVES, Instruction, Kind
from megatron.pipeline.program.move_order import Pairs
from megatron.pipeline.schedules.passes import Segments

_MOST_GROUPS = 8  # the largest batch that `splits_backward` tries, in groups of p microbatches

Work = Sequence[tuple[float, float]]  # for each stage, seconds of a forward and of a backward with its recompute


class Order(ABC):
    """The order of computations on each rank of a pipeline.

    Attributes:
        drains: a batch leaves the pipeline before any stage begins the next one.
        extends_warmup: the order supports more forwards ahead (`extra_warmup`).
        interleaves: the order supports several stages on a rank.
        follows_edges: the order supports any edges between stages, not only those of a chain.
        merges: the order supports any placement of stages, and takes one batch at a time.
        virtual_stages: the only number of stages on a rank that the order supports, besides one; None: any number.
        relays: a rank takes a whole batch through one of its stages before it turns to the next, up and down again.
        num_stages: the number of stages of the whole pipeline.
        graph: the stages with their edges; default: a chain.
        work: for each stage, seconds of a forward and of a backward with its recompute, for orders that depend on
            them; empty: equal stages.
        rank_of_stage: the rank of each stage; default: a rank for each stage.
        num_ranks: the number of ranks of the pipeline.
        num_virtual_stages: the largest number of stages on a rank.
        microbatch_group_size: the number of microbatches that a rank takes through one of its stages before it turns to
            the next; None: the order chooses.
        extra_warmup: start with more forwards ahead.
    """

    drains: ClassVar[bool] = False
    extends_warmup: ClassVar[bool] = False
    interleaves: ClassVar[bool] = False
    follows_edges: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    relays: ClassVar[bool] = False
    virtual_stages: ClassVar[int | None] = None

    def __init__(
        self,
        num_stages: int,
        *,
        rank_of_stage: Sequence[int] | None = None,
        microbatch_group_size: int | None = None,
        extra_warmup: bool = False,
        edges: Sequence[Edge] = (),
        work: Work = (),
    ) -> None:
        self.num_stages = num_stages
        self.work = tuple(work)
        self.graph = StageGraph.of(num_stages, edges)
        self.rank_of_stage = tuple(range(num_stages) if rank_of_stage is None else rank_of_stage)
        self.num_ranks = max(self.rank_of_stage) + 1
        self.num_virtual_stages = max(map(self.rank_of_stage.count, self.rank_of_stage))
        self.microbatch_group_size = microbatch_group_size
        self.extra_warmup = extra_warmup

    @abstractmethod
    def segments(self, rank: int, batches: Sequence[range]) -> Segments:
        """Return the computations of a rank for `batches`, which follow one another without a drain.

        Args:
            rank: the rank. An order that does not interleave gets a stage instead, and names its argument `stage`.
            batches: the microbatches of each batch.

        Returns:
            For each batch, the computations from its first forward to just before the place of the next batch's first
            forward; then one more list with the remaining computations.
        """

    def segments_of_rank(self, rank: int, batches: Sequence[range]) -> Segments:
        """Return the segments of a rank, for an order by ranks and for an order by stages."""
        return self.segments(rank if self.interleaves else stages_of(self.rank_of_stage, rank)[0], batches)

    def first_after_border(self, rank: int) -> Sequence[tuple[Kind, int, int]]:
        """Return computations of earlier batches that the rank runs first after a border, whether or not it drains.

        Returns:
            In the order of the rank, (kind, stage, lag) of each computation. The lag is the number of microbatches from
            the computation's microbatch to the first one after the border. The caller leaves out microbatches before
            the first one of the run. Empty: unknown, or different if the run drains.
        """
        return ()

    @abstractmethod
    def max_in_flight(self, stage: int) -> int | None:
        """Return the largest number of microbatches in flight at a stage; None: a whole batch.

        A microbatch is in flight from its forward to the end of its backward.
        """

    def max_in_flight_on_rank(self, rank: int) -> int | None:
        """Return the largest number of microbatches in flight at the stages of a rank; None: whole batches.

        A microbatch counts once at each stage.
        """
        return self.max_in_flight(self.rank_of_stage.index(rank))

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the order computes backwards in halves, I and W.

        The rows of a batch that fills the pipeline show this, so no order has to state it. If the order takes no such
        batch, the largest smaller batch is used.
        """
        p = self.num_ranks
        sizes = (*range(2 * p, _MOST_GROUPS * p + 1), *range(2 * p - 1, 0, -1))
        size = next(filter(self._accepts, sizes), None)
        if size is None:
            return False
        rows = (self.segments_of_rank(rank, [range(size)]) for rank in range(p))
        return any(each.kind in HALVES for segments in rows for segment in segments for each in segment)

    def _accepts(self, num_microbatches: int) -> bool:
        try:
            self.validate(num_microbatches)
        except ValueError:
            return False
        return True

    @property
    def most_behind(self) -> int | None:
        """The largest distance, in microbatches, from a computation to the newest microbatch that the first stage has
        begun; None: the distance depends on the number of microbatches.
        """
        return None

    @property
    def pairs(self) -> Pairs:
        """The pairs of stages that exchange saved activations if the schedule balances them."""
        return Pairs(self.rank_of_stage, self.graph.num_frozen)

    def recomputes(self, stage: int) -> bool:
        """Whether a backward at the stage needs a recompute, in a program that recomputes."""
        return True

    def validate_placement(self) -> None:  # noqa: B027  most orders take any
        """Raise ValueError if the order does not support `rank_of_stage`."""

    def validate(self, num_microbatches: int) -> None:  # noqa: B027  most orders take any batch
        """Raise ValueError if the order does not support a batch of this size."""


@lru_cache(maxsize=256)
def remaining_backwards(order: Order, num_microbatches: int) -> tuple[int, ...]:
    """Return, for each stage, how many backwards of a batch remain when the stage's rank begins the next batch.

    They are counted in the rows of two batches of this size.
    """
    batches, counts = [range(num_microbatches), range(num_microbatches, 2 * num_microbatches)], [0] * order.num_stages
    for rank in range(order.num_ranks):
        for each in chain.from_iterable(order.segments_of_rank(rank, batches)[1:]):
            counts[each.stage] += each.kind in ENDS_BACKWARD and each.microbatch < num_microbatches
    return tuple(counts)


_shared = lru_cache(maxsize=65536)  # instructions are slow to make, and programs of one size have the same ones


@_shared
def forward(stage: int, microbatch: int) -> Instruction:
    return Instruction(Kind.FORWARD, stage, microbatch)


@_shared
def backward(stage: int, microbatch: int) -> Instruction:
    return Instruction(Kind.BACKWARD, stage, microbatch)


@_shared
def backward_input(stage: int, microbatch: int) -> Instruction:
    return Instruction(Kind.BACKWARD_INPUT, stage, microbatch)


@_shared
def backward_weight(stage: int, microbatch: int) -> Instruction:
    return Instruction(Kind.BACKWARD_WEIGHT, stage, microbatch)
