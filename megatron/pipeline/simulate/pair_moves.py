"""Moves of saved activations between the ranks of a pair, as `program.move_order` defines them."""

from operator import attrgetter

from megatron.pipeline.program.instruction import MOVES, OWN_MOVES, Instruction, Kind
from megatron.pipeline.program.move_order import awaited_moves
from megatron.pipeline.simulate.state import UNKNOWN, SimulationState


class _RankMoves:
    """The moves of a rank, in order: those that it has requested, and when each one was complete."""

    __slots__ = ("awaited", "ends", "requested")

    def __init__(self) -> None:
        self.requested: list[tuple[float, int]] = []  # when, position in the row
        self.ends: list[float] = []
        self.awaited = 0  # how many have to be complete before the rank goes on; 0: it does not wait

    def posted(self, nth: int) -> float:
        """When the queue comes to a move: it is requested, and the one before it is complete."""
        return max(self.requested[nth][0], self.ends[nth - 1] if nth else 0.0)


class PairMoves:
    """The queues of all ranks. `awaited`: by rank and position, how many of the rank's moves have to be complete."""

    def __init__(self, state: SimulationState, seconds: dict[Kind, list[float]]) -> None:
        self._state, self._seconds = state, seconds
        self._queues = [_RankMoves() for _ in state.rows]
        self._pairs = state.program.pairs
        num_frozen = self._pairs.num_frozen
        self.awaited = [
            {} if MOVES.isdisjoint(map(attrgetter("kind"), row)) else awaited_moves(row, num_frozen=num_frozen)
            for row in state.rows
        ]

    def complete_at(self, rank: int, needed: int) -> float:
        """When the first `needed` moves of a rank are complete; `UNKNOWN`: the rank is called when that is known."""
        if not needed:
            return 0.0
        queue = self._queues[rank]
        if len(queue.ends) < needed:
            queue.awaited = needed
            return UNKNOWN
        return queue.ends[needed - 1]

    def is_awaited(self, rank: int) -> bool:
        return bool(self._queues[rank].awaited)

    def request(self, rank: int, position: int, now: float) -> None:
        """Request a move, and carry it out if both ends have requested it; who waits for it can go on."""
        state = self._state
        own, partner = self._queues[rank], self._partner(rank, position)
        own.requested.append((now, position))
        pair, queues = (rank, partner), (own, self._queues[partner])
        nth = len(own.ends)
        if any(len(queue.requested) == nth for queue in queues):
            return
        places = [queue.requested[nth][1] for queue in queues]
        move, other = (state.rows[each][place] for each, place in zip(pair, places, strict=True))
        wanted = self._pairs.counterpart(move)
        if (other.kind, other.stage, other.microbatch) != (wanted.kind, wanted.stage, wanted.microbatch):
            raise state.error(rank, places[0], f"move {nth} of rank {partner} is {other}, not {wanted}")
        posted = [queue.posted(nth) for queue in queues]
        end = max(posted) + self._duration(move, other)
        for each, queue, place, start in zip(pair, queues, places, posted, strict=True):
            state.starts[each][place], state.ends[each][place] = start, end
            queue.ends.append(end)
            if 0 < queue.awaited <= len(queue.ends):
                queue.awaited = 0
                state.runnable.append(each)

    def _duration(self, move: Instruction, other: Instruction) -> float:
        named = move if move.kind in OWN_MOVES else other
        return self._seconds[named.kind][named.stage]

    def _partner(self, rank: int, position: int) -> int:
        stage = self._state.rows[rank][position].stage
        if refusal := self._pairs.refusal(stage):
            raise self._state.error(rank, position, refusal)
        return self._pairs.rank_of_stage[self._pairs.of_stage(stage)]
