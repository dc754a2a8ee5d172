"""One execution of rows without times, which finds an order of execution and who waits for whom; and its channels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from megatron.pipeline.program.copies import Copy, taken_of
from megatron.pipeline.program.edges import StageGraph
from megatron.pipeline.program.instruction import (
    OF_REPLICAS,
    OWN_MOVES,
    RECEIVE_OF,
    RECEIVES,
    SEND_OF,
    SENDS,
    SHARED_REDUCTIONS,
    Instruction,
    Kind,
    Tensor,
)
from megatron.pipeline.program.lane_order import Pairs

NOBODY = -1


class Executed(Protocol):
    """Anything with rows: a program, or the timeline of a program."""

    rows: Sequence[Sequence[Instruction]]
    rank_of_stage: Sequence[int]
    batches: Sequence[int]
    first_microbatch: int
    copies: Sequence[Copy]
    graph: StageGraph
    pairs: Pairs


class Channel:
    """One direction of an edge, for one kind of tensor. A channel pairs the k-th send with the k-th receive.

    Attributes:
        number: index among the channels.
        tensor: the kind of tensor that the channel carries.
        edge: index of the edge.
        maker, taker: the stages that send and receive the tensor.
        sender, receiver: the ranks of these stages.
        nodes: for each microbatch, counted from the program's first, the node at whose end the tensor has arrived;
            `START`: not known yet.
        sends, receives: posted ends whose other end is not yet posted; for each, the rank's last node before it, its
            position and its microbatch.
        most_unread: the largest number of sends whose receives are not yet posted; further sends wait. None: no bound.
        num_sent, received: with such a bound, the number of posted sends, and for each posted receive the receiving
            rank's last node before it.
        awaited: the microbatch that the receiving rank waits for, or `NOBODY`.
        sender_waits: whether the sending rank waits for a receive.
        is_posted: whether the rows contain the transfers as words; otherwise each tensor is sent as soon as it is made.
    """

    __slots__ = (
        "awaited", "edge", "is_posted", "maker", "most_unread", "nodes", "num_sent", "number", "received", "receiver",
        "receives", "sender", "sender_waits", "sends", "taker", "tensor",
    )  # fmt: skip

    def __init__(self, number: int, tensor: Tensor, edge: int, ends: tuple[int, int], executed: Executed) -> None:
        self.number, self.tensor, self.edge = number, tensor, edge
        self.maker, self.taker = ends
        self.sender, self.receiver = executed.rank_of_stage[self.maker], executed.rank_of_stage[self.taker]
        self.nodes = [START] * sum(executed.batches)
        self.sends: deque[tuple[int, int, int]] = deque()
        self.receives: deque[tuple[int, int, int]] = deque()
        self.most_unread: int | None = None
        self.num_sent = 0
        self.received: list[int] = []
        self.awaited = NOBODY
        self.sender_waits = self.is_posted = False

    @property
    def crosses(self) -> bool:
        """Whether the channel connects two different ranks."""
        return self.sender != self.receiver


Posted = tuple[Channel, deque, deque, list[int]]
"""Where an instruction posts a transfer: channel, waiting ends of this side and of the other, the other's `node_of`."""


class Channels:
    """All channels of rows, and the tables that find them.

    Attributes:
        all: the channels, by number.
        needed: tensor -> for each stage, the channels that bring the tensor to the stage.
        posted: kind of transfer -> for each stage, the peer that the instruction names -> where the transfer is posted.
        delivered: tensor -> for each stage, the channels that carry the tensor without a word in the rows. These are
            the channels within a rank, and all channels of a program without transfers.
        taken: for each stage, the microbatches that it takes, counted from the program's first; empty: every stage
            takes all. With copies, a channel carries the microbatches that both its ends take (`of_microbatches`).
    """

    def __init__(self, executed: Executed, node_of: list[list[int]]) -> None:
        kinds, num_stages, graph = SENDS | RECEIVES, len(executed.rank_of_stage), executed.graph
        self.all: list[Channel] = []
        self.taken = taken_of(executed.copies, executed.batches)
        self.needed, self.delivered = ({tensor: [()] * num_stages for tensor in Tensor} for _ in range(2))
        self.posted: dict[Kind, list[dict[int | None, Posted]]] = {
            kind: [{} for _ in range(num_stages)] for kind in kinds
        }
        transfers = any(instruction.kind in kinds for row in executed.rows for instruction in row)
        for number, edge in enumerate(graph.edges):
            ways = ((Tensor.ACTIVATION, (edge.source, edge.target)), (Tensor.GRADIENT, (edge.target, edge.source)))
            for tensor, ends in ways[: 1 + edge.gradient]:
                channel = Channel(len(self.all), tensor, number, ends, executed)
                maker, taker = ends
                self.all.append(channel)
                self.needed[tensor][taker] += (channel,)
                channel.is_posted = transfers and channel.crosses
                if not channel.is_posted:
                    self.delivered[tensor][maker] += (channel,)
                    continue
                if not edge.gradient:  # only such an edge may come from a forward-only stage
                    channel.most_unread = graph.most_unread(maker)
                at_maker = (channel, channel.sends, channel.receives, node_of[channel.receiver])
                at_taker = (channel, channel.receives, channel.sends, node_of[channel.sender])
                for kind, stage, peer, peers, posted in (
                    (SEND_OF[tensor], maker, taker, graph.takers(tensor, maker), at_maker),
                    (RECEIVE_OF[tensor], taker, maker, graph.makers(tensor, taker), at_taker),
                ):
                    self.posted[kind][stage][peer] = posted
                    if len(peers) == 1:  # an instruction need not name an only peer
                        self.posted[kind][stage][None] = posted

    def of_microbatches(self, stage: int, channels: Iterable[Channel]) -> dict[int, tuple[Channel, ...]]:
        """Return, for each microbatch that `stage` takes, those of `channels` that carry the microbatch."""
        found: dict[int, tuple[Channel, ...]] = dict.fromkeys(self.taken[stage], ())
        for channel in channels:
            for microbatch in self.taken[channel.maker] & self.taken[channel.taker]:
                found[microbatch] += (channel,)
        return found


START = 0  # the node that all others stand behind, at time 0

Take = tuple[Kind, tuple[int, ...]]
"""The time of a node, as a kind and stages: the sum of the kind's times at these stages.

For a reduction that ranks share, it is the longest of these times."""


MOVES, LANES, REDUCTIONS = "moves", "lanes", "reductions"
"""The names of what a rank waits for; a rank that waits for a tensor has its `Channel` instead."""


ReductionKey = tuple[Kind, int | None, int | None]
"""The key that all members of a reduction share: kind, version, and with copies the group of a gradient reduction."""


class SimulationError(ValueError):
    """A program cannot be executed to its end."""


class MoveQueue:
    """The moves of a rank, in order.

    Attributes:
        requested: for each move, the rank's last node before the request, the position in the row, and the move.
        nodes: the nodes of the completed moves.
        num_awaited: the number of moves that have to be complete before the rank goes on; 0: the rank does not wait.
    """

    __slots__ = ("nodes", "num_awaited", "requested")

    def __init__(self) -> None:
        self.requested: list[tuple[int, int, Instruction]] = []
        self.nodes: list[int] = []
        self.num_awaited = 0


class ReductionQueue:
    """Reductions that a rank runs one after another.

    Attributes:
        posted: for each incomplete reduction, the rank's last node before it, the position in the row, and the
            reduction.
        joined: whether the rank has joined the first of these.
        last: the node of the last completed reduction.
    """

    __slots__ = ("joined", "last", "posted", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.posted: deque[tuple[int, int, Instruction]] = deque()
        self.joined = False
        self.last = START


class Execution(ABC):
    """One execution of the rows of all ranks. Each rank runs until it waits for a node that does not exist yet.

    A subclass goes through the rows (`_run`) and keeps the nodes (`_add`). This class carries out moves and reductions.

    A rank carries out its moves one after another (see `program.lane_order`). A move is complete when both ranks of the
    pair have reached it. A rank carries out its reductions one after another, too, in the order of its row. A reduction
    starts when all of its members have reached it. The members of a norm reduction are all ranks, and those of an
    embedding reduction are the ranks that post it. A gradient reduction waits for no other rank, because the replicas
    run the same program. Where stages are copies, the replicas are in this program, and the members of a gradient
    reduction are the ranks that hold copies of the same stages of the model.

    A reduction that stands after the STEP of its version serves only the report, or a VALIDATE. Such a reduction has a
    queue of its own, beside the chain. In the chain it would hold up the gradients of the next microbatch until the
    first stage has finished the microbatch before.

    Attributes:
        waits: for each rank, its position and what it waits for there; None: it has reached its border.
        chains, reports: for each rank, the queue of reductions before their STEP, and the queue of those after it.
    """

    def __init__(
        self, num_ranks: int, pairs: Pairs, updates: Iterable[Instruction], *, groups: Sequence[int] = ()
    ) -> None:
        """Set up an execution.

        Args:
            num_ranks: the number of rows.
            pairs: the ranks between which activations move.
            updates: at least the reductions of all rows whose members are several ranks; others are ignored.
            groups: with copies, for each stage the number of its rank's group (`groups_of_copies`).
        """
        ranks = range(num_ranks)
        self.pairs, self.takes, self._groups = pairs, {}, groups
        self.moves = [MoveQueue() for _ in ranks]
        self._partners: dict[int, tuple[int, int]] = {}  # stage -> rank of its pair stage, pair stage
        self.chains = [ReductionQueue(rank) for rank in ranks]
        self.reports = [ReductionQueue(rank) for rank in ranks]
        self.pending: list[dict[int | None, int]] = [defaultdict(int) for _ in ranks]  # version -> number incomplete
        self.reduced: list[dict[int | None, list[int]]] = [{} for _ in ranks]  # version -> nodes of completed ones
        self.stepped: list[set[int | None]] = [set() for _ in ranks]
        self.awaits_reductions = [False] * num_ranks
        self._running: dict[ReductionKey, list[ReductionQueue]] = {}
        self._num_members: dict[ReductionKey, int] = defaultdict(int)
        for each in updates:
            if self.is_shared(each):
                self._num_members[self.key_of(each)] += 1
        self.runnable: list[int] = []
        self.waits: list[tuple[int, object]] = [(0, None)] * num_ranks
        self.ends = [0] * num_ranks
        self._runs = [self._run(rank) for rank in ranks]

    def reach(self, ends: Sequence[int]) -> list[int]:
        """Execute each row up to `ends[rank]`, or as far as it can go while the other rows stop at their own ends.

        Returns the position that each rank has reached. The positions do not depend on the order in which ranks go on.
        """
        self.ends[:] = ends
        runnable, waits, runs = self.runnable, self.waits, self._runs
        runnable += range(len(runs) - 1, -1, -1)
        while runnable:
            rank = runnable.pop()
            waits[rank] = next(runs[rank])
        return [position for position, _ in waits]

    def close(self) -> None:
        """Drop the suspended runs of the rows, which refer back to this execution. `reach` cannot be called again."""
        self._runs.clear()

    # --- for subclasses

    @abstractmethod
    def _run(self, rank: int) -> Iterator[tuple[int, object]]:
        """Go through a row; yield a position and what the rank waits for there, None at the rank's border."""

    @abstractmethod
    def _add(self, before: int, take: int, others: tuple[int, ...]) -> int:
        """Add a node that waits for `before` and `others`, and return its number."""

    @abstractmethod
    def _place(self, rank: int, position: int, instruction: Instruction, node: int) -> None:
        """Record the node of a move or a reduction of a rank."""

    def _stages_of(self, reduction: Instruction) -> tuple[int, ...]:
        """Return the stages whose times a reduction of a single rank takes."""
        return (reduction.stage,)

    def _awaited_words(self, rank: int, position: int) -> tuple[int, ...]:
        """Return the nodes of the host words that a reduction waits for."""
        return ()

    def _take(self, kind: Kind, stages: tuple[int, ...]) -> int:
        """Return the number of a `Take`; a new one gets the next number."""
        return self.takes.setdefault((kind, stages), len(self.takes))

    # --- moves

    def _request(self, rank: int, position: int, move: Instruction, now: int) -> None:
        """Request a move. If both ends have requested it, carry it out and wake the ranks that wait for it.

        Raises:
            SimulationError: the stage has no pair on another rank, or the next moves of the two ranks do not match.
        """
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

    def is_shared(self, update: Instruction) -> bool:
        """Whether ranks wait for each other in a reduction."""
        return update.kind in SHARED_REDUCTIONS or (bool(self._groups) and update.kind in OF_REPLICAS)

    def key_of(self, reduction: Instruction) -> ReductionKey:
        """Return the key that all members of a reduction share."""
        shares = self._groups and reduction.kind in OF_REPLICAS
        return reduction.kind, reduction.version, self._groups[reduction.stage] if shares else None

    def _post(self, rank: int, position: int, reduction: Instruction, now: int) -> None:
        """Post a reduction, run all reductions that can run now, and wake the ranks that wait for them."""
        version = reduction.version
        queue = (self.reports if version in self.stepped[rank] else self.chains)[rank]
        self.pending[rank][version] += 1
        queue.posted.append((now, position, reduction))
        agenda = [queue]
        while agenda:  # a completed reduction lets each of its members join its next one
            queue = agenda.pop()
            if not queue.posted or queue.joined:
                continue
            _, _, first = queue.posted[0]
            key = self.key_of(first)
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
        stages = tuple(sorted(each.stage for _, _, each in found)) if self.is_shared(first) else self._stages_of(first)
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
