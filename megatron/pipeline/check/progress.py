"""Proof: the program runs to its end, even where a send completes only once its receive is posted.

The model. A rank executes its row in order. SEND, RECV and REDUCE only post and never block. F waits for its input, B
and I for the gradient of their output, STEP and PREDICT for the reductions of their version before them. A transfer
completes when both ends have posted it and all earlier ones of its channel have completed. A SEND of a forward-only
stage, which no gradient holds up, waits until all but a few of those before it have their receives posted
(`StageGraph.most_unread`). What waits for moves of
saved activations is said in `program.move_order`; a rank and its partner have completed as many as the one of them
that has requested fewer. When a reduction completes is said in `reductions`. Where weights live on the host, what waits
for the lanes to and from it waits for reductions of its own rank in the end (see `lanes`).

Nothing a rank does depends on which other rank was faster: it reads its channels by blocking reads in its own order,
like a process of a Kahn network, and a reduction, too, only waits for all its members. So whether an instruction can
run is monotone in what has been posted, every order of execution ends in the same state, and one execution stands for
all. The proof is that execution, with a list of ranks that can go on: each instruction is executed once, and a rank
that waits is looked at again only when what it waits for happens. If the list runs empty before the rows, the ranks
that are left wait for one another, and the error names the circle.

The transfers are known to pair up in order by then, and every receive to stand before the instruction that needs it; so
a transfer that an F or B waits for is complete as soon as it is sent.
"""

from megatron.pipeline.check.compact import (
    AWAITS,
    FIRST_HOST_WORD,
    FIRST_MOVE,
    FIRST_STASH,
    FIRST_UPDATE,
    NUM_CODES,
    SEND_B,
    B,
    CompactProgram,
    F,
    I,
    Transfer,
)
from megatron.pipeline.check.deadlock import explain_deadlock
from megatron.pipeline.check.lanes import awaited_reductions
from megatron.pipeline.check.reductions import Reductions

NOTHING = -1


def prove_progress(compact: CompactProgram) -> None:
    """Execute the program; prove that every rank reaches the end of its row.

    Args:
        compact: a program whose computations, transfers and updates are proved.

    Raises:
        ProgramError: naming who waits for whom.
    """
    Execution(compact).run([len(codes) for codes in compact.codes])


class Execution:
    """One execution of a program.

    Tensors that computations wait for are numbered: the activations that microbatch i takes over edge e are e * M + i,
    their gradients (E + e) * M + i, where M is the number of microbatches, and E that of edges. Behind them are the
    receives that a SEND of a forward-only stage waits for: for each such edge, of bound u, u that count as posted, and
    then its receives in their order.
    """

    def __init__(self, compact: CompactProgram) -> None:
        num_ranks, num_edges = len(compact.codes), len(compact.program.graph.edges)
        self.compact = compact
        self.position = [0] * num_ranks
        self.ends = [0] * num_ranks
        self.arrived = bytearray(2 * num_edges * compact.num_microbatches)
        self.receives: dict[int, tuple[int, int]] = {}  # edge -> where its receives begin, and how many count as posted
        self.awaited_tensor = [NOTHING] * num_ranks
        self.reductions = Reductions(compact)
        self.num_moves = [0] * num_ranks  # that each rank has requested
        self.awaited_moves = [0] * num_ranks  # how many a rank waits for; 0: it does not
        self._awaited_reductions = [awaited_reductions(compact, rank) for rank in range(num_ranks)]
        self._held = [  # positions that wait for moves, or for lanes
            moves.keys() | reductions.keys()
            for moves, reductions in zip(compact.awaited_moves, self._awaited_reductions, strict=True)
        ]
        self.partners = compact.partners if compact.moves else range(num_ranks)
        self._rank_awaiting: dict[int, int] = {}  # tensor -> rank
        self._bounded: dict[int, int] = {}  # slot of a SEND or RECV over such an edge -> the receive that is its next
        self._waits, self._brings = self._offsets()
        self._runnable: list[int] = []

    def _offsets(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Per slot, what to add to a place for the tensors waited for, and for those brought."""
        compact, width = self.compact, self.compact.num_microbatches
        edges = compact.program.graph.edges
        waits: list[tuple[int, ...]] = [()] * compact.num_slots
        brings: list[tuple[int, ...]] = [()] * compact.num_slots

        def add(table: list[tuple[int, ...]], slot: int, tensor: int, stage: int) -> None:
            table[slot] = (*table[slot], (tensor - stage) * width)

        for number, edge in enumerate(edges):
            source, target, back = edge.source, edge.target, number + len(edges)
            add(waits, target * NUM_CODES + F, number, target)
            for code in (B, I) if edge.gradient else ():
                add(waits, source * NUM_CODES + code, back, source)
            if not compact.crosses(source, target):
                add(brings, source * NUM_CODES + F, number, source)
                for code in (B, I) if edge.gradient else ():
                    add(brings, target * NUM_CODES + code, back, target)
        for slot, transfer in compact.transfers.items() if compact.communicates else ():
            if transfer.is_send:
                tensor = transfer.edge + (len(edges) if transfer.code == SEND_B else 0)
                add(brings, slot, tensor, transfer.stage)
            self._bound(transfer, slot)
        return waits, brings

    def _bound(self, transfer: Transfer, slot: int) -> None:
        """Where the sender is forward-only, the SEND waits for a receive, and the RECV is one."""
        edge = self.compact.program.graph.edges[transfer.edge]
        bound = self.compact.program.graph.most_unread(edge.source)
        if bound is None:
            return
        if transfer.edge not in self.receives:
            self.receives[transfer.edge] = len(self.arrived), bound
            self.arrived += b"\1" * bound + bytes(self.compact.num_microbatches)
        self._bounded[slot] = self.receives[transfer.edge][0] + (0 if transfer.is_send else bound)

    def run(self, ends: list[int]) -> None:
        """Execute each row up to position `ends[rank]`, so that no rank goes beyond before all have come there.

        Raises:
            ProgramError: a rank cannot come there.
        """
        if self.reach(ends) != ends:
            raise explain_deadlock(self)

    def reach(self, ends: list[int]) -> list[int]:
        """Execute each row up to `ends[rank]`, or as far as it comes where all others stop at theirs.

        Returns how far each came. That is the same in whichever order ranks go on, so it is as far as they can.
        """
        self.ends = ends
        self._runnable = list(range(len(ends)))
        while self._runnable:
            self._run_rank(self._runnable.pop())
        return list(self.position)

    def _run_rank(self, rank: int) -> None:
        """Execute a rank's row until it waits or ends."""
        compact, arrived, rank_awaiting, runnable = self.compact, self.arrived, self._rank_awaiting, self._runnable
        codes, places, versions = compact.codes[rank], compact.places[rank], compact.versions[rank]
        slots, waits, brings, bounded = compact.slots[rank], self._waits, self._brings, self._bounded
        self.awaited_tensor[rank] = NOTHING
        held = self._held[rank]
        for position in range(self.position[rank], self.ends[rank]):
            code, place = codes[position], places[position]
            if code < FIRST_UPDATE:
                if code >= FIRST_MOVE:
                    if code < FIRST_STASH:
                        self._request_move(rank)
                    continue
                if held and position in held and self._is_held(rank, position):
                    self.position[rank] = position
                    return
                slot = slots[position]
                for offset in waits[slot]:
                    if not arrived[place + offset]:
                        return self._await(rank, position, place + offset)
                if slot in bounded:
                    receive = bounded[slot]
                    if compact.transfers[slot].is_send and not arrived[receive]:
                        return self._await(rank, position, receive)
                    arrived[receive] = True
                    bounded[slot] += 1
                    if receive in rank_awaiting:
                        runnable.append(rank_awaiting.pop(receive))
                for offset in brings[slot]:
                    arrived[place + offset] = True
                    if place + offset in rank_awaiting:
                        runnable.append(rank_awaiting.pop(place + offset))
            elif code in AWAITS:
                if not self.reductions.is_done(rank, versions[position]):
                    self.position[rank] = position
                    return
            elif code < FIRST_HOST_WORD:
                runnable += self.reductions.post(rank, code, versions[position])
        self.position[rank] = self.ends[rank]

    def _await(self, rank: int, position: int, tensor: int) -> None:
        """The rank waits there for a tensor, or a receive."""
        self.awaited_tensor[rank] = tensor
        self._rank_awaiting[tensor] = rank
        self.position[rank] = position

    def _request_move(self, rank: int) -> None:
        """Request a rank's next move; its partner may go on if it waits for that one."""
        self.num_moves[rank] += 1
        partner = self.partners[rank]
        if 0 < self.awaited_moves[partner] <= self.num_moves[rank]:
            self.awaited_moves[partner] = 0
            self._runnable.append(partner)

    def _is_held(self, rank: int, position: int) -> bool:
        """Whether a computation has to wait for moves, or for the reductions behind what it awaits in its lanes."""
        return self._waits_for_moves(
            rank, self.compact.awaited_moves[rank].get(position, 0)
        ) or not self.reductions.are_done(rank, self._awaited_reductions[rank].get(position, 0))

    def _waits_for_moves(self, rank: int, needed: int) -> bool:
        """Whether the rank has to wait until so many of its moves are complete, all of which it has requested."""
        if self.num_moves[self.partners[rank]] >= needed:
            return False
        self.awaited_moves[rank] = needed
        return True
