"""The reductions behind a STEP, in the background.

The reductions of a rank run one after another, in the order of its row; one starts when all its members have reached it
(norm: every rank; embedding: the ranks that post it; gradients: replicas do the same at the same time, so none is
waited for). One that stands after the STEP of its version serves the report alone and runs in a queue beside, so that
no later STEP waits for it. Tied embeddings on the host are added up once the rank's ends have come there (`lanes`).
"""

from collections import Counter, deque

from megatron.pipeline.program.instruction import SHARED_REDUCTIONS, Kind
from megatron.pipeline.simulate.lanes import SimulatedLanes
from megatron.pipeline.simulate.state import UNKNOWN, SimulationState


class _ReductionQueue:
    """Reductions that a rank runs one after another."""

    __slots__ = ("free_at", "posted", "rank", "reached")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.posted: deque[tuple[float, int]] = deque()  # when posted, position in the row
        self.reached = False  # whether the first of them has joined its collective
        self.free_at = 0.0


class _Reduction:
    """One collective: starts when its last member has reached it."""

    __slots__ = ("duration", "members", "start")

    def __init__(self) -> None:
        self.members: list[tuple[_ReductionQueue, int]] = []  # the queue and the position of those who have reached it
        self.start = 0.0
        self.duration = 0.0


class SimulatedReductions:
    """The reductions of all ranks, and for which version's each rank waits."""

    def __init__(self, state: SimulationState, seconds: dict[Kind, list[float]], lanes: SimulatedLanes) -> None:
        num_ranks = len(state.rows)
        self._state, self._seconds, self._lanes = state, seconds, lanes
        self._chains = [_ReductionQueue(rank) for rank in range(num_ranks)]
        self._reports = [_ReductionQueue(rank) for rank in range(num_ranks)]
        self._stepped: list[set[int | None]] = [set() for _ in range(num_ranks)]
        self._running: dict[tuple[Kind, int | None], _Reduction] = {}
        self._pending: list[Counter[int | None]] = [Counter() for _ in range(num_ranks)]  # version -> not complete
        self._reduced_at: list[dict[int | None, float]] = [{} for _ in range(num_ranks)]
        self._waits = [False] * num_ranks
        updates = (each for row in state.rows for each in row if each.microbatch is None)
        self._num_members = Counter((each.kind, each.version) for each in updates if each.kind in SHARED_REDUCTIONS)

    def complete_at(self, rank: int, version: int | None) -> float:
        """When all that a rank has posted for a version is complete; `UNKNOWN`: the rank is called when it is known."""
        if self._pending[rank][version]:
            self._waits[rank] = True
            return UNKNOWN
        return self._reduced_at[rank].get(version, 0.0)

    def step(self, rank: int, version: int | None) -> None:
        """A rank has stepped to a version."""
        self._stepped[rank].add(version)

    def post(self, rank: int, position: int, now: float) -> None:
        version = self._state.rows[rank][position].version
        queue = (self._reports if version in self._stepped[rank] else self._chains)[rank]
        self._pending[rank][version] += 1
        queue.posted.append((now, position))
        self._advance(queue)

    def _advance(self, queue: _ReductionQueue) -> None:
        """Let the first reduction of a queue join its collective, which completes with its last member.

        Its completion lets the next reductions of all its members' queues join theirs, and so on.
        """
        agenda = [queue]
        while agenda:
            queue = agenda.pop()
            if not queue.posted or queue.reached:
                continue
            posted, position = queue.posted[0]
            instruction = self._state.rows[queue.rank][position]
            key = (instruction.kind, instruction.version)
            num_members = self._num_members.get(key, 1)
            reduction = self._running.setdefault(key, _Reduction()) if num_members > 1 else _Reduction()
            reduction.members.append((queue, position))
            stored = self._lanes.complete_at(queue.rank, position)  # known: it needs reductions before this one alone
            reduction.start = max(reduction.start, posted, queue.free_at, stored)
            reduction.duration = max(reduction.duration, self._seconds[instruction.kind][instruction.stage])
            queue.reached = True
            if len(reduction.members) == num_members:
                self._running.pop(key, None)
                self._complete(reduction)
                agenda += [member for member, _ in reduction.members]

    def _complete(self, reduction: _Reduction) -> None:
        state, end = self._state, reduction.start + reduction.duration
        for queue, position in reduction.members:
            queue.posted.popleft()
            queue.reached, queue.free_at = False, end
            rank = queue.rank
            version = state.rows[rank][position].version
            state.starts[rank][position], state.ends[rank][position] = reduction.start, end
            self._reduced_at[rank][version] = end
            self._pending[rank][version] -= 1
            if self._waits[rank] and not self._pending[rank][version]:
                self._waits[rank] = False
                state.runnable.append(rank)
            self._lanes.advance(rank)
