"""The base class of orders: an order says when each stage computes which microbatch.

An order knows nothing of weights, updates or transfers; the passes add them. To add an order, write a file with a
subclass of `Order` and enter the class into the table in `orders`.

**Frozen stages (`BehindFrozen`)** stand in front of the trained ones. They compute only forwards, and the trained
stages keep their order.

    stage 0, frozen          F0 F1 F2 F3 F4 ...
    stage 1, frozen           . F0 . F1 . F2 ...          a rank with stages 1 and 2 runs the frozen forward of a
    stage 2, of that rank     .  . F0  . F1  .  F2 ...    microbatch directly before the trained stage's forward
    stage 3                   .  .  .  . F0 B0 ...

Frozen stages save nothing and get no gradients (PipeTransformer: He et al., 2021). So a rank with only frozen stages
runs ahead, even into the next batch, until too many of its tensors are unread (`StageGraph.most_unread`). A batch does
not wait until the frozen stages have filled again.

**Bounds (`SavedBounds`)** on saved activations: the microbatches that an order has in flight, and the effect of moves
and offloads.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import ClassVar

from megatron.pipeline.program.edges import Edge, StageGraph, stages_by_rank, stages_of
from megatron.pipeline.program.instruction import ENDS_BACKWARD, HALVES, Instruction, Kind
from megatron.pipeline.program.lane_order import RELOADED_AHEAD, Pairs
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.schedules.passes import Segments
from megatron.pipeline.schedules.passes.activations import balanced_bounds

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
        """The largest lag, in microbatches, of a computation behind the newest microbatch that the first stage began.

        None: the lag depends on the number of microbatches.
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


def in_turns(stage: int, batches: Sequence[range], *turn: tuple[Callable[[int, int], Instruction], int]) -> Segments:
    """Return the segments of a stage that takes the same turn with every microbatch, across the borders of batches.

    `turn`: computations in order, each with the number of microbatches that it is behind the first one.
    """
    first, end, most_behind = batches[0].start, batches[-1].stop, max(behind for _, behind in turn)
    return [
        [
            compute(stage, newest - behind)
            for newest in segment
            for compute, behind in turn
            if first <= newest - behind < end
        ]
        for segment in (*batches, range(end, end + most_behind))
    ]


def frozen_chain(num_stages: int, num_frozen: int) -> tuple[Edge, ...]:
    """Return the edges of a chain whose first `num_frozen` stages are frozen."""
    return tuple(Edge(stage, stage + 1, gradient=stage >= num_frozen) for stage in range(num_stages - 1))


class BehindFrozen(Order):
    """The order of a chain whose first `num_frozen` stages are frozen.

    Attributes:
        active: the order of the trained stages, each on a rank of its own.
        num_frozen: the number of frozen stages.
    """

    interleaves = True
    follows_edges = True

    def __init__(self, active: Order, *, num_frozen: int, rank_of_stage: Sequence[int]) -> None:
        num_stages = active.num_stages + num_frozen
        super().__init__(num_stages, rank_of_stage=rank_of_stage, edges=frozen_chain(num_stages, num_frozen))
        self.active, self.num_frozen = active, num_frozen
        self.drains = active.drains  # type: ignore[misc]
        self.extends_warmup = active.extends_warmup  # type: ignore[misc]

    def segments(self, rank: int, batches: Sequence[range]) -> Segments:
        stages = stages_of(self.rank_of_stage, rank)
        frozen = [stage for stage in stages if stage < self.num_frozen]
        if len(stages) == len(frozen):
            forwards = [[forward(stage, each) for each in batch for stage in frozen] for batch in batches]
            return [*forwards, []]
        result = []
        for segment in self.active.segments(stages[-1] - self.num_frozen, batches):
            extended = []
            for each in segment:
                if each.kind is Kind.FORWARD:
                    extended += [forward(stage, each.microbatch) for stage in frozen]
                extended.append(replace(each, stage=stages[-1]))
            result.append(extended)
        return result

    def max_in_flight(self, stage: int) -> int | None:
        return 0 if stage < self.num_frozen else self.active.max_in_flight(stage - self.num_frozen)

    def max_in_flight_on_rank(self, rank: int) -> int | None:
        return self.max_in_flight(stages_of(self.rank_of_stage, rank)[-1])

    def validate_placement(self) -> None:
        """Raise ValueError if a rank has several frozen or several trained stages, or if ranks do not ascend."""
        before = -1
        for stage, rank in enumerate(self.rank_of_stage):
            is_next = rank == before + 1 or (rank == before and stage == self.num_frozen)
            if not is_next:
                raise ValueError(
                    f"stages {self.rank_of_stage} do not fit {self.num_frozen} frozen stages; give each rank one "
                    "frozen stage, one trained stage, or the last frozen with the first trained one, in order"
                )
            before = rank

    def validate(self, num_microbatches: int) -> None:
        self.active.validate(num_microbatches)

    def first_after_border(self, rank: int) -> Sequence[tuple[Kind, int, int]]:
        stages = stages_of(self.rank_of_stage, rank)
        if stages[-1] < self.num_frozen:
            return ()
        turns = self.active.first_after_border(stages[-1] - self.num_frozen)
        return [(kind, stage + self.num_frozen, behind) for kind, stage, behind in turns]

    def recomputes(self, stage: int) -> bool:
        return stage >= self.num_frozen and self.active.recomputes(stage - self.num_frozen)


_OFFLOADED = RELOADED_AHEAD + 1  # the most inputs on the device of a stage that offloads its inputs


@dataclass(frozen=True)
class SavedBounds:
    """The bounds of a schedule on saved microbatches.

    Attributes:
        order: the order of computations.
        rank_of_stage: the rank of each stage.
        balance: saved activations move between pair stages.
        weights: the weight policy.
        offloads: the inputs of a relay are stashed on the host.
        most_on_device: see `Schedule`.
    """

    order: Order
    rank_of_stage: tuple[int, ...]
    balance: bool
    weights: WeightPolicy
    offloads: bool = False
    most_on_device: int | None = None

    @property
    def max_in_flight(self) -> int | None:
        """The largest number of microbatches in flight at any stage, from forward to end of backward; None: a batch."""
        limits = _in_flight(self.order)
        return None if None in limits else max(limits)

    def on_stages(self, batches: Sequence[int]) -> tuple[int, ...]:
        """Return the largest number of microbatches that each stage saves in a program of these batches."""
        own = _cut(_in_flight(self.order), self.weights.most_together(batches))
        if self.offloads:
            return tuple(each if self._stays(stage) else min(each, _OFFLOADED) for stage, each in enumerate(own))
        if not self.balance:
            return _cut(own, self.most_on_device) if self.most_on_device else own
        accepting, on_rank = self._accepting_ranks(batches), self.on_ranks(batches)
        return tuple(
            on_rank[rank] if rank in accepting else min(own[stage], on_rank[rank])
            for stage, rank in enumerate(self.rank_of_stage)
        )

    def on_ranks(self, batches: Sequence[int]) -> tuple[int, ...]:
        """Return the largest number of microbatches that each rank saves, summed over its stages."""
        own = self._in_flight_on_rank(batches)
        if self.offloads:
            return self._offloaded_on_ranks(batches, own)
        if not self.balance:
            return _cut(own, self.most_on_device) if self.most_on_device else own
        accepting = self._accepting_ranks(batches)
        return tuple(
            bound if rank in accepting else min(own[rank], bound)
            for rank, bound in enumerate(bounds_of_ranks(self.order))
        )

    def evicting_ranks(self, batches: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that have more microbatches in flight than their bound under `balance`."""
        if not self.balance:
            return ()
        pairs = enumerate(zip(self._in_flight_on_rank(batches), bounds_of_ranks(self.order), strict=True))
        return tuple(rank for rank, (own, bound) in pairs if own > bound)

    def _stays(self, stage: int) -> bool:
        """Whether a stage never offloads its inputs.

        The first stage reads tokens. The last stage of each rank alternates forwards and backwards, so its inputs are
        needed soon.
        """
        return stage == 0 or stage >= self.order.num_stages - self.order.num_ranks

    def _offloaded_on_ranks(self, batches: Sequence[int], own: Sequence[int]) -> tuple[int, ...]:
        """Add the inputs of one offloading stage to those of the stages that never offload, for each rank."""
        stay = [0] * len(own)
        for stage, each in enumerate(self.on_stages(batches)):
            stay[self.rank_of_stage[stage]] += each * self._stays(stage)
        return tuple(min(most, each + _OFFLOADED) for most, each in zip(own, stay, strict=True))

    def _accepting_ranks(self, batches: Sequence[int]) -> set[int]:
        return {self.order.pairs.of_rank(rank) for rank in self.evicting_ranks(batches)}

    def _in_flight_on_rank(self, batches: Sequence[int]) -> tuple[int, ...]:
        together, limits = self.weights.most_together(batches), _limits_of_ranks(self.order)
        is_frozen, stages = self.order.graph.is_forward_only, stages_by_rank(self.rank_of_stage)
        saving = [sum(not is_frozen(stage) for stage in own) for own in stages]
        return tuple(_cut([limit], together * count)[0] for limit, count in zip(limits, saving, strict=True))


@lru_cache(maxsize=256)
def bounds_of_ranks(order: Order) -> tuple[int, ...]:
    """Return how many microbatches each rank may save over all its stages if activations are balanced."""
    return balanced_bounds(_limits_of_ranks(order), order.pairs)


def _limits_of_ranks(order: Order) -> list[int | None]:
    return [order.max_in_flight_on_rank(rank) for rank in range(order.num_ranks)]


@lru_cache(maxsize=256)
def _in_flight(order: Order) -> tuple[int | None, ...]:
    """Return the largest number of microbatches in flight at each stage; None: a whole batch."""
    return tuple(order.max_in_flight(stage) for stage in range(order.num_stages))


def _cut(limits: Sequence[int | None], most: int) -> tuple[int, ...]:
    return tuple(most if limit is None else min(limit, most) for limit in limits)
