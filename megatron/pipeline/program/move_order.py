"""Moving the saved activations of a microbatch to the pair stage and back: the rules, for all that execute programs.

BPipe (section 3.2) pairs stage x, which saves many microbatches, with stage p-1-x, which saves few. Behind a frozen
prefix, which saves nothing and takes no part, the stages are counted from its end: of k frozen stages and a others,
stage k+x is paired with stage k+a-1-x. Four instructions move the activations of a microbatch between the two:

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
- Forwards of a frozen stage need no memory that a move makes: they wait for none, and are no computations here.

A microbatch counts as saved from the start of its forward, or from when its LOAD or ACCEPT is posted, to the end of
its backward, or until its EVICT or RETURN has completed: on both sides while it moves.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.pipeline.program.edges import stages_of
from megatron.pipeline.program.instruction import COMPUTATIONS, EVICTIONS, LOADS, MOVES, USES_SAVED, Instruction, Kind


def pair_of(index: int, count: int) -> int:
    """The one of `count` in a row that is as far from the end as this one is from the beginning."""
    return count - 1 - index


@dataclass(frozen=True)
class Pairs:
    """Which stages are paired, and which ranks: those that are trained, from both ends to the middle.

    Attributes:
        rank_of_stage: the rank of each stage.
        num_frozen: stages in front that are frozen.
    """

    rank_of_stage: tuple[int, ...]
    num_frozen: int = 0

    def of_stage(self, stage: int) -> int:
        """The pair stage of a stage; the stage itself in the middle, or where it is frozen."""
        if stage < self.num_frozen:
            return stage
        return self.num_frozen + pair_of(stage - self.num_frozen, len(self.rank_of_stage) - self.num_frozen)

    def of_rank(self, rank: int) -> int:
        """The rank that has the pair stages of a rank's stages; the rank itself where they live there, too, or where
        all its stages are frozen.

        Raises:
            ValueError: they live on several ranks.
        """
        trained = [stage for stage in stages_of(self.rank_of_stage, rank) if stage >= self.num_frozen]
        partners = list(dict.fromkeys(self.rank_of_stage[self.of_stage(stage)] for stage in trained)) or [rank]
        if len(partners) != 1:
            raise ValueError(
                f"the stages of rank {rank} have their pair stages on ranks {' and '.join(map(str, partners))}, so it "
                "has no pair; place stages p-1-x of stages x on one rank, or move nothing"
            )
        return partners[0]

    def counterpart(self, move: Instruction) -> Instruction:
        """The other end of a move."""
        return Instruction(move.kind.row.other_end, self.of_stage(move.stage), move.microbatch)

    def refusal(self, stage: int) -> str | None:
        """Why nothing can move from a stage or to it; None: it can."""
        if stage < self.num_frozen:
            return f"stage {stage} gets no gradients, so it has forwards only and saves nothing that could move"
        if self.rank_of_stage[self.of_stage(stage)] == self.rank_of_stage[stage]:
            return "its pair stage lives on the same rank, so nothing can move"
        return None


class MoveOrder:
    """Which moves of its own rank each instruction of a row waits for. Instructions are told in the row's order.

    `num_frozen`: stages in front that are frozen.
    """

    def __init__(self, *, num_frozen: int = 0) -> None:
        self._num_frozen = num_frozen
        self._num_moves = 0
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
            if kind in EVICTIONS:
                self._num_to_evict = self._num_moves
            elif kind in LOADS:
                self._num_to_load[key] = self._num_moves
        if kind not in COMPUTATIONS or instruction.stage < self._num_frozen:
            return 0
        needed = self._num_to_earlier_evict if kind is Kind.FORWARD else 0
        if kind in USES_SAVED:
            needed = self._num_to_load.get(key, 0) if kind is Kind.RECOMPUTE else self._num_to_load.pop(key, 0)
        self._num_to_earlier_evict = self._num_to_evict
        self._num_waited_for = max(self._num_waited_for, needed)
        return needed

    def still_awaited(self) -> list[int]:
        """Which moves later instructions may wait for, as how many there are from each to the last one."""
        needed = (self._num_to_evict, self._num_to_earlier_evict, *self._num_to_load.values())
        return [self._num_moves - each for each in needed if each > self._num_waited_for]


def awaited_moves(row: Iterable[Instruction], *, num_frozen: int = 0) -> dict[int, int]:
    """For each position of a row that waits for moves: how many of the row's moves have to be complete by then.

    `num_frozen`: as for `MoveOrder`.
    """
    order = MoveOrder(num_frozen=num_frozen)
    awaited = ((position, order.awaited(instruction)) for position, instruction in enumerate(row))
    return {position: needed for position, needed in awaited if needed}
