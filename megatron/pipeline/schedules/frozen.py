"""An order behind a frozen prefix: the stages of the prefix compute forwards only, the others keep their order.

    stage 0, frozen          F0 F1 F2 F3 F4 ...
    stage 1, frozen           . F0 . F1 . F2 ...          a rank with both takes a microbatch through the frozen stage
    stage 2, of that rank     .  . F0  . F1  .  F2 ...    right before the other one's forward
    stage 3                   .  .  .  . F0 B0 ...

Nothing is saved in front, and no gradient comes back there (PipeTransformer: He et al., 2021). So a rank of the prefix
runs ahead, into the next batch, too, until it has too much unread (`StageGraph.most_unread`); a batch does not wait for
the prefix to fill again.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron.pipeline.program.edges import Edge
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules.order import Order, forward
from megatron.pipeline.schedules.passes import Segments


def frozen_chain(num_stages: int, num_frozen: int) -> tuple[Edge, ...]:
    """The edges of a chain whose first stages are frozen."""
    return tuple(Edge(stage, stage + 1, gradient=stage >= num_frozen) for stage in range(num_stages - 1))


class BehindFrozen(Order):
    """`active`: the order of the stages behind the prefix, each on a rank of its own."""

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
        """Raises ValueError where a rank has several frozen stages, or several that are trained, or ranks go back."""
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
