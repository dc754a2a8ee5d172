"""A schedule made from choices, which builds programs.

An order says when each stage computes which microbatch. A weight policy says which weights a microbatch uses and when
they are updated. Flags add recompute, and say which reductions the chain of an update has. `build` turns the choices
into a program: it starts with the order and then runs one pass for each concern.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import chain

from megatron.pipeline.program.edges import (
    Edge,
    StageGraph,
    rank_of_stage,
    round_robin,
    stages_by_rank,
    validate_placement,
)
from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import Row
from megatron.pipeline.program.lane_order import Pairs, Residency
from megatron.pipeline.program.program import PeriodicProgram, shifted_row
from megatron.pipeline.program.weight_policies import WeightPolicy, predicting, weight_policy
from megatron.pipeline.schedules.compatibility import validate_batch, validate_choices, validate_frozen
from megatron.pipeline.schedules.order import (
    BehindFrozen,
    Order,
    SavedBounds,
    bounds_of_ranks,
    frozen_chain,
    remaining_backwards,
)
from megatron.pipeline.schedules.orders import MERGED, ORDERS, PRESETS
from megatron.pipeline.schedules.passes import Segments
from megatron.pipeline.schedules.passes.activations import add_balance, add_recompute, add_swaps
from megatron.pipeline.schedules.passes.communication import add_communication
from megatron.pipeline.schedules.passes.residency import add_host_updates, add_residency, add_stash
from megatron.pipeline.schedules.passes.updates import add_predictions, add_updates, set_versions
from megatron.pipeline.schedules.passes.validation import add_validations
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule, ProgramInSegments


@dataclass(frozen=True, kw_only=True)
class Schedule(PipelineSchedule):
    """The choices from which programs are built. Equal schedules build equal programs.

    Attributes:
        order: a key of `ORDERS`: `gpipe`, `1f1b`, `interleaved`, `relay`, `zb-h1`, `zbv`, ...
        weights: the weight policy, or its name in `POLICIES`.
        num_stages: the number of stages of the whole pipeline, as in `Program`.
        num_virtual_stages: the number of stages on each rank, Megatron's v (only for orders that interleave). If
            `rank_of_stage` is given, this becomes the largest number of stages on a rank.
        rank_of_stage: the rank of each stage. None: stages are dealt out in turn, `num_virtual_stages` to each rank.
        edges: which stages hand tensors to which; empty: a chain.
        num_frozen: the number of frozen stages, which are the first ones. They compute only forwards and get no
            gradients. Under order relay the last stage of each rank is trained. Under other orders a rank then has one
            frozen stage, one trained stage, or the last frozen and the first trained one.
        work: for each stage, seconds of a forward and of a backward with its recompute (only for order async); empty:
            equal stages.
        microbatch_group_size: the number of microbatches that a rank takes through one of its stages before it turns to
            the next, at least num_ranks (only for orders interleaved and interleaved-zb). None: num_ranks, as in
            Megatron.
        recompute: recompute the activations of a microbatch before its backward.
        extra_warmup: start twice as many forwards ahead, to hide transfers (only for order 1f1b).
        balance: move saved activations between the stages of a pair, so that all stages save about as much (BPipe).
            Frozen stages save nothing and take no part.
        most_on_device: the most microbatches that a rank saves on its device, over all its stages; the others wait on
            the host. None: all stay.
        tied_embeddings: the first and another stage share an embedding, so they add up its gradients.
        tied_stage: that other stage; None: the last.
        data_parallel: the pipeline has replicas, so gradients are reduced over them.
        norm_decides: an update depends on all stages together, for example because gradients are clipped by their norm
            or because a loss scale may overflow.
        residency: how weights live on the host; None: they live on the device.
        provisional_microbatches: if the weights predict, the number of microbatches of the previous batch that each
            prediction reads. None: all whose backwards are done at the stage.
        reduce_partial: if the weights predict, predictions read the sum of the gradients over the replicas, which takes
            one more reduction for each batch.
        optimistic: each rank steps before the norm of all gradients is known, as if the norm clipped nothing, and
            validates the step in the next batch; only where batches drain.
        order_class: the class of `order` in `ORDERS`. It is a field, so schedules with different classes are unequal.

    Raises:
        ValueError: the choices do not go together.
    """

    order: str
    weights: WeightPolicy
    num_stages: int
    num_virtual_stages: int = 1
    rank_of_stage: tuple[int, ...] | None = None
    edges: tuple[Edge, ...] = ()
    num_frozen: int = 0
    work: tuple[tuple[float, float], ...] = ()
    microbatch_group_size: int | None = None
    recompute: bool = False
    extra_warmup: bool = False
    balance: bool = False
    most_on_device: int | None = None
    tied_embeddings: bool = False
    tied_stage: int | None = None
    data_parallel: bool = False
    norm_decides: bool = False
    residency: Residency | None = None
    provisional_microbatches: int | None = None
    reduce_partial: bool = False
    optimistic: bool = False
    order_class: type[Order] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", weight_policy(self.weights))
        if self.order not in ORDERS:
            raise ValueError(f"there is no order {self.order!r}; choose from {', '.join(ORDERS)}")
        if self.num_stages < 1:
            raise ValueError(f"a pipeline cannot have {self.num_stages} stages; give 1 and more")
        object.__setattr__(self, "order_class", ORDERS[self.order])
        if self.num_frozen:
            validate_frozen(self)
            object.__setattr__(self, "edges", frozen_chain(self.num_stages, self.num_frozen))
        graph = StageGraph.of(self.num_stages, self.edges)
        object.__setattr__(self, "edges", () if graph.is_chain else graph.edges)
        self._place()
        validate_choices(self, self._order)

    def _place(self) -> None:
        """Set `rank_of_stage` and `num_virtual_stages`. Raises ValueError if stages cannot be placed so."""
        if self.rank_of_stage is not None:
            placement = tuple(self.rank_of_stage)
            validate_placement(placement, self.num_stages)
            object.__setattr__(self, "num_virtual_stages", max(map(placement.count, placement)))
        elif self.num_virtual_stages < 1 or self.num_stages % self.num_virtual_stages:
            raise ValueError(
                f"{self.num_stages} stages cannot be dealt out {self.num_virtual_stages} to a rank; make num_stages a "
                "multiple of num_virtual_stages"
            )
        else:
            placement = round_robin(self.num_stages // self.num_virtual_stages, self.num_virtual_stages)
        object.__setattr__(self, "rank_of_stage", placement)

    @classmethod
    def preset(cls, name: str, *, num_stages: int, predict: bool = False, **choices: object) -> "Schedule":
        """Make the schedule of a preset.

        Args:
            name: a key of `PRESETS`: gpipe, flush, 2bw, pipedream, interleaved, bpipe, zb-h1, zbv, l2l, ... or a
                registered name.
            num_stages: the number of stages of the whole pipeline.
            predict: use the policy that also predicts; only weights 2bw and stale have such a policy.
            choices: further arguments of the constructor. The default of `num_virtual_stages` is the number that the
                order supports, if there is only one.

        Raises:
            ValueError: the name is unknown, or the choices do not go together.
        """
        if name not in PRESETS:
            raise ValueError(f"there is no schedule {name!r}; choose from {', '.join(PRESETS)}")
        preset = PRESETS[name]
        if choices.get("rank_of_stage") is None and preset.virtual_stages is not None:
            choices.setdefault("num_virtual_stages", preset.virtual_stages)
        num_virtual_stages = choices.get("num_virtual_stages", 1)
        order = preset.order
        placement, num_frozen = choices.get("rank_of_stage"), choices.get("num_frozen")
        if placement and len(placement) > len(set(placement)) and not num_frozen:
            order = MERGED.get(order, order)
        choices["balance"] = choices.get("balance", False) or preset.balance
        choices["recompute"] = choices.get("recompute", False) or preset.recompute
        choices["residency"] = choices.get("residency") or preset.residency
        deals_out = num_stages > 0 and num_virtual_stages > 0 and num_stages % num_virtual_stages == 0
        if choices.get("rank_of_stage") is None and deals_out:
            num_ranks = num_stages // num_virtual_stages
            choices["rank_of_stage"] = rank_of_stage(preset.placement, num_ranks, num_virtual_stages)
        weights = predicting(preset.policy) if predict else preset.weights
        return cls(order=order, weights=weights, num_stages=num_stages, **choices)

    # --- ranks, stages and memory

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the pipeline, Megatron's p."""
        return max(self.rank_of_stage) + 1

    @property
    def graph(self) -> StageGraph:
        """The stages with their edges."""
        return StageGraph.of(self.num_stages, self.edges)

    @property
    def pairs(self) -> Pairs:
        """The pairs of stages that exchange saved activations if the schedule balances them."""
        return self._order.pairs

    @property
    def name_of_weights(self) -> str:
        """The name of the weight policy, after the name of the preset if the two differ: `pipedream (stash)`."""
        weights = self.weights.name
        chosen = [each for each in PRESETS.items() if (each[1].order, each[1].weights) == (self.order, weights)]
        names = [name for name, preset in chosen if name != weights and not preset.balance]
        return f"{names[0]} ({weights})" if names else weights

    def validate(self, num_microbatches: int) -> None:
        validate_batch(self, self._order, num_microbatches)

    @property
    def max_in_flight(self) -> int | None:
        return self._saved.max_in_flight

    def max_saved_microbatches(self, batches: Sequence[int]) -> tuple[int, ...]:
        return self._saved.on_stages(batches)

    def max_saved_on_rank(self, batches: Sequence[int]) -> tuple[int, ...]:
        return self._saved.on_ranks(batches)

    def evicting_ranks(self, batches: Sequence[int]) -> tuple[int, ...]:
        return self._saved.evicting_ranks(batches)

    @property
    def swaps(self) -> bool:
        return self.most_on_device is not None

    @property
    def splits_backward(self) -> bool:
        return self._order.splits_backward

    def recomputes(self, stage: int) -> bool:
        return self.recompute and self._order.recomputes(stage)

    def remaining_backwards(self, num_microbatches: int) -> tuple[int, ...]:
        return remaining_backwards(self._order, num_microbatches)

    def needs_gradient_copy(self, num_microbatches: int) -> tuple[bool, ...]:
        """Return, for each stage, whether the prediction from a batch of this size reads a copy of the gradients.

        A copy is needed if more microbatches are done than the prediction reads, or if replicas reduce these gradients.
        """
        is_reduced = self.reduce_partial and self.data_parallel
        if is_reduced or self.provisional_microbatches is None:
            return (is_reduced,) * self.num_stages
        done = (num_microbatches - remaining for remaining in self.remaining_backwards(num_microbatches))
        return tuple(0 < self.provisional_microbatches < each for each in done)

    @property
    def report_lag(self) -> int:
        behind = self._order.most_behind
        if self.optimistic:
            return 1
        if any(stages[-1] < self.num_frozen for stages in stages_by_rank(self.rank_of_stage)):
            return max(1, self.weights.report_lag(self.num_stages))  # a frozen rank begins the next batch early
        return self.weights.report_lag(self.num_stages if behind is None else behind + 1)

    @property
    def settling_batches(self) -> int:
        order = self._order
        if self.optimistic:
            return 1
        if self.weights.updates_alone and order.most_behind is not None:
            return order.most_behind + max(map(order.graph.depth, range(self.num_stages)))
        return self.weights.settling_batches(order.max_in_flight(self.num_frozen) or 0)

    @property
    def num_fill(self) -> int:
        """The number of batches in the fill, before the rows repeat with every batch."""
        return max(1, (self.weights.delay or 0) + self.settling_batches)

    def window(self, batches: Sequence[int]) -> tuple[int, ...]:
        return tuple(batches[-self.settling_batches - 1 :])

    # --- programs

    def computations(self, rank: int, batches: Sequence[int]) -> Row:
        """Return the computations of a rank, in its order, for batches of these sizes, before any pass."""
        return tuple(chain.from_iterable(self._order_segments(rank, self._extent(batches))))

    def segments_without_transfers(self, batches: Sequence[int]) -> list[Segments]:
        """Return the segments of each rank in a program of these batches, without transfers and weight versions.

        This takes a fifth of the time of building the program.
        """
        return self._without_transfers(self._extent(batches))

    def interleaves_batches(self, batches: Sequence[int]) -> bool:
        extent = self._extent(batches)  # reading the order is enough; building a deep pipeline's program takes a second
        return any(
            extent.interleaves_batches_in(chain.from_iterable(self._order_segments(rank, extent)))
            for rank in range(self.num_ranks)
        )

    def build_periodic(self, num_microbatches: int) -> PeriodicProgram:
        num_fill = self.num_fill
        batches = (num_microbatches,) * num_fill
        built = self.build_in_segments((*batches, num_microbatches))
        return PeriodicProgram(
            extent=self._extent(batches),
            fill=built.segments(0, num_fill),
            period=built.segments(num_fill, num_fill + 1),
            drain=tuple(shifted_row(row, microbatches=-num_microbatches, versions=-1) for row in built.drain),
            num_microbatches=num_microbatches,
        )

    # --- from the order to the program

    def _build(self, batches: Sequence[int], first_batch: int, first_microbatch: int) -> ProgramInSegments:
        extent = self._extent(batches, first_batch, first_microbatch)
        segments_of_rank = [set_versions(segments, extent) for segments in self._without_transfers(extent)]
        after_borders = [self._order.first_after_border(rank) for rank in range(self.num_ranks)]
        segments_of_rank = add_communication(segments_of_rank, extent, after_borders)
        if self.optimistic:
            segments_of_rank = add_validations(segments_of_rank, extent)
        return ProgramInSegments.join(extent, segments_of_rank)

    def _extent(self, batches: Sequence[int], first_batch: int = 0, first_microbatch: int = 0) -> Extent:
        """Return the extent of a program of these batches.

        Raises:
            ValueError: the weights predict, `provisional_microbatches` is not given, and batches of these sizes leave
                different numbers of backwards when the next batch begins.
        """
        given = {name: getattr(self, name) for name in _SHARED}
        given["reduce_partial"] = self.reduce_partial and self.data_parallel
        if self.weights.predicts and self.provisional_microbatches is None:
            remaining = {self.remaining_backwards(size) for size in batches}
            if len(remaining) > 1:
                raise ValueError(
                    f"under {self.order} batches of {batches} microbatches leave different numbers of backwards when "
                    "the next batch begins, so predictions cannot read the same number of microbatches for all; give "
                    "provisional_microbatches"
                )
            given["unread"] = next(iter(remaining))
        stages = range(self.num_stages)
        given["not_recomputed"] = tuple(each for each in stages if self.recompute and not self.recomputes(each))
        return Extent(batches=tuple(batches), first_batch=first_batch, first_microbatch=first_microbatch, **given)

    def _without_transfers(self, extent: Extent) -> list[Segments]:
        ordered = [self._order_segments(rank, extent) for rank in range(self.num_ranks)]
        if self.balance:
            ordered = add_balance(ordered, extent, bounds_of_ranks(self._order))
        elif self.most_on_device is not None:
            ordered = [add_swaps(segments, self.most_on_device) for segments in ordered]
        return [_with_updates(segments, rank, extent) for rank, segments in enumerate(ordered)]

    def _order_segments(self, rank: int, extent: Extent) -> Segments:
        """Return the segments of a rank's order, with each batch drained if the weight policy drains."""
        first = extent.first_batch
        batches = [extent.microbatches_of(batch) for batch in range(first, first + len(extent.batches))]
        if not extent.weights.drains:
            return self._order.segments_of_rank(rank, batches)
        stretches = [self._order.segments_of_rank(rank, [batch]) for batch in batches]
        return [*(segment + drain for segment, drain in stretches), []]

    @property
    def _evaluation_order(self) -> Order:
        return self._order

    @property
    def _order(self) -> Order:
        return _order_of(
            self.order_class, self.num_stages, self.rank_of_stage, self.microbatch_group_size, self.extra_warmup,
            self.edges, self.work, self.num_frozen,
        )  # fmt: skip

    @property
    def _saved(self) -> SavedBounds:
        offloads = self.residency is not None and self.residency.stashes_on_host
        return SavedBounds(
            self._order, self.rank_of_stage, self.balance, self.weights, offloads, self.most_on_device
        )  # fmt: skip


_SHARED = sorted({each.name for each in fields(Extent)} & {each.name for each in fields(Schedule)})


def _with_updates(segments: Segments, rank: int, extent: Extent) -> Segments:
    """Run the passes that need only the rank itself: recompute, residency, stash, updates and predictions."""
    if extent.recompute:
        segments = add_recompute(segments, extent)
    if extent.residency:
        segments = add_residency(segments, extent)
        if extent.residency.stashes_on_host:
            segments = add_stash(segments, extent)
        segments = add_host_updates(segments, rank, extent)
    else:
        segments = add_updates(segments, rank, extent)
    if extent.weights.predicts:
        segments = add_predictions(segments, rank, extent)
    return segments


@lru_cache(maxsize=256)
def _order_of(
    order: type[Order],
    num_stages: int,
    rank_of_stage: tuple[int, ...],
    group_size: int | None,
    extra_warmup: bool,
    edges: tuple[Edge, ...],
    work: tuple[tuple[float, float], ...],
    num_frozen: int,
) -> Order:
    if num_frozen and not order.relays:
        active = order(num_stages - num_frozen, extra_warmup=extra_warmup)
        return BehindFrozen(active, num_frozen=num_frozen, rank_of_stage=rank_of_stage)
    return order(
        num_stages, rank_of_stage=rank_of_stage, microbatch_group_size=group_size, extra_warmup=extra_warmup,
        edges=edges, work=work,
    )  # fmt: skip
