"""How often the ranks of a pipeline send each other something in one batch: counted in the program that they execute.

Nothing here knows a schedule: a rank sends to the next one as often as its row of the program says, and moves saved
activations as often as it has an EVICT. Under a schedule without flushes the batch is one of the steady period.
"""

from collections import Counter
from dataclasses import dataclass

from megatron.pipeline.instruction import Kind
from megatron.pipeline.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class Counts:
    """By rank of the pipeline, in one batch.

    Attributes:
        num_microbatches: of the batch.
        num_virtual_stages: stages on each rank; what a rank moves of a microbatch is of one of them.
        activations: tensors that it sends to the next rank; as many gradients come back. The last rank's next is the
            first one, which it sends to where ranks have several stages.
        evictions: microbatches that it moves to its pair; as many come back.
    """

    num_microbatches: int
    num_virtual_stages: int
    activations: tuple[int, ...]
    evictions: tuple[int, ...]

    @property
    def evictors(self) -> tuple[int, ...]:
        """The ranks that move anything."""
        return tuple(rank for rank, count in enumerate(self.evictions) if count)


def count_transfers(schedule: Schedule, num_microbatches: int) -> Counts:
    """What the ranks of `schedule` send in a batch. Raises ValueError for a batch that it cannot run."""
    if schedule.weights.drains:
        rows = schedule.build((num_microbatches,)).rows
    else:
        rows = schedule.build_periodic(num_microbatches).period
    kinds = [Counter(instruction.kind for instruction in row) for row in rows]
    return Counts(
        num_microbatches=num_microbatches,
        num_virtual_stages=schedule.num_virtual_stages,
        activations=tuple(count[Kind.SEND_F] for count in kinds),
        evictions=tuple(count[Kind.EVICT] for count in kinds),
    )
