"""Programs whose stages are copies: those of all replicas of a pipeline, some of whose ranks are lost."""

from collections.abc import Collection, Sequence

from megatron.pipeline.program.copies import Copy, edges_of_copies
from megatron.pipeline.program.edges import Edge
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import POLICIES
from megatron.pipeline.schedules.program_schedule import ProgramSchedule


def copies_without(
    lost: Collection[tuple[int, int]], *, num_stages: int, num_replicas: int, num_microbatches: int
) -> tuple[Copy, ...]:
    """The copies of each stage of the model but those of the lost (replica, stage), whose microbatches the others take
    in turn. `num_microbatches`: of each replica.
    """
    copies = []
    for stage in range(num_stages):
        left = {each: [] for each in range(num_replicas) if (each, stage) not in lost}
        foreign = 0
        for position in range(num_microbatches * num_replicas):
            replica = position % num_replicas
            if replica not in left:
                replica = [*left][foreign % len(left)]
                foreign += 1
            left[replica].append(position)
        copies += [Copy(stage, tuple(positions)) for positions in left.values()]
    return tuple(copies)


def schedule_of(
    copies: Sequence[Copy],
    *,
    edges: Sequence[Edge] = (),
    weights: str = "flush",
    rank_of_stage: Sequence[int] = (),
    tied_embeddings: bool = False,
    splits: bool = False,
) -> ProgramSchedule:
    """A schedule of copies, each on a rank of its own with as many microbatches under way as stages behind it, or where
    `rank_of_stage` says; then each rank computes the forwards of a batch stage by stage, and its backwards.

    Args:
        edges: those of the model's stages; none: a chain.
        splits: backwards are split into I and W.
    """
    num_stages = copies[-1].stage + 1
    edges = edges or [Edge(stage, stage + 1) for stage in range(num_stages - 1)]
    size = sum(len(copy.positions) for copy in copies if copy.stage == 0)
    num_batches = 1 if weights == "flush" else 4
    placed = tuple(rank_of_stage) or tuple(range(len(copies)))
    rows: list[list[Instruction]] = [[] for _ in range(max(placed) + 1)]
    backward = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if splits else (Kind.BACKWARD,)
    for rank, row in enumerate(rows):
        own = [number for number, each in enumerate(placed) if each == rank]
        blocks = [range(batch * size, (batch + 1) * size) for batch in range(num_batches)]
        if len(own) > 1:
            for block in blocks:
                for number in own:
                    row += [Instruction(Kind.FORWARD, number, each) for each in _taken(copies[number], block, size)]
                for number in reversed(own):
                    taken = _taken(copies[number], block, size)
                    row += [Instruction(kind, number, each) for each in taken for kind in backward]
            continue
        [number] = own
        taken = [each for block in blocks for each in _taken(copies[number], block, size)]
        ahead = min(num_stages - 1 - copies[number].stage, len(copies[number].positions))
        row += [Instruction(Kind.FORWARD, number, each) for each in taken[:ahead]]
        for place, each in enumerate(taken):
            row += [
                Instruction(Kind.FORWARD, number, next_one) for next_one in taken[place + ahead : place + ahead + 1]
            ]
            row += [Instruction(kind, number, each) for kind in backward]
    program = Program(
        rank_of_stage=placed,
        batches=(size,) * num_batches,
        weights=POLICIES[weights],
        edges=edges_of_copies(copies, edges),
        copies=tuple(copies),
        data_parallel=True,
        tied_embeddings=tied_embeddings,
        rows=tuple(map(tuple, rows)),
    )
    return ProgramSchedule.of(program)


def _taken(copy: Copy, block: range, size: int) -> list[int]:
    return [each for each in block if each % size in copy.positions]
