"""Bounds on saved activations: the microbatches that an order has in flight, and the effect of moves and offloads."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron.pipeline.program.edges import stages_by_rank
from megatron.pipeline.program.lane_order import RELOADED_AHEAD
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.passes.balance import balanced_bounds

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
    """

    order: Order
    rank_of_stage: tuple[int, ...]
    balance: bool
    weights: WeightPolicy
    offloads: bool = False

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
            return own
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
            return own
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
