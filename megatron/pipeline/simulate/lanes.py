"""The lanes between device and host, as `program.lane_order` defines them.

Each rank has one of each kind, which carries out its words one after another: one starts when the rank has posted it,
the one before it is complete, and so is what it waits for. All that is on the same rank, so times become known when the
rank posts a word or one of its reductions is complete.
"""

from collections import deque

from megatron.pipeline.program.instruction import HOST_WORDS, Kind, Lane
from megatron.pipeline.program.lane_order import awaited_in_lanes
from megatron.pipeline.simulate.state import UNKNOWN, SimulationState


class _LaneQueue:
    """A lane of a rank."""

    __slots__ = ("free_at", "posted")

    def __init__(self) -> None:
        self.posted: deque[tuple[float, int]] = deque()  # when posted, position in the row
        self.free_at = 0.0


class SimulatedLanes:
    """The lanes of all ranks. `awaited`: by rank and position, the positions of the row that have to be complete."""

    def __init__(self, state: SimulationState, seconds: dict[Kind, list[float]]) -> None:
        program = state.program
        self._state, self._seconds = state, seconds
        self.awaited = [
            {} if program.residency is None else awaited_in_lanes(row, program.rank_of_stage) for row in state.rows
        ]
        kinds = {kind.row.lane for kind in HOST_WORDS}
        self._queues: list[dict[Lane, _LaneQueue]] = [{lane: _LaneQueue() for lane in kinds} for _ in state.rows]
        self._waits = [False] * len(state.rows)

    def complete_at(self, rank: int, position: int) -> float:
        """When all that a position waits for is complete; `UNKNOWN`: the rank is called when more is known."""
        ends = self._state.ends[rank]
        complete = 0.0
        for awaited in self.awaited[rank].get(position, ()):
            if ends[awaited] == UNKNOWN:
                self._waits[rank] = True
                return UNKNOWN
            complete = max(complete, ends[awaited])
        return complete

    def is_awaited(self, rank: int) -> bool:
        return self._waits[rank]

    def post(self, rank: int, position: int, now: float) -> None:
        lane = self._state.rows[rank][position].kind.row.lane
        self._queues[rank][lane].posted.append((now, position))
        self.advance(rank)

    def advance(self, rank: int) -> None:
        """Carry out what can be; the rank can go on if it waits for any of it."""
        if any([self._carry(rank, queue) for queue in self._queues[rank].values() if queue.posted]):
            if self._waits[rank]:
                self._waits[rank] = False
                self._state.runnable.append(rank)
            self.advance(rank)  # what other lanes waited for

    def _carry(self, rank: int, queue: _LaneQueue) -> bool:
        """Carry out the first words of a lane as far as it is known when; whether there were any."""
        state, row, moved = self._state, self._state.rows[rank], False
        while queue.posted:
            posted, position = queue.posted[0]
            awaited = [state.ends[rank][each] for each in self.awaited[rank].get(position, ())]
            if UNKNOWN in awaited:
                break
            queue.posted.popleft()
            instruction = row[position]
            start = max(posted, queue.free_at, *awaited)
            queue.free_at = end = start + self._seconds[instruction.kind][instruction.stage]
            state.starts[rank][position], state.ends[rank][position] = start, end
            moved = True
        return moved
