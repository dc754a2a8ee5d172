"""What a schedule's order is: when each stage computes which microbatch.

An order knows nothing of weights, updates or transfers; the passes add them. To add an order, write a file with a
subclass and enter it into the table in `orders`.
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

_MOST_GROUPS = 8  # of p microbatches, among which a batch is looked for that the order takes

Work = Sequence[tuple[float, float]]  # seconds of a forward and of a backward, recompute included, of each stage


class Order(ABC):
    """The order of computations on each rank of a pipeline.

    Attributes:
        drains: no stage begins a batch before the one before it is through the pipeline.
        extends_warmup: the order knows how to start further ahead (`extra_warmup`).
        interleaves: the order knows what to do with several stages on a rank.
        follows_edges: the order goes by the edges between stages, whichever these are.
        merges: the order is for the stages of any placement, one batch at a time.
        virtual_stages: how many stages each rank has, where the order is for one number of them (and for one stage).
        relays: a rank takes a whole batch through one of its stages before it turns to the next, up and down again.
        num_stages: of the whole pipeline.
        graph: the stages with their edges; default: a chain.
        work: seconds of a forward and of a backward of each stage, for orders that go by them; none: all alike.
        rank_of_stage: the rank of each stage; default: each has its own.
        num_ranks: of the pipeline.
        num_virtual_stages: the most stages of any rank.
        microbatch_group_size: microbatches that a rank takes through one of its stages before it turns to the next;
            None: the order's own choice.
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
        """What a rank computes on the microbatches of `batches`, which follow one another without a drain.

        An order that does not interleave is asked for a stage, and calls its argument so.

        Returns:
            For each batch the computations from its first forward up to where the first forward of the next batch
            stands, or would stand; then, in one more list, what is left to do.
        """

    def segments_of_rank(self, rank: int, batches: Sequence[range]) -> Segments:
        """The segments of a rank, whether the order goes by ranks or by stages."""
        return self.segments(rank if self.interleaves else stages_of(self.rank_of_stage, rank)[0], batches)

    def first_after_border(self, rank: int) -> Sequence[tuple[Kind, int, int]]:
        """The computations of batches already begun that the rank has first behind each border between batches, whether
        another batch begins there or the run is drained: (kind, stage, microbatches behind the border), in its order.
        Microbatches before the run's first are left out. Empty: not known, or not the same in both cases.
        """
        return ()

    @abstractmethod
    def max_in_flight(self, stage: int) -> int | None:
        """The most microbatches between their forward and the end of their backward at a stage; None: a whole batch."""

    def max_in_flight_on_rank(self, rank: int) -> int | None:
        """The same over all stages of a rank together; a microbatch counts once at each stage."""
        return self.max_in_flight(self.rank_of_stage.index(rank))

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some rank has an I or a W in a batch that fills the pipeline, or in the largest that the order takes.
        The rows say it, so that no order has to.
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
        """The most microbatches that anything stands behind the newest one that the first stage has begun, where that
        can be said for any number of microbatches.
        """
        return None

    @property
    def pairs(self) -> Pairs:
        """Which stages exchange saved activations, where the schedule balances them."""
        return Pairs(self.rank_of_stage, self.graph.num_frozen)

    def recomputes(self, stage: int) -> bool:
        """Whether a backward at the stage needs a recompute, where the program recomputes."""
        return True

    def validate_placement(self) -> None:  # noqa: B027  most orders take any
        """Raises ValueError where the order does not go with `rank_of_stage`."""

    def validate(self, num_microbatches: int) -> None:  # noqa: B027  most orders take any batch
        """Raises ValueError where the order has no place for a batch of this size."""


@lru_cache(maxsize=256)
def remaining_backwards(order: Order, num_microbatches: int) -> tuple[int, ...]:
    """For each stage, how many backwards of a batch are to come where the next batch begins: read off the rows of two
    batches of this size.
    """
    batches, counts = [range(num_microbatches), range(num_microbatches, 2 * num_microbatches)], [0] * order.num_stages
    for rank in range(order.num_ranks):
        for each in chain.from_iterable(order.segments_of_rank(rank, batches)[1:]):
            counts[each.stage] += each.kind in ENDS_BACKWARD and each.microbatch < num_microbatches
    return tuple(counts)


_shared = lru_cache(maxsize=65536)  # programs of one size after the other have the same, which take long to make


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
