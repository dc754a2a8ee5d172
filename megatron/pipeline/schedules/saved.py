"""How many microbatches' activations are saved at once: what an order has in flight, and what moves make of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron.pipeline.program.edges import stages_by_rank
from megatron.pipeline.program.lane_order import RELOADED_AHEAD
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.passes.balance import balanced_bounds

_OFFLOADED = RELOADED_AHEAD + 1  # of a stage whose inputs leave, the most that are on the device


@dataclass(frozen=True)
class SavedBounds:
    """The bounds of a schedule. `balance`: activations move; `offloads`: inputs of a relay are stashed on the host."""

    order: Order
    rank_of_stage: tuple[int, ...]
    balance: bool
    weights: WeightPolicy
    offloads: bool = False

    @property
    def max_in_flight(self) -> int | None:
        """The most between forward and end of backward at any stage; None: a whole batch."""
        limits = _in_flight(self.order)
        return None if None in limits else max(limits)

    def on_stages(self, batches: Sequence[int]) -> tuple[int, ...]:
        """The most that each stage holds in a program of these batches."""
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
        """The same for each rank, over all its stages."""
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
        """The ranks that have more in flight than they may hold."""
        if not self.balance:
            return ()
        pairs = enumerate(zip(self._in_flight_on_rank(batches), bounds_of_ranks(self.order), strict=True))
        return tuple(rank for rank, (own, bound) in pairs if own > bound)

    def _stays(self, stage: int) -> bool:
        """Whether a stage's inputs do not go to the host: tokens, and those of the run that turns around."""
        return stage == 0 or stage >= self.order.num_stages - self.order.num_ranks

    def _offloaded_on_ranks(self, batches: Sequence[int], own: Sequence[int]) -> tuple[int, ...]:
        """What stays, and those of one stage more."""
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
    """Where activations are balanced, the most microbatches that each rank may hold, over all its stages."""
    return balanced_bounds(_limits_of_ranks(order), order.pairs)


def _limits_of_ranks(order: Order) -> list[int | None]:
    return [order.max_in_flight_on_rank(rank) for rank in range(order.num_ranks)]


@lru_cache(maxsize=256)
def _in_flight(order: Order) -> tuple[int | None, ...]:
    """By stage."""
    return tuple(order.max_in_flight(stage) for stage in range(order.num_stages))


def _cut(limits: Sequence[int | None], most: int) -> tuple[int, ...]:
    return tuple(most if limit is None else min(limit, most) for limit in limits)
