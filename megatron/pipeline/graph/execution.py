"""One execution of rows, without times: in which order they can be carried out, and who waits for whom."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from megatron.pipeline.program.instruction import OWN_MOVES, SHARED_REDUCTIONS, Instruction, Kind
from megatron.pipeline.program.move_order import Pairs

START = 0  # the node before all others, at time 0

Take = tuple[Kind, tuple[int, ...]]
"""What a node takes: the time of a kind at these stages, the sum, or of a reduction that ranks share the longest."""


MOVES, LANES, REDUCTIONS = "moves", "lanes", "reductions"
"""What a rank waits for, where it is no tensor."""


class SimulationError(ValueError):
    """A program cannot be executed to its end."""


class MoveQueue:
    """The moves of a rank, in order.

    Attributes:
        requested: of each, the node behind which the rank requested it, its position in the row, and the move.
        nodes: of those that are complete.
        num_awaited: how many have to be complete before the rank goes on; 0: it does not wait.
    """

    __slots__ = ("nodes", "num_awaited", "requested")

    def __init__(self) -> None:
        self.requested: list[tuple[int, int, Instruction]] = []
        self.nodes: list[int] = []
        self.num_awaited = 0


class ReductionQueue:
    """Reductions that a rank runs one after another.

    Attributes:
        posted: of those that are not complete, the node behind which they are posted, their position, the reduction.
        joined: whether the first of them has joined its collective.
        last: the node of the one before.
    """

    __slots__ = ("joined", "last", "posted", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.posted: deque[tuple[int, int, Instruction]] = deque()
        self.joined = False
        self.last = START


class Execution(ABC):
    """One execution of the rows of all ranks, each until it waits for a node that is not known yet.

    A subclass goes through the rows (`_run`) and keeps the nodes (`_add`). Moves and reductions are the same for all.

    A rank carries out its moves one after another (see `program.move_order`), and a move is complete when both ranks of
    the pair have come to it. It carries out its reductions one after another, too, in the order of its row; one starts
    when all its members have reached it (norm: every rank; embeddings: the ranks that post it; gradients: replicas run
    the same program, so none is waited for). A reduction that stands after the STEP of its version serves the report
    alone. It has a queue beside the chain: in the same one, the gradients of the next microbatch would stand behind it
    until the first stage has ended the microbatch before.

    Attributes:
        waits: of each rank, its position, and what it waits for there; None: it has come to its border.
        chains, reports: the reductions of each rank, and those that serve the report.
    """

    def __init__(self, num_ranks: int, pairs: Pairs, updates: Iterable[Instruction]) -> None:
        """`updates`: the instructions of all rows that update, at least those that reduce over several ranks."""
        ranks = range(num_ranks)
        self.pairs, self.takes = pairs, {}
        self.moves = [MoveQueue() for _ in ranks]
        self._partners: dict[int, tuple[int, int]] = {}  # of a stage, the rank of its pair stage, and that stage
        self.chains = [ReductionQueue(rank) for rank in ranks]
        self.reports = [ReductionQueue(rank) for rank in ranks]
        self.pending: list[dict[int | None, int]] = [defaultdict(int) for _ in ranks]  # version -> reductions to come
        self.reduced: list[dict[int | None, list[int]]] = [{} for _ in ranks]  # version -> those that are
        self.stepped: list[set[int | None]] = [set() for _ in ranks]
        self.awaits_reductions = [False] * num_ranks
        self._running: dict[tuple[Kind, int | None], list[ReductionQueue]] = {}
        self._num_members: dict[tuple[Kind, int | None], int] = defaultdict(int)
        for each in updates:
            if each.kind in SHARED_REDUCTIONS:
                self._num_members[each.kind, each.version] += 1
        self.runnable: list[int] = []
        self.waits: list[tuple[int, object]] = [(0, None)] * num_ranks
        self.ends = [0] * num_ranks
        self._runs = [self._run(rank) for rank in ranks]

    def reach(self, ends: Sequence[int]) -> list[int]:
        """Execute each row up to `ends[rank]`, or as far as it comes where all others stop at theirs.

        Returns how far each came. That is the same in whichever order ranks go on, so it is as far as they can.
        """
        self.ends[:] = ends
        runnable, waits, runs = self.runnable, self.waits, self._runs
        runnable += range(len(runs) - 1, -1, -1)
        while runnable:
            rank = runnable.pop()
            waits[rank] = next(runs[rank])
        return [position for position, _ in waits]

    def close(self) -> None:
        """Forget how to go on, so that nothing keeps the execution but those who hold it."""
        self._runs.clear()

    # --- the form

    @abstractmethod
    def _run(self, rank: int) -> Iterator[tuple[int, object]]:
        """Go through a row. Yields a position, and what the rank waits for there, or None at the rank's border."""

    @abstractmethod
    def _add(self, before: int, take: int, others: tuple[int, ...]) -> int:
        """A node behind these; returns its number."""

    @abstractmethod
    def _place(self, rank: int, position: int, instruction: Instruction, node: int) -> None:
        """A move or a reduction of a rank is this node."""

    def _stages_of(self, reduction: Instruction) -> tuple[int, ...]:
        """The stages of whose times a reduction of one rank takes."""
        return (reduction.stage,)

    def _awaited_words(self, rank: int, position: int) -> tuple[int, ...]:
        """The words of lanes that a reduction waits for."""
        return ()

    def _take(self, kind: Kind, stages: tuple[int, ...]) -> int:
        """The number of what a node takes."""
        return self.takes.setdefault((kind, stages), len(self.takes))

    # --- moves

    def _request(self, rank: int, position: int, move: Instruction, now: int) -> None:
        """Request a move, and carry it out if both ends have requested it; who waits for it can go on."""
        if move.stage not in self._partners:
            if refusal := self.pairs.refusal(move.stage):
                raise self.error(rank, position, move, refusal)
            pair = self.pairs.of_stage(move.stage)
            self._partners[move.stage] = self.pairs.rank_of_stage[pair], pair
        partner, pair = self._partners[move.stage]
        own, other = self.moves[rank], self.moves[partner]
        own.requested.append((now, position, move))
        nth = len(own.nodes)
        if len(other.requested) == nth:
            return
        there, its_position, its_move = other.requested[nth]
        if (its_move.kind, its_move.stage, its_move.microbatch) != (move.kind.row.other_end, pair, move.microbatch):
            wanted = self.pairs.counterpart(move)
            raise self.error(rank, position, move, f"move {nth} of rank {partner} is {its_move}, not {wanted}")
        named = move if move.kind in OWN_MOVES else its_move
        behind = (now, there, own.nodes[-1]) if nth else (now, there)
        node = self._add(behind[0], self._take(named.kind, (named.stage,)), behind[1:])
        for each, place, its, queue in (rank, position, move, own), (partner, its_position, its_move, other):
            queue.nodes.append(node)
            self._place(each, place, its, node)
            if 0 < queue.num_awaited <= len(queue.nodes):
                queue.num_awaited = 0
                self.runnable.append(each)

    def error(self, rank: int, position: int, instruction: Instruction, reason: str) -> SimulationError:
        return SimulationError(f"rank {rank}, position {position}, {instruction}: {reason}")

    # --- reductions

    def _post(self, rank: int, position: int, reduction: Instruction, now: int) -> None:
        """Post a reduction, and run what can run; who waits for it can go on."""
        version = reduction.version
        queue = (self.reports if version in self.stepped[rank] else self.chains)[rank]
        self.pending[rank][version] += 1
        queue.posted.append((now, position, reduction))
        agenda = [queue]
        while agenda:  # what one completes lets the next of all its members join theirs
            queue = agenda.pop()
            if not queue.posted or queue.joined:
                continue
            _, _, first = queue.posted[0]
            key = first.kind, first.version
            num_members = self._num_members.get(key, 1)
            members = self._running.setdefault(key, []) if num_members > 1 else []
            members.append(queue)
            queue.joined = True
            if len(members) == num_members:
                self._running.pop(key, None)
                self._complete(sorted(members, key=lambda each: each.rank))
                agenda += members

    def _complete(self, members: Sequence[ReductionQueue]) -> None:
        found = [queue.posted.popleft() for queue in members]
        _, _, first = found[0]
        if first.kind in SHARED_REDUCTIONS:
            stages = tuple(sorted(each.stage for _, _, each in found))
        else:
            stages = self._stages_of(first)
        behind = dict.fromkeys(
            each
            for queue, (posted, position, _) in zip(members, found, strict=True)
            for each in (posted, *self._awaited_words(queue.rank, position), queue.last)
        )
        before, *others = behind
        node = self._add(before, self._take(first.kind, stages), tuple(others))
        for queue, (_, position, reduction) in zip(members, found, strict=True):
            rank, version = queue.rank, reduction.version
            queue.joined, queue.last = False, node
            self.reduced[rank].setdefault(version, []).append(node)
            self.pending[rank][version] -= 1
            self._place(rank, position, reduction, node)
            if self.awaits_reductions[rank] and not self.pending[rank][version]:
                self.awaits_reductions[rank] = False
                self.runnable.append(rank)
