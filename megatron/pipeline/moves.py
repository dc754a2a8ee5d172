"""Moving the saved activations of a microbatch to the pair stage and back: the rules, for all that execute programs.

BPipe (section 3.2) pairs stage x, which saves many microbatches, with stage p-1-x, which saves few. Four instructions
move the activations of a microbatch between them:

    0EVICT3  -> 3ACCEPT3     from the evictor to the acceptor
    0LOAD3   <- 3RETURN3     and back

They only *request* a move. Each rank carries out its moves in the background, one after another in the order of its
row: a move is posted when the one before it has completed, and completes when both ends have posted it. So an ACCEPT
that stands behind a RETURN takes memory only when the RETURN has freed as much, however early the row requests it and
however the two ranks drift. The moves of the two ranks of a pair correspond one to one, in the same order.

Computations wait as follows.

- R, B and I of a microbatch that was evicted wait until its LOAD has completed.
- F waits until every EVICT has completed that stands before the last computation before it. An eviction thus has the
  time of one computation, and after that its memory is free, whatever the timing.

A microbatch counts as saved from the start of its forward, or from when its LOAD or ACCEPT is posted, to the end of
its backward, or until its EVICT or RETURN has completed: on both sides while it moves.
"""

from collections.abc import Iterable, Sequence

from megatron.pipeline.instruction import COMPUTATIONS, MOVES, OWN_MOVES, USES_SAVED, Instruction, Kind
from megatron.pipeline.stages import stages_of


def pair_of(index: int, count: int) -> int:
    """The stage (of `count` stages) that a stage is paired with; likewise the rank."""
    return count - 1 - index


def partner_of_rank(rank_of_stage: Sequence[int], rank: int) -> int:
    """The rank that has the pair stages of a rank's stages; the rank itself where they live there, too.

    Raises:
        ValueError: they live on several ranks.
    """
    num_stages = len(rank_of_stage)
    own = stages_of(rank_of_stage, rank)
    partners = list(dict.fromkeys(rank_of_stage[pair_of(stage, num_stages)] for stage in own))
    if len(partners) != 1:
        raise ValueError(
            f"the stages of rank {rank} have their pair stages on ranks {' and '.join(map(str, partners))}, so it has "
            "no pair; place stages p-1-x of stages x on one rank, or move nothing"
        )
    return partners[0]


def counterpart(move: Instruction, num_stages: int) -> Instruction:
    """The other end of a move."""
    return Instruction(move.kind.row.other_end, pair_of(move.stage, num_stages), move.microbatch)


class MoveOrder:
    """Which moves of its own rank each instruction of a row waits for. Instructions are told in the row's order.

    `synchronous`: for comparison with the above, computations of the evictor wait for every move before them.
    """

    def __init__(self, *, synchronous: bool = False) -> None:
        self._synchronous = synchronous
        self._num_moves = 0
        self._num_to_own = 0  # moves up to and with the last EVICT or LOAD
        self._num_waited_for = 0
        self._num_to_evict = 0  # moves up to and with the last EVICT
        self._num_to_earlier_evict = 0  # as it was before the last computation
        self._num_to_load: dict[
            tuple[int, int | None], int
        ] = {}  # moves up to and with the LOAD of (stage, microbatch)

    def awaited(self, instruction: Instruction) -> int:
        """How many of the rank's moves, counted from the first, have to be complete before the instruction starts."""
        kind, key = instruction.kind, (instruction.stage, instruction.microbatch)
        if kind in MOVES:
            self._num_moves += 1
            if kind in OWN_MOVES:
                self._num_to_own = self._num_moves
            if kind is Kind.EVICT:
                self._num_to_evict = self._num_moves
            elif kind is Kind.LOAD:
                self._num_to_load[key] = self._num_moves
        if kind not in COMPUTATIONS:
            return 0
        needed = self._num_to_earlier_evict if kind is Kind.FORWARD else 0
        if kind in USES_SAVED:
            needed = self._num_to_load.get(key, 0) if kind is Kind.RECOMPUTE else self._num_to_load.pop(key, 0)
        self._num_to_earlier_evict = self._num_to_evict
        if self._synchronous:
            needed = self._num_to_own
        self._num_waited_for = max(self._num_waited_for, needed)
        return needed

    def still_awaited(self) -> list[int]:
        """Which moves later instructions may wait for, as how many there are from each to the last one."""
        needed = (self._num_to_evict, self._num_to_earlier_evict, *self._num_to_load.values())
        return [self._num_moves - each for each in needed if each > self._num_waited_for]


def awaited_moves(row: Iterable[Instruction], *, synchronous: bool = False) -> dict[int, int]:
    """For each position of a row that waits for moves: how many of the row's moves have to be complete by then."""
    order = MoveOrder(synchronous=synchronous)
    awaited = ((position, order.awaited(instruction)) for position, instruction in enumerate(row))
    return {position: needed for position, needed in awaited if needed}
