"""A schedule: the choices from which a program follows.

An order says when each stage computes which microbatch; a weight policy, which weights it uses and when they are updated; flags add recompute and
name what the chain of an update contains. `build` turns the choices into a program: the order, then one pass for each concern.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pipeline.instruction import Instruction, Kind
from megatron.pipeline.passes import Legs
from megatron.pipeline.passes.communication import add_communication
from megatron.pipeline.passes.recompute import add_recompute
from megatron.pipeline.passes.updates import add_updates
from megatron.pipeline.passes.versions import set_versions
from megatron.pipeline.periodic import PeriodicProgram
from megatron.pipeline.program import Program, shifted_row
from megatron.pipeline.schedules.legs import ProgramInLegs
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.orders import ORDERS, PRESETS
from megatron.pipeline.schedules.stream import ProgramStream
from megatron.pipeline.weights import WeightPolicy


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What to build programs from. Two schedules with equal fields build equal programs.

    Attributes:
        order: a name in `ORDERS`: `gpipe` or `1f1b`.
        weights: the weight policy.
        num_stages: stages of the pipeline, one on each rank.
        recompute: recompute the activations of a microbatch before its backward.
        extra_warmup: start twice as far ahead, to hide transfers (1f1b only).
        tied_embeddings: the first and the last stage share their embedding, so their gradients of it are added up.
        data_parallel: the pipeline has replicas, so gradients are reduced over them.

    Raises:
        ValueError: choices that do not go together.
    """

    order: str
    weights: WeightPolicy
    num_stages: int
    recompute: bool = False
    extra_warmup: bool = False
    tied_embeddings: bool = False
    data_parallel: bool = False

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"there is no order {self.order!r}; choose from {', '.join(ORDERS)}")
        if self.num_stages < 1:
            raise ValueError(f"a pipeline cannot have {self.num_stages} stages; give 1 and more")
        if self.order == "gpipe" and self.weights is not WeightPolicy.FLUSH:
            raise ValueError(
                f"gpipe drains the pipeline in every batch, so {self.weights.value} would keep more weight versions for nothing; "
                "use weights flush, or order 1f1b"
            )
        if self.order == "gpipe" and self.extra_warmup:
            raise ValueError("gpipe runs all forwards of a batch first, so it has no warm-up to extend; drop extra_warmup, or use order 1f1b")
        if self.weights is WeightPolicy.STASH and self.extra_warmup:
            raise ValueError("stash keeps a weight version for each microbatch in flight, at most p-s, which extra_warmup would exceed; drop it")
        if self.weights is WeightPolicy.STASH and self.tied_embeddings:
            raise ValueError(
                "under stash each stage updates its weights at its own time, so the first and the last stage cannot share an embedding; "
                "untie the embeddings"
            )

    @classmethod
    def preset(cls, name: str, *, num_stages: int, **flags: bool) -> "Schedule":
        """The schedule of that name: gpipe, flush, 2bw or pipedream. Raises ValueError for another name, and as the constructor does."""
        if name not in PRESETS:
            raise ValueError(f"there is no schedule {name!r}; choose from {', '.join(PRESETS)}")
        order, weights = PRESETS[name]
        return cls(order=order, weights=weights, num_stages=num_stages, **flags)

    # --- what it demands and takes

    def validate(self, num_microbatches: int) -> None:
        """Raises ValueError where a batch of this size cannot be run."""
        if num_microbatches < 1:
            raise ValueError(f"a batch cannot have {num_microbatches} microbatches; give 1 and more")
        if self.weights is WeightPolicy.STASH and num_microbatches != 1:
            raise ValueError(
                f"stash updates the weights after every microbatch, so a batch is one microbatch and cannot have {num_microbatches}; "
                "set the global batch size to micro batch size times data-parallel size"
            )
        if self.weights is WeightPolicy.TWO_BW and num_microbatches < (fewest := self._order.max_in_flight(0)):
            raise ValueError(
                f"2bw with {self.num_stages} stages{' and extra warm-up' if self.extra_warmup else ''} needs batches of at least {fewest} microbatches, "
                f"as many as are in flight, not {num_microbatches}: else the weights of a batch would not be ready when it begins; "
                "use larger batches, fewer stages, or flush"
            )

    def max_saved_microbatches(self, batches: Sequence[int]) -> tuple[int, ...]:
        """The largest number of microbatches whose activations each stage may hold in a program of these batches."""
        together = max(batches) if self.weights.rule.drains else sum(batches)
        limits = [self._order.max_in_flight(stage) for stage in range(self.num_stages)]
        return tuple(together if limit is None else min(limit, together) for limit in limits)

    @property
    def report_lag(self) -> int:
        """By the end of batch i's leg every rank has executed the STEP of batch i - report_lag, in the same undrained stretch.

        Under stash, a rank's norm of that batch has been posted, too.
        """
        return self.num_stages if self.weights.rule.delay is None else self.weights.rule.delay

    @property
    def settling_batches(self) -> int:
        """How many batches after a drained start, and so before any batch, can matter to the leg of a batch and to a drain after it.

        None, where every batch drains. Under a fixed delay the one before: what is in flight is less than a batch (see `validate`). Where stages use
        their newest weights, those whose backward is to come, and those that had been in flight at their forwards, which fixed their versions.
        """
        rule = self.weights.rule
        if rule.drains:
            return 0
        return 1 if rule.delay is not None else 2 * (self._order.max_in_flight(0) - 1)

    # --- programs

    def build(self, batches: Sequence[int], *, first_batch: int = 0, first_microbatch: int = 0) -> Program:
        """The program of `batches`, which gives the number of microbatches of each, from a drained state to a drained state.

        Raises:
            ValueError: no batches, or a batch that the schedule cannot run.
        """
        return self.build_in_legs(batches, first_batch=first_batch, first_microbatch=first_microbatch).program

    def build_in_legs(self, batches: Sequence[int], *, first_batch: int = 0, first_microbatch: int = 0) -> ProgramInLegs:
        """The same program, with the places at which it could have been drained."""
        if not batches:
            raise ValueError("a program needs a batch; give the number of microbatches of each")
        for size in batches:
            self.validate(size)
        outline = self._outline(batches, first_batch=first_batch, first_microbatch=first_microbatch)
        ranks = []
        for stage in range(self.num_stages):
            legs = self._order_legs(stage, outline)
            if self.recompute:
                legs = add_recompute(legs)
            legs = add_updates(legs, stage, outline)
            legs = set_versions(legs, outline)
            ranks.append(legs)
        return ProgramInLegs.join(outline, add_communication(ranks, outline))

    def build_periodic(self, num_microbatches: int) -> PeriodicProgram:
        """The run from batch 0 on of any number of batches of this size."""
        num_fill = max(1, self.settling_batches + (self.weights.rule.delay or 0))  # batch j uses version max(j - delay, 0), which settles later
        sizes = (num_microbatches,) * num_fill
        built = self.build_in_legs((*sizes, num_microbatches))
        return PeriodicProgram(
            outline=self._outline(sizes),
            fill=built.legs(0, num_fill),
            period=built.legs(num_fill, num_fill + 1),
            drain=tuple(shifted_row(row, microbatches=-num_microbatches, versions=-1) for row in built.drain),
            num_microbatches=num_microbatches,
        )

    def build_evaluation(self, num_microbatches: int, *, version: int, first_microbatch: int = 0) -> Program:
        """Forwards only, with one weight version, the newest of a drained state."""
        if num_microbatches < 1:
            raise ValueError(f"an evaluation cannot have {num_microbatches} microbatches; give 1 and more")
        outline = Program(
            rows=((),) * self.num_stages,
            rank_of_stage=self._rank_of_stage,
            batches=(num_microbatches,),
            weights=self.weights,
            first_batch=version,
            first_microbatch=first_microbatch,
            forward_only=True,
        )
        microbatches = range(first_microbatch, first_microbatch + num_microbatches)
        ranks = [[[Instruction(Kind.FORWARD, stage, each, version) for each in microbatches]] for stage in range(self.num_stages)]
        return ProgramInLegs.join(outline, add_communication(ranks, outline)).program

    def stream(self, *, first_batch: int = 0, first_microbatch: int = 0) -> ProgramStream:
        """The program of batches that come one at a time, from a drained state before `first_batch` on."""
        return ProgramStream(self, first_batch=first_batch, first_microbatch=first_microbatch)

    # --- parts

    @property
    def _order(self) -> Order:
        return ORDERS[self.order](self.num_stages, extra_warmup=self.extra_warmup)

    @property
    def _rank_of_stage(self) -> tuple[int, ...]:
        return tuple(range(self.num_stages))

    def _outline(self, batches: Sequence[int], *, first_batch: int = 0, first_microbatch: int = 0) -> Program:
        return Program(
            rows=((),) * self.num_stages,
            rank_of_stage=self._rank_of_stage,
            batches=tuple(batches),
            weights=self.weights,
            first_batch=first_batch,
            first_microbatch=first_microbatch,
            recompute=self.recompute,
            tied_embeddings=self.tied_embeddings,
            data_parallel=self.data_parallel,
        )

    def _order_legs(self, stage: int, outline: Program) -> Legs:
        """The order's computations at a stage: all batches in one stretch, or each in a stretch of its own where the policy drains."""
        order = self._order
        batches = [outline.microbatches_of(outline.first_batch + index) for index in range(len(outline.batches))]
        if not self.weights.rule.drains:
            return order.legs(stage, batches)
        stretches = [order.legs(stage, [batch]) for batch in batches]
        return [leg + drain for leg, drain in stretches] + [[]]
