"""The renaming of replicas in a program without lost ranks.

Replicas differ only in the numbers of their microbatches: replica j of d has j, j + d, j + 2d, ... So renaming replicas
turns one loss into another loss, and the program of the first into a program of the second. The rows and their times
stay the same; the numbers of microbatches, of copies and of ranks change. What is proved of one program holds for the
other.

    lost 2.1 of 4 replicas    is 0.1, where replica 0 stands for 2, and 1, 2, 3 for 3, 0, 1
    lost 3.0 and 1.1          is 0.0 and 1.1, where 0 and 1 stand for 3 and 1, and 2, 3 for 0, 2
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from megatron.pipeline.program.copies import Copy
from megatron.pipeline.program.edges import Edge
from megatron.pipeline.program.instruction import Instruction, Row
from megatron.pipeline.schedules.program_schedule import ProgramSchedule
from megatron.pipeline.survivors import Survivors
from megatron.pipeline.survivors.sharing import ReplicaRank, in_order


def distinct(lost: Collection[ReplicaRank], num_replicas: int) -> tuple[tuple[ReplicaRank, ...], tuple[int, ...]]:
    """Return the loss that stands for `lost`, and for each of its replicas the replica of `lost` that it stands for.

    Losses that differ only in the names of replicas have the same loss that stands for them. In that loss, the replicas
    0, 1, ... have the lost ranks, in the reverse of the order of `in_order`.
    """
    order = in_order(lost, num_replicas)
    ranks_of = {replica: sorted(each.rank for each in lost if each.replica == replica) for replica in order}
    struck = [replica for replica in reversed(order) if ranks_of[replica]]
    known = tuple(ReplicaRank(at, rank) for at, replica in enumerate(struck) for rank in ranks_of[replica])
    stands_for = dict(zip(in_order(known, num_replicas), order, strict=True))
    return known, tuple(stands_for[replica] for replica in range(num_replicas))


def renamed(found: Survivors, replicas: Sequence[int]) -> Survivors:
    """Return the job without its lost ranks under other names of its replicas.

    Args:
        found: the job with its replicas named 0, 1, ...
        replicas: the new name of each replica.
    """
    old, program, num_replicas = found.schedule, found.schedule.program, len(replicas)

    def named(each: ReplicaRank) -> ReplicaRank:
        return ReplicaRank(replicas[each.replica], each.rank)

    def microbatch(number: int) -> int:
        replica = number % num_replicas
        return number - replica + replicas[replica]

    assert not program.kept and program.batches[0] % num_replicas == 0, program
    ranks = sorted(map(named, found.ranks), key=lambda each: (each.rank, each.replica))
    rank_of = [ranks.index(named(each)) for each in found.ranks]
    keys = [
        (copy.stage, ranks[rank_of[rank]].replica)
        for copy, rank in zip(program.copies, program.rank_of_stage, strict=True)
    ]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    stage_of = [order.index(stage) for stage in range(len(keys))]

    def with_names(row: Row) -> Row:
        return tuple(
            Instruction(
                each.kind,
                stage_of[each.stage],
                None if each.microbatch is None else microbatch(each.microbatch),
                each.version,
                None if each.peer is None else stage_of[each.peer],
                each.horizon,
                each.unstepped,
            )
            for each in row
        )

    lost = tuple(sorted(map(named, found.lost)))
    made = replace(
        program,
        rows=tuple(with_names(program.rows[rank_of.index(rank)]) for rank in range(len(ranks))),
        rank_of_stage=tuple(rank_of[program.rank_of_stage[stage]] for stage in order),
        copies=tuple(
            Copy(
                copy.stage,
                tuple(sorted(map(microbatch, copy.positions))),
                None if copy.pair is None else stage_of[copy.pair],
            )
            for copy in map(program.copies.__getitem__, order)
        ),
        edges=tuple(
            sorted(Edge(stage_of[each.source], stage_of[each.target], each.gradient) for each in program.graph.edges)
        ),
        not_recomputed=tuple(sorted(stage_of[stage] for stage in program.not_recomputed)),
    )
    before, after = (f"({' '.join(map(str, each))})" for each in (found.lost, lost))
    schedule = ProgramSchedule(program=made, repetition=old.repetition, name=old.name.replace(before, after))
    return replace(found, schedule=schedule, ranks=tuple(ranks), lost=lost)
