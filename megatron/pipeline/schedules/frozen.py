"""An order with frozen stages in front: these compute only forwards, and the trained stages keep their order.

    stage 0, frozen          F0 F1 F2 F3 F4 ...
    stage 1, frozen           . F0 . F1 . F2 ...          a rank with stages 1 and 2 runs the frozen forward of a
    stage 2, of that rank     .  . F0  . F1  .  F2 ...    microbatch directly before the trained stage's forward
    stage 3                   .  .  .  . F0 B0 ...

Frozen stages save nothing and get no gradients (PipeTransformer: He et al., 2021). So a rank with only frozen stages
runs ahead, even into the next batch, until too many of its tensors are unread (`StageGraph.most_unread`). A batch does
not wait until the frozen stages have filled again.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron.pipeline.program.edges import Edge
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules.order import Order, forward
from megatron.pipeline.schedules.passes import Segments


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
        stages = [stage for stage, at in enumerate(self.rank_of_stage) if at == rank]
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
        stages = [stage for stage, at in enumerate(self.rank_of_stage) if at == rank]
        return self.max_in_flight(stages[-1])

    def validate_placement(self) -> None:
        """Raise ValueError if a rank has several frozen or several trained stages, or if ranks do not ascend."""
        before = -1
        for stage, rank in enumerate(self.rank_of_stage):
            is_next = rank == before + 1 or (rank == before and stage == self.num_frozen)
            if not is_next:
                raise ValueError(
                    f"stages {self.rank_of_stage}, of which the first {self.num_frozen} are frozen: each rank has one "
                    "that is frozen, one that is trained, or the last of those and the first of these, in order"
                )
            before = rank

    def validate(self, num_microbatches: int) -> None:
        self.active.validate(num_microbatches)

    def first_after_border(self, rank: int) -> Sequence[tuple[Kind, int, int]]:
        stages = [stage for stage, at in enumerate(self.rank_of_stage) if at == rank]
        if stages[-1] < self.num_frozen:
            return ()
        turns = self.active.first_after_border(stages[-1] - self.num_frozen)
        return [(kind, stage + self.num_frozen, behind) for kind, stage, behind in turns]

    def recomputes(self, stage: int) -> bool:
        return stage >= self.num_frozen and self.active.recomputes(stage - self.num_frozen)
