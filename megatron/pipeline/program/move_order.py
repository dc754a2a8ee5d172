"""The rules for moving saved activations to the pair stage and back; everything that executes programs follows them.

BPipe (section 3.2) pairs stage x, which saves many microbatches, with stage p-1-x, which saves few. Frozen stages save
nothing and have no pair stage, so pairs are counted among the other stages: behind k frozen stages, of a other stages,
stage k+x is paired with stage k+a-1-x. Four instructions move the activations of a microbatch between the two stages:

    0EVICT3  -> 3ACCEPT3     from the evictor to the acceptor
    0LOAD3   <- 3RETURN3     and back

These instructions only *request* a move. Each rank carries out its moves in the background, one after another in the
order of its row. A move is posted when the move before it has completed, and completes when both ends have posted it.
So an ACCEPT that stands behind a RETURN takes memory only after the RETURN has freed as much. This holds however early
the row requests the ACCEPT, and however far one rank is ahead of the other. The moves of the two ranks of a pair
correspond one to one, in the same order.

Computations wait as follows:

- R, B and I of an evicted microbatch wait until its LOAD has completed.
- F waits for every EVICT that stands before the computation preceding the F. So an eviction has the time of one
  computation, and after that its memory is free, whatever the timing.
- The forward of a frozen stage saves nothing, so it waits for no move, and does not count as a computation here.

A microbatch counts as saved from the start of its forward, or from the posting of its LOAD or ACCEPT. It counts until
the end of its backward, or until its EVICT or RETURN has completed. So while it moves it counts on both sides.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.pipeline.program.edges import stages_of
from megatron.pipeline.program.instruction import COMPUTATIONS, EVICTIONS, LOADS, MOVES, USES_SAVED, Instruction, Kind


def pair_of(index: int, count: int) -> int:
    """Return the mirror image of `index` among `count` places, with the first and the last place swapped."""
    return count - 1 - index


@dataclass(frozen=True)
class Pairs:
    """The pairs of stages and of ranks. Trained stages are paired from both ends to the middle.

    Attributes:
        rank_of_stage: the rank of each stage.
        num_frozen: the number of frozen stages, which are the first ones.
    """

    rank_of_stage: tuple[int, ...]
    num_frozen: int = 0

    def of_stage(self, stage: int) -> int:
        """Return the pair stage of a stage; the stage itself if it is frozen or in the middle."""
        if stage < self.num_frozen:
            return stage
        return self.num_frozen + pair_of(stage - self.num_frozen, len(self.rank_of_stage) - self.num_frozen)

    def of_rank(self, rank: int) -> int:
        """Return the rank on which the pair stages of a rank's stages live.

        This is the rank itself if its pair stages live there, too, or if all its stages are frozen.

        Raises:
            ValueError: the pair stages live on several ranks.
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
        """Return the other end of a move."""
        return Instruction(move.kind.row.other_end, self.of_stage(move.stage), move.microbatch)

    def refusal(self, stage: int) -> str | None:
        """Return why no activations can move from or to a stage, as part of an error message; None if they can."""
        if stage < self.num_frozen:
            return f"stage {stage} gets no gradients, so it has forwards only and saves nothing that could move"
        if self.rank_of_stage[self.of_stage(stage)] == self.rank_of_stage[stage]:
            return "its pair stage lives on the same rank, so nothing can move"
        return None


class MoveOrder:
    """Finds which moves of its own rank each instruction of a row waits for.

    Call `awaited` once for each instruction, in the order of the row.

    Args:
        num_frozen: the number of frozen stages, which are the first ones.
    """

    def __init__(self, *, num_frozen: int = 0) -> None:
        self._num_frozen = num_frozen
        self._num_moves = 0
        self._num_waited_for = 0
        self._num_to_evict = 0  # moves up to the last EVICT, this EVICT included
        self._num_to_earlier_evict = 0  # moves up to the last EVICT before the last computation
        self._num_to_load: dict[
            tuple[int, int | None], int
        ] = {}  # (stage, microbatch) -> moves up to its LOAD, this LOAD included

    def awaited(self, instruction: Instruction) -> int:
        """Return how many of the first moves of the rank have to be complete before the instruction starts."""
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
        """Return the moves that later instructions may wait for, each as the number of moves after it."""
        needed = (self._num_to_evict, self._num_to_earlier_evict, *self._num_to_load.values())
        return [self._num_moves - each for each in needed if each > self._num_waited_for]


def awaited_moves(row: Iterable[Instruction], *, num_frozen: int = 0) -> dict[int, int]:
    """Map each position of a row that waits for moves to the number of the row's moves that have to be complete.

    Args:
        row: the instructions of a rank.
        num_frozen: as for `MoveOrder`.
    """
    order = MoveOrder(num_frozen=num_frozen)
    awaited = ((position, order.awaited(instruction)) for position, instruction in enumerate(row))
    return {position: needed for position, needed in awaited if needed}
