"""A schedule: the choices from which a program follows.

An order says when each stage computes which microbatch; a weight policy, which weights it uses and when they are
updated; flags add recompute and say what the chain of an update contains. `build` turns the choices into a program:
the order, then one pass for each concern.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.program.instruction import ENDS_BACKWARD, Row
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.move_order import Pairs
from megatron.pipeline.program.periodic import PeriodicProgram
from megatron.pipeline.program.stages import stages_by_rank, stages_of
from megatron.pipeline.program.weight_policies import WeightPolicy, predicting, weight_policy
from megatron.pipeline.schedules.building import (
    build_in_segments,
    build_periodic,
    computations_of,
    returns_to_batches,
    segments_without_transfers,
)
from megatron.pipeline.schedules.builds_programs import BuildsPrograms
from megatron.pipeline.schedules.frozen import BehindFrozen, frozen_chain
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.orders import MERGED, ORDERS, PRESETS
from megatron.pipeline.schedules.passes import Segments
from megatron.pipeline.schedules.placements import rank_of_stage, round_robin, validate_placement
from megatron.pipeline.schedules.rules import validate_choices, validate_frozen, validate_predictions
from megatron.pipeline.schedules.saved import SavedBounds
from megatron.pipeline.schedules.segments import ProgramInSegments
from megatron.pipeline.schedules.split import splits_backward


@dataclass(frozen=True, kw_only=True)
class Schedule(BuildsPrograms):
    """What to build programs from. Equal schedules build equal programs.

    Attributes:
        order: a name in `ORDERS`: `gpipe`, `1f1b`, `interleaved`, `relay`, `zb-h1`, `zbv`, ...
        weights: the weight policy, or its name in `POLICIES`.
        num_stages: stages of the whole pipeline, over all ranks, as in `Program`.
        num_virtual_stages: stages on each rank, Megatron's v (orders that interleave only). Where `rank_of_stage` is
            given it is the most of any rank.
        edges: which stages hand tensors to which; none: a chain.
        num_frozen: stages in front that are frozen: they compute forwards, and nothing comes back to them. Then a rank
            has one stage that is frozen, one that is trained, or, at the border, both.
        work: seconds of a forward and of a backward, recompute included, of each stage (order async only); none: all
            alike.
        rank_of_stage: the rank of each stage. None: dealt out in turn, `num_virtual_stages` to each rank.
        microbatch_group_size: microbatches that a rank takes through one of its stages before it turns to the next,
            num_ranks and more (interleaved only). None: num_ranks, as in Megatron.
        recompute: recompute the activations of a microbatch before its backward.
        extra_warmup: start twice as far ahead, to hide transfers (1f1b only).
        balance: move saved activations between the stages of a pair, so that all save about as much (BPipe). Frozen
            stages save nothing and take no part.
        tied_embeddings: the first and the last stage share an embedding, so their gradients of it are added up.
        data_parallel: the pipeline has replicas, so gradients are reduced over them.
        norm_decides: an update depends on all stages together, as where gradients are clipped by their norm or a loss
            scale may overflow.
        residency: weights live on the host, and how; None: on the device.
        provisional_microbatches: where the weights predict, how many microbatches of the batch before each stage reads.
            None: each stage all that it has done.
        reduce_partial: where they predict, each replica reads what all have done, for one more reduction a batch.

    Raises:
        ValueError: choices that do not go together.
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
    tied_embeddings: bool = False
    data_parallel: bool = False
    norm_decides: bool = False
    residency: Residency | None = None
    provisional_microbatches: int | None = None
    reduce_partial: bool = False
    order_class: type[Order] = field(init=False, repr=False)  # what `order` means; another meaning is another schedule

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
        """Say where the stages are, and how many ranks have."""
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
        """The schedule of that name in `PRESETS`: gpipe, flush, 2bw, pipedream, interleaved, bpipe, zb-h1, zbv,
        l2l or a registered one. Stages on a rank are as many as its order is for, if that is one number.

        `predict`: with predicted weights, which go with 2bw's and with stale ones.

        Raises:
            ValueError: another name, or as the constructor.
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

    # --- what it demands and takes

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline, Megatron's p."""
        return max(self.rank_of_stage) + 1

    @property
    def graph(self) -> StageGraph:
        """The stages with their edges."""
        return StageGraph.of(self.num_stages, self.edges)

    @property
    def pairs(self) -> Pairs:
        """Which stages exchange saved activations, where it balances them."""
        return self._order.pairs

    @property
    def name_of_weights(self) -> str:
        """The weight policy, behind the preset's name where that is another: `pipedream (stash)`."""
        weights = self.weights.name
        chosen = [each for each in PRESETS.items() if (each[1].order, each[1].weights) == (self.order, weights)]
        names = [name for name, preset in chosen if name != weights and not preset.balance]
        return f"{names[0]} ({weights})" if names else weights

    def validate(self, num_microbatches: int) -> None:
        """Raises ValueError where a batch of this size cannot be run."""
        if num_microbatches < 1:
            raise ValueError(f"a batch cannot have {num_microbatches} microbatches; give 1 and more")
        rule = self.weights
        if rule.updates_alone and not rule.refreshes and num_microbatches != 1:
            raise ValueError(
                f"{self.name_of_weights} updates after every microbatch, so a batch is one microbatch, not "
                f"{num_microbatches}; give each batch one (in training: global batch size = micro batch size x data "
                "parallel size)"
            )
        in_flight = self._order.max_in_flight(self.num_frozen)
        # Moves are planned within a segment, so one batch alone has to hold what is in flight.
        batches = 1 if self.balance else rule.delay or 1
        if in_flight is not None and rule.overlaps_updates and num_microbatches < (fewest := -(-in_flight // batches)):
            warmup = " and extra warm-up" if self.extra_warmup else ""
            raise ValueError(
                f"{self.weights.name} with {self.num_stages} stages{warmup} needs batches of at least {fewest} "
                f"microbatches, as many as are in flight{_shared(batches)}, not {num_microbatches}: a batch would "
                "begin before its weights are made; use larger batches, fewer stages, or flush"
            )
        self._order.validate(num_microbatches)
        if rule.predicts:
            validate_predictions(self, num_microbatches)

    @property
    def max_in_flight(self) -> int | None:
        """The most microbatches between forward and end of backward, without moves; None: a whole batch at a stage."""
        return self._saved.max_in_flight

    def max_saved_microbatches(self, batches: Sequence[int]) -> tuple[int, ...]:
        """For each stage, the most microbatches whose activations it holds at once in a program of these batches."""
        return self._saved.on_stages(batches)

    def max_saved_on_rank(self, batches: Sequence[int]) -> tuple[int, ...]:
        """The same for each rank, over all its stages; a microbatch counts once at each of them."""
        return self._saved.on_ranks(batches)

    def evicting_ranks(self, batches: Sequence[int]) -> tuple[int, ...]:
        """The ranks that move saved activations away in a program of these batches; none: there is nothing to balance.

        That is so without `balance`, and with it for few ranks that train (1F1B: fewer than 4), or batches too small to
        fill the pipeline.
        """
        return self._saved.evicting_ranks(batches)

    @property
    def splits_backward(self) -> bool:
        """Whether backwards are computed in halves, I and W."""
        return splits_backward(self._order)

    def recomputes(self, stage: int) -> bool:
        """Whether backwards at the stage are preceded by a recompute."""
        return self.recompute and self._order.recomputes(stage)

    def unread(self, num_microbatches: int) -> tuple[int, ...]:
        """For each stage, how many backwards of a batch of this size are to come where the next batch begins."""
        return _unread(self._order, self.rank_of_stage, num_microbatches)

    def holds(self, num_microbatches: int) -> tuple[bool, ...]:
        """For each stage, whether the prediction from a batch of this size reads a copy of its gradients.

        It does where more of them are done than it reads, and where the replicas reduce what it reads.
        """
        if not self.weights.predicts or (self.reduce_partial and self.data_parallel):
            return (self.weights.predicts,) * self.num_stages
        if self.provisional_microbatches is None:
            return (False,) * self.num_stages
        done = (num_microbatches - unread for unread in self.unread(num_microbatches))
        return tuple(self.provisional_microbatches < each for each in done)

    @property
    def report_lag(self) -> int:
        """By the end of batch i's segment every rank has stepped batch i - report_lag and posted its norm."""
        behind = self._order.most_behind
        if any(stages[-1] < self.num_frozen for stages in stages_by_rank(self.rank_of_stage)):
            return max(1, self.weights.report_lag(self.num_stages))  # a frozen rank begins the next batch meanwhile
        return self.weights.report_lag(self.num_stages if behind is None else behind + 1)

    @property
    def settling_batches(self) -> int:
        """How many of the batches before a batch can matter to its segment, and to a drain after it."""
        order = self._order
        if self.weights.updates_alone and order.most_behind is not None:
            return order.most_behind + max(map(order.graph.depth, range(self.num_stages)))
        return self.weights.settling_batches(order.max_in_flight(self.num_frozen) or 0)

    def window(self, batches: Sequence[int]) -> tuple[int, ...]:
        """Of batches that follow a drain, the last ones, behind which a run goes on or drains as behind all of them."""
        return tuple(batches[-self.settling_batches - 1 :])

    # --- programs

    def computations(self, rank: int, batches: Sequence[int]) -> Row:
        """What a rank computes of batches of these sizes, in its order: the program without what the passes add."""
        return computations_of(self, self._order, rank, batches)

    def segments_without_transfers(self, batches: Sequence[int]) -> list[Segments]:
        """What each rank does in a program of batches of these sizes, in segments, but for transfers between stages and
        without the versions that computations use. It takes a fifth of the time to build the program.
        """
        return segments_without_transfers(self, self._order, batches)

    def returns_to_batches(self, batches: Sequence[int]) -> bool:
        """As in `BuildsPrograms`, from the order alone: of a deep pipeline the program takes a second to build."""
        return returns_to_batches(self, self._order, batches)

    def build_periodic(self, num_microbatches: int) -> PeriodicProgram:
        """The run from batch 0 on of any number of batches of this size."""
        return build_periodic(self, self._order, num_microbatches)

    # --- parts

    def _build(self, batches: Sequence[int], first_batch: int, first_microbatch: int) -> ProgramInSegments:
        return build_in_segments(self, self._order, batches, first_batch, first_microbatch)

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
        return SavedBounds(self._order, self.rank_of_stage, self.balance, self.weights.drains, offloads)


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
    if num_frozen:
        active = order(num_stages - num_frozen, extra_warmup=extra_warmup)
        return BehindFrozen(active, num_frozen=num_frozen, rank_of_stage=rank_of_stage)
    return order(
        num_stages, rank_of_stage=rank_of_stage, microbatch_group_size=group_size, extra_warmup=extra_warmup,
        edges=edges, work=work,
    )  # fmt: skip


def _shared(batches: int) -> str:
    """How the microbatches in flight are shared, behind their number."""
    return "" if batches == 1 else f" in {batches} batches together"


@lru_cache(maxsize=256)
def _unread(order: Order, rank_of_stage: tuple[int, ...], num_microbatches: int) -> tuple[int, ...]:
    """How much of a batch is left to be done where the next begins. Read off the rows of two batches: where the second
    begins on a rank, and what stands behind that of the first.
    """
    batches, counts = [range(num_microbatches), range(num_microbatches, 2 * num_microbatches)], [0] * order.num_stages
    for rank in range(max(rank_of_stage) + 1):
        stages = stages_of(rank_of_stage, rank)
        for segment in order.segments(rank if order.interleaves else stages[0], batches)[1:]:
            for each in segment:
                counts[each.stage] += each.kind in ENDS_BACKWARD and each.microbatch < num_microbatches
    return tuple(counts)
