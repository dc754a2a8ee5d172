"""What a rank waits for in its lanes between device and host, brought back to what its chain of reductions has done.

Where weights live on the host, a rank has three lanes beside its row and its chain of reductions (see
`program.lane_order`). Could they wait in a circle? Whatever a lane's word waits for stands before it in the
same row: the word before it in its lane, what `Word.awaits` names, the computations before it. So number the words by
their places in the row: every wait within a rank leads to a lower number, and none can come back to where it began. A
circle has to leave the rank, and it leaves only where ranks wait for each other: in the row, for tensors, and in the
chain, for reductions over several ranks.

So without the chain no lane is ever stuck. With it a word of a lane is complete, some time, once so many of the rank's
reductions are: all that it waits for, over however many words between. That number is found in one pass over the row.
The execution that proves progress then has a computation wait for so many reductions, and needs no lanes. A reduction
that waits for a lane is no exception: what it waits for needs only reductions before it, which are complete when its
turn in the chain has come.
"""

from megatron.pipeline.check.compact import KIND_OF_CODE, CompactProgram
from megatron.pipeline.program.instruction import Lane


def awaited_reductions(compact: CompactProgram, rank: int) -> dict[int, int]:
    """For each position of a row that waits for its lanes: how many of the rank's reductions have to be complete."""
    awaited = compact.awaited_in_lanes[rank]
    needs = _needs(compact, rank) if awaited else []
    computed = (position for position in awaited if _lane(compact, rank, position) is Lane.COMPUTE)
    return {position: needs[position] for position in computed if needs[position]}


def words_under_way(compact: CompactProgram, rank: int, end: int, num_reduced: int) -> list[int]:
    """The positions before `end` of what a rank's lanes to and from the host cannot have completed by then, when so
    many of its reductions are complete.
    """
    own = (Lane.H2D, Lane.D2H, Lane.HOST)
    needs = _needs(compact, rank, end)
    return [each for each in range(end) if needs[each] > num_reduced and _lane(compact, rank, each) in own]


def _needs(compact: CompactProgram, rank: int, end: int | None = None) -> list[int]:
    """For each position, how many of the rank's reductions are complete when it is, at the earliest."""
    awaited = compact.awaited_in_lanes[rank]
    needs: list[int] = []
    of_lane = dict.fromkeys(Lane, 0)  # what the last word of each lane needs
    for position in range(len(compact.codes[rank][:end])):
        lane = _lane(compact, rank, position)
        need = max((needs[each] for each in awaited.get(position, ())), default=0)
        if lane is Lane.CHAIN:
            assert need <= of_lane[lane], "what a reduction waits for stands before it"
            need = of_lane[lane] + 1
        if lane is not Lane.COMPUTE:
            need = of_lane[lane] = max(need, of_lane[lane])
        needs.append(need)
    return needs


def _lane(compact: CompactProgram, rank: int, position: int) -> Lane:
    return KIND_OF_CODE[compact.codes[rank][position]].row.lane
