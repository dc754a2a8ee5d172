"""The full graph, with a node for every word of a program's rows, including transfers and host words."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import ref

from megatron.pipeline.graph.execution import (
    LANES,
    MOVES,
    NOBODY,
    REDUCTIONS,
    START,
    Channel,
    Channels,
    Executed,
    Execution,
    MoveQueue,
    Take,
)
from megatron.pipeline.program.copies import groups_of_copies
from megatron.pipeline.program.instruction import AWAITS_REDUCTIONS, COMPUTATIONS, SEND_OF, Instruction, Kind, Lane
from megatron.pipeline.program.lane_order import awaited_in_lanes, awaited_moves

NOTHING = 0  # the number of the first `Take`, which takes no time

_COMPUTE, _SEND, _RECEIVE, _UPDATE, _KEEP, _MOVE, _REDUCE, _CARRY = range(8)


def _action(kind: Kind) -> int:
    """Return the action of a rank that comes to the word."""
    word = kind.row
    if word.lane is Lane.COMPUTE:
        return _COMPUTE if kind in COMPUTATIONS else _UPDATE if kind in AWAITS_REDUCTIONS else _KEEP
    if word.lane is Lane.TRANSFERS:
        return _SEND if word.sends else _RECEIVE
    return {Lane.MOVES: _MOVE, Lane.CHAIN: _REDUCE}.get(word.lane, _CARRY)


ACTIONS = {kind: _action(kind) for kind in Kind}


class _LaneQueue:
    """A lane of a rank between device and host.

    Attributes:
        posted: for each word that is not yet carried out, the rank's last node before it, and its position.
        last: the node of the word that was carried out last.
    """

    __slots__ = ("last", "posted")

    def __init__(self) -> None:
        self.posted: deque[tuple[int, int]] = deque()
        self.last = START


@dataclass(frozen=True)
class Graph:
    """The full graph of rows.

    Node n waits for the nodes `befores[n]` and `sources[n]`, which both have smaller numbers. `takes_of[n]` says how
    long node n takes. A value of 0 or more is an index of `takes`. The value ~c is a transfer over channel c, which
    also waits for the transfer before it on that channel.

    Attributes:
        takes: the times that nodes take; the first one is no time. The entry of a SEND that holds its rank has the
            number of the channel in place of the stage.
        node_of: for each rank and position, the node of the instruction there.
        last: for each rank, the last node of its row itself, not of its lanes.
        holds: node of a SEND that holds its rank -> microbatch, counted from the program's first.
        channels: all channels, by number.
        moves: for each rank, its moves.
    """

    befores: list[int]
    sources: list[int]
    takes_of: list[int]
    takes: tuple[Take, ...]
    node_of: list[list[int]]
    last: list[int]
    holds: dict[int, int]
    channels: list[Channel]
    moves: list[MoveQueue]


class RowExecution(Execution):
    """The execution that finds the full graph.

    The attributes are those of `Graph`. In `node_of`, `START` means that the instruction is not complete yet.
    """

    def __init__(
        self, executed: Executed, *, overlap: bool = True, moves: Sequence[dict[int, int]] | None = None
    ) -> None:
        rows = executed.rows
        self.executed, self.overlap, self.lengths = executed, overlap, list(map(len, rows))
        updates = (each for row in rows for each in row if each.microbatch is None)
        groups = groups_of_copies(executed.copies, executed.rank_of_stage) if executed.copies else ()
        super().__init__(len(rows), executed.pairs, updates, groups=groups)
        self.befores, self.sources, self.takes_of = [START], [START], [NOTHING]
        self.takes[None, ()] = NOTHING
        self.node_of = [[START] * len(row) for row in rows]
        self.last = [START] * len(rows)
        self.holds: dict[int, int] = {}
        self._moves_known = moves
        self._moves_awaited: list[dict[int, int]] = [{} for _ in rows]
        self._words_awaited: list[dict[int, tuple[int, ...]]] = [{} for _ in rows]
        self._lanes: list[dict[Lane, _LaneQueue]] = [{} for _ in rows]
        self._awaits_lanes = [False] * len(rows)
        self._channels = Channels(executed, self.node_of)
        self.channels = self._channels.all
        self._meanings: dict[Kind, tuple[int, list]] = {}

    def _learn(self, rank: int, position: int, instruction: Instruction) -> tuple[int, list]:
        """Find the action for a kind that is met for the first time, and a list with an entry for each stage.

        The entry of a computation holds the number of its `Take`, the channels that bring its inputs and the channels
        that deliver its outputs; with copies, both by microbatch. The entry of an update is the number of its `Take`.
        The entry of a transfer says where it is posted, by peer. Moves, reductions and host words have an empty list.

        Raises:
            SimulationError: the kind is unknown.
        """
        kind = instruction.kind
        if kind not in ACTIONS:
            raise self.error(rank, position, instruction, f"the simulator does not know {kind.value}")
        action, stages = ACTIONS[kind], range(len(self.executed.rank_of_stage))
        of_stage: list = self._channels.posted.get(kind, [])
        if action == _COMPUTE:
            nothing = [()] * len(stages)
            needed = self._channels.needed.get(kind.row.needs, nothing)
            delivered = self._channels.delivered.get(kind.row.makes, nothing)
            if self._channels.taken:
                needed, delivered = (
                    [self._channels.of_microbatches(stage, of_kind[stage]) for stage in stages]
                    for of_kind in (needed, delivered)
                )
            of_stage = [(self._take(kind, (stage,)), needed[stage], delivered[stage]) for stage in stages]
        elif action in (_UPDATE, _KEEP):
            of_stage = [self._take(kind, (stage,)) for stage in stages]
        self._meanings[kind] = action, of_stage
        return action, of_stage

    # --- nodes

    def _add(self, before: int, take: int, others: Sequence[int] = ()) -> int:
        *joined, source = others or (START,)
        for each in joined:
            before = self._add(before, NOTHING, (each,))
        self.befores.append(before)
        self.sources.append(source)
        self.takes_of.append(take)
        return len(self.befores) - 1

    def _behind(self, node: int, *others: int) -> int:
        """Return a node that ends when the last of these nodes has ended: `node` if it is alone, else a new one."""
        return self._add(node, NOTHING, others) if others else node

    def _place(self, rank: int, position: int, instruction: Instruction, node: int) -> None:
        self.node_of[rank][position] = node
        self._advance(rank)

    def _awaited_words(self, rank: int, position: int) -> tuple[int, ...]:
        return tuple(self._words(rank, position))

    # --- rows

    def _run(self, rank: int) -> Iterator[tuple[int, object]]:
        row, node_of, meanings, runnable = self.executed.rows[rank], self.node_of[rank], self._meanings, self.runnable
        held: set[int] = set()  # positions that wait for moves or host words
        first, limit, holds = self.executed.first_microbatch, sum(self.executed.batches), not self.overlap
        takes_of, moves, by_microbatch = self.takes_of, self._moves_known, bool(self._channels.taken)
        add_before, add_source, add_take = self.befores.append, self.sources.append, takes_of.append
        now, begin = START, 0
        while True:
            border = self.ends[rank]
            for position in range(begin, border):
                instruction = row[position]
                try:
                    action, of_stage = meanings[instruction.kind]
                except KeyError:
                    action, of_stage = self._learn(rank, position, instruction)
                if action <= _RECEIVE:
                    microbatch = instruction.microbatch - first
                    if not 0 <= microbatch < limit:
                        raise self.error(rank, position, instruction, "there is no such microbatch")
                    if action == _COMPUTE:
                        take, needs, makes = of_stage[instruction.stage]
                        if by_microbatch:
                            if microbatch not in needs:
                                raise self.error(rank, position, instruction, "another copy takes this microbatch")
                            needs, makes = needs[microbatch], makes[microbatch]
                        behind: Sequence[int] = ()
                        if held and position in held:
                            while (wait := self._hold_up(rank, position)) is not None:
                                yield position, wait
                            behind = self._held_by(rank, position)
                        source = START
                        for channel in needs:
                            nodes = channel.nodes
                            while not nodes[microbatch]:
                                channel.awaited = microbatch
                                yield position, channel
                            if source:
                                now = self._behind(now, source)
                            source = nodes[microbatch]
                        if behind:
                            *others, source = (source, *behind) if source else behind
                            now = self._behind(now, *others)
                        node_of[position] = made = len(takes_of)
                        add_before(now)
                        add_source(source)
                        add_take(take)
                        now = made
                        for channel in makes:
                            node = made
                            if channel.sender != channel.receiver:
                                node = self._add(now, ~channel.number)
                                if holds:
                                    now = self._hold(now, channel, microbatch)
                            channel.nodes[microbatch] = node
                            if channel.awaited == microbatch:
                                channel.awaited = NOBODY
                                runnable.append(channel.receiver)
                        continue
                    posted = of_stage[instruction.stage].get(instruction.peer)
                    if posted is None:
                        raise self.error(rank, position, instruction, "no channel leads there")
                    channel, own, other, its_node_of = posted
                    if channel.most_unread is not None:
                        if action == _RECEIVE:
                            channel.received.append(now)
                            if channel.sender_waits:
                                channel.sender_waits = False
                                runnable.append(channel.sender)
                        else:
                            awaited = channel.num_sent - channel.most_unread
                            while awaited >= len(channel.received):
                                channel.sender_waits = True
                                yield position, channel
                            channel.num_sent += 1
                            if awaited >= 0:
                                now = self._behind(channel.received[awaited], now)
                    if other:
                        its, there, counterpart = other.popleft()
                        if counterpart != microbatch:
                            reason = f"the other end of the channel has microbatch {counterpart + first} next"
                            raise self.error(rank, position, instruction, reason)
                        node_of[position] = its_node_of[there] = channel.nodes[microbatch] = len(takes_of)
                        sent, received = (now, its) if action == _SEND else (its, now)
                        add_before(sent)
                        add_source(received)
                        add_take(~channel.number)
                        if channel.awaited == microbatch:
                            channel.awaited = NOBODY
                            runnable.append(channel.receiver)
                    else:
                        own.append((now, position, microbatch))
                    if holds and action == _SEND:
                        now = self._hold(now, channel, microbatch)
                elif action == _UPDATE:
                    version = instruction.version
                    while self.pending[rank][version]:
                        self.awaits_reductions[rank] = True
                        yield position, REDUCTIONS
                    node_of[position] = now = self._add(
                        now, of_stage[instruction.stage], tuple(self.reduced[rank].get(version, ()))
                    )
                    if instruction.kind is Kind.STEP:
                        self.stepped[rank].add(version)
                elif action == _KEEP:
                    node_of[position] = now = self._add(now, of_stage[instruction.stage])
                elif action == _REDUCE:
                    self._post(rank, position, instruction, now)
                elif action == _MOVE:
                    if not self.moves[rank].requested:
                        self._moves_awaited[rank] = (
                            awaited_moves(row, num_frozen=self.pairs.num_frozen) if moves is None else moves[rank]
                        )
                        held |= self._moves_awaited[rank].keys()
                    self._request(rank, position, instruction, now)
                else:
                    if not self._lanes[rank]:
                        self._words_awaited[rank] = awaited_in_lanes(row, self.executed.rank_of_stage)
                        held |= self._words_awaited[rank].keys()
                    self._carry(rank, position, instruction, now)
            self.last[rank], begin = now, border
            if border == self.ends[rank]:
                yield border, None

    def _hold(self, now: int, channel: Channel, microbatch: int) -> int:
        """Add and return the node of a SEND that holds its rank."""
        node = self._add(now, self._take(SEND_OF[channel.tensor], (channel.number,)))
        self.holds[node] = microbatch
        return node

    def _hold_up(self, rank: int, position: int) -> str | None:
        """Return `MOVES` or `LANES` if a computation has to wait for moves or host words; None if it need not wait."""
        needed, queue = self._moves_awaited[rank].get(position, 0), self.moves[rank]
        if len(queue.nodes) < needed:
            queue.num_awaited = needed
            return MOVES
        if START in self._words(rank, position):
            self._awaits_lanes[rank] = True
            return LANES
        return None

    def _held_by(self, rank: int, position: int) -> list[int]:
        """Return the nodes of the moves and host words that a computation has waited for."""
        needed = self._moves_awaited[rank].get(position, 0)
        return self.moves[rank].nodes[needed - 1 : needed] * bool(needed) + self._words(rank, position)

    # --- lanes to and from the host

    def _words(self, rank: int, position: int) -> list[int]:
        """Return the nodes of the words that the word at `position` waits for; `START` for an incomplete word."""
        awaited, node_of = self._words_awaited[rank], self.node_of[rank]
        return [node_of[each] for each in awaited.get(position, ())] if awaited else []

    def _carry(self, rank: int, position: int, instruction: Instruction, now: int) -> None:
        """Post a host word to its lane, and carry out all words of the rank's lanes that are ready."""
        lane = self._lanes[rank].setdefault(instruction.kind.row.lane, _LaneQueue())
        lane.posted.append((now, position))
        self._advance(rank)

    def _advance(self, rank: int) -> None:
        """Carry out all words of a rank's lanes that are ready, and wake the rank if it waits for its lanes."""
        row, moved = self.executed.rows[rank], True
        while moved:  # another lane may wait for a word that was just carried out
            moved = False
            for lane in self._lanes[rank].values():
                while lane.posted:
                    now, position = lane.posted[0]
                    words = self._words(rank, position)
                    if START in words:
                        break
                    lane.posted.popleft()
                    take = self._take(row[position].kind, (row[position].stage,))
                    lane.last = self.node_of[rank][position] = self._add(now, take, (*words, lane.last))
                    moved = True
            if moved and self._awaits_lanes[rank]:
                self._awaits_lanes[rank] = False
                self.runnable.append(rank)

    def under_way(self, rank: int) -> list[int]:
        """Return the positions of the host words of a rank that are posted and not complete, ascending."""
        return sorted(position for lane in self._lanes[rank].values() for _, position in lane.posted)

    # --- the end

    def graph(self) -> Graph | None:
        """Execute the rows and return the whole graph.

        Returns None if the rows cannot be executed to their end, or if a transfer, a move or a reduction still waits
        for another member there.
        """
        if self.reach(self.lengths) != self.lengths:
            return None
        self.close()
        queues = (*self.chains, *self.reports, *(lane for lanes in self._lanes for lane in lanes.values()))
        if (
            any(queue.posted for queue in queues)
            or any(channel.sends or channel.receives for channel in self.channels)
            or any(len(queue.nodes) < len(queue.requested) for queue in self.moves)
        ):
            return None
        return Graph(
            self.befores, self.sources, self.takes_of, tuple(self.takes), self.node_of, self.last, self.holds,
            self.channels, self.moves,
        )  # fmt: skip


_kept: list[tuple[ref, bool, Graph]] = []


def forget_graph() -> None:
    """Free the graph that `graph_of` keeps, for a program that lives on but is not simulated again."""
    _kept.clear()


def graph_of(
    executed: Executed,
    *,
    refusal: Callable[[RowExecution], Exception],
    overlap: bool = True,
    moves: Sequence[dict[int, int]] | None = None,
) -> Graph:
    """Return the full graph of a program or a timeline.

    The graph of the last program is kept, so a program that is first proved and then simulated is executed once.

    Args:
        refusal: makes the error to raise if the rows cannot be executed to their end, or if a transfer, a move or a
            reduction still waits for another member there.
        overlap: transfers run beside computations; otherwise a SEND occupies its rank for as long as its channel.
        moves: the `awaited_moves` of each row, if they are known already.

    Raises:
        Exception: the error that `refusal` makes.
        SimulationError: an instruction that no execution can carry out, such as a transfer over no edge.
    """
    for its, its_overlap, graph in _kept:
        if its() is executed and its_overlap == overlap:
            return graph
    execution = RowExecution(executed, overlap=overlap, moves=moves)
    graph = execution.graph()
    if graph is None:
        raise refusal(execution)
    _kept[:] = [(ref(executed, lambda _: _kept.clear()), overlap, graph)]
    return graph
