"""How often the ranks of a pipeline send each other something in one batch: counted in the program that they execute.

Nothing here knows a schedule: a rank sends to the next one as often as its row of the program says, and moves saved
activations as often as it has an EVICT. Under a schedule without flushes the batch is one of the steady period.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megatron.pipeline.program.instruction import Kind, Tensor
from megatron.pipeline.program.move_order import Pairs
from megatron.pipeline.schedules import PipelineSchedule


@dataclass(frozen=True, kw_only=True)
class MessageCounts:
    """By rank of the pipeline, in one batch.

    Attributes:
        num_microbatches: of the batch.
        activations: tensors that it and the next rank send each other, each way: activations one way and as many
            gradients back; where frozen stages get none, the mean of both ways. The last rank's next is the first one.
        evictions: microbatches that it moves to its pair, each of one of its stages; as many come back.
        ends: the ranks of the first and the last stage; None: the first and the last rank.
        pair_of_rank: which rank's stages are paired with its own; None: p-1-s.
    """

    num_microbatches: int
    activations: tuple[float, ...]
    evictions: tuple[float, ...]
    ends: tuple[int, int] | None = None
    pair_of_rank: tuple[int, ...] | None = None

    @property
    def evictors(self) -> tuple[int, ...]:
        """The ranks that move anything."""
        return tuple(rank for rank, count in enumerate(self.evictions) if count)


def count_transfers(schedule: PipelineSchedule, num_microbatches: int) -> MessageCounts:
    """What the ranks of `schedule` send in a batch.

    Raises:
        ValueError: a batch that it cannot run, or as `exchanged`.
    """
    num_batches = 1
    if schedule.weights.drains:
        rows = schedule.build((num_microbatches,)).rows
    else:
        periodic = schedule.build_periodic(num_microbatches)
        rows, num_batches = periodic.period, periodic.num_batches
    placement, sends, pairs = schedule.rank_of_stage, Counter(), None
    for instruction in chain(*rows):
        sent = instruction.kind.row.sends
        if sent is not None:
            first = instruction.stage - (sent is Tensor.GRADIENT)  # the lower one of the two stages
            sends[placement[first], placement[first + 1]] += 0.5 / num_batches
    if schedule.num_frozen and schedule.balance:
        pairs = tuple(map(Pairs(placement, schedule.num_frozen).of_rank, range(schedule.num_ranks)))
    return MessageCounts(
        num_microbatches=num_microbatches,
        activations=exchanged(sends, schedule.num_ranks),
        evictions=tuple(sum(each.kind is Kind.EVICT for each in row) / num_batches for row in rows),
        ends=ends_of(placement),
        pair_of_rank=pairs,
    )


def exchanged(sent: Mapping[tuple[int, int], float], num_ranks: int) -> tuple[float, ...]:
    """By rank, what it and the next one send each other, each way.

    Args:
        sent: sender and receiver -> activations, or their bytes. As many gradients come back.

    Raises:
        ValueError: a sender whose receiver is not beside it.
    """
    found = [0] * num_ranks
    for (sender, receiver), num in sent.items():
        if receiver == (sender + 1) % num_ranks:
            found[sender] += num
        elif sender == (receiver + 1) % num_ranks:
            found[receiver] += num
        else:
            raise ValueError(
                f"rank {sender} sends to rank {receiver} of {num_ranks}, and traffic is known between neighbours only; "
                "place stages that follow each other on neighbouring ranks"
            )
    return tuple(found)


def ends_of(rank_of_stage: Sequence[int]) -> tuple[int, int] | None:
    """The ranks of the first and the last stage; None: the first and the last rank."""
    ends = rank_of_stage[0], rank_of_stage[-1]
    return None if ends == (0, max(rank_of_stage)) else ends
