"""Who waits for whom, in words, when an execution is stuck.

A rank that cannot go on waits for another rank's row (a tensor that it has not sent, the other end of a move) or for
its own chain of reductions; a chain waits for a member of its running reduction, either for that member's row, where
the reduction is still to be posted, or for that member's chain, where it stands behind another one. What a lane to or
from the host waits for stands before it in the same row, so it waits for the chain in the end. From any of these the
next one follows; the walk ends where it meets itself, in a circle, or at a rank that has nothing left to do before its
border.
"""

from dataclasses import replace

from megatron.pipeline.graph.execution import LANES, MOVES, REDUCTIONS, ReductionQueue
from megatron.pipeline.graph.row_graph import Channel, RowExecution
from megatron.pipeline.program.instruction import RECEIVE_OF, SEND_OF, SHARED_REDUCTIONS, WORDS, Instruction, Kind

_Node = int | ReductionQueue  # what waits: the row of a rank, or reductions
_MAKERS = {word.makes: kind for kind, word in reversed(WORDS.items()) if word.makes}  # the first of each tensor


def explain_deadlock(execution: RowExecution) -> tuple[int, int, str]:
    """A rank that is stuck, its position, and the circle of ranks, or the rank at whose end the waiting stops."""
    node: _Node | None = next(rank for rank, (_, wait) in enumerate(execution.waits) if wait is not None)
    path: list[_Node] = []
    sentences: dict[_Node, str] = {}
    while node is not None and node not in sentences:
        path.append(node)
        is_row = isinstance(node, int)
        sentences[node], node = (_row_waits_for if is_row else _queue_waits_for)(execution, node)
    circle = [] if node is None else path[path.index(node) :]
    told = circle if any(isinstance(each, int) for each in circle) else path
    rank = next(each for each in told if isinstance(each, int))
    return rank, execution.waits[rank][0], "deadlock: " + "; ".join(sentences[each] for each in told)


def _row_waits_for(execution: RowExecution, rank: int) -> tuple[str, _Node | None]:
    """A sentence that says what a row waits for, and the node that has to bring it (None: nobody will)."""
    position, wait = execution.waits[rank]
    if wait is None:
        return f"rank {rank} has executed all that stands before the border", None
    here = f"rank {rank} waits at {execution.executed.rows[rank][position]}"
    if wait == LANES:
        return f"{here}, by its lanes to and from the host, for its chain of reductions", execution.chains[rank]
    if wait == REDUCTIONS:
        return f"{here} for its chain of reductions", execution.chains[rank]
    if wait == MOVES:
        requested, pairs = execution.moves[rank].requested, execution.pairs
        partner = pairs.of_rank(rank)
        _, _, first = requested[len(execution.moves[partner].requested)]
        return f"{here} for {pairs.counterpart(first)} of rank {partner}", partner
    if wait.sender_waits:
        return _send_waits_for(execution, wait, here), wait.receiver
    kind = SEND_OF[wait.tensor] if wait.is_posted else _MAKERS[wait.tensor]
    return f"{here} for {_word(execution, wait, kind, wait.awaited)} of rank {wait.sender}", wait.sender


def _send_waits_for(execution: RowExecution, channel: Channel, here: str) -> str:
    """The receive without which a forward-only stage would have too much unread."""
    kind, graph = RECEIVE_OF[channel.tensor], execution.executed.graph
    receives = [
        each.microbatch
        for each in execution.executed.rows[channel.receiver]
        if each.kind is kind and each.stage == channel.taker and graph.peer_of(each) == channel.maker
    ]
    awaited = receives[channel.num_sent - channel.most_unread] - execution.executed.first_microbatch
    word = _word(execution, channel, kind, awaited)
    return f"{here}, with {channel.most_unread} sent and unread, for {word} of rank {channel.receiver}"


def _word(execution: RowExecution, channel: Channel, kind: Kind, microbatch: int) -> str:
    """The text of a word at one end of a channel, for a microbatch counted from the program's first."""
    at_maker = kind is not RECEIVE_OF[channel.tensor]
    stage, peer = (channel.maker, channel.taker) if at_maker else (channel.taker, channel.maker)
    word = Instruction(kind, stage, execution.executed.first_microbatch + microbatch)
    return str(replace(word, peer=execution.executed.graph.named_peer(word, peer)) if kind.row.other_end else word)


def _queue_waits_for(execution: RowExecution, queue: ReductionQueue) -> tuple[str, _Node | None]:
    running = _first_of(queue)
    for rank in _members(execution, queue, running):
        queues = (execution.chains[rank], execution.reports[rank])
        member = next((each for each in queues if running in map(_key, each.posted)), None)
        here = f"{_text(running)} of rank {queue.rank} waits for rank {rank}"
        if member is None:
            return f"{here}, which has not posted it", rank
        if not (member.joined and _first_of(member) == running):
            return f"{here}, where it stands behind {_text(_first_of(member))}", member
    raise AssertionError("a reduction that all members have joined is complete")


def _members(execution: RowExecution, queue: ReductionQueue, running: tuple[Kind, int | None]) -> list[int]:
    """The ranks that take part in a reduction of a queue."""
    if running[0] not in SHARED_REDUCTIONS:
        return [queue.rank]
    rows = enumerate(execution.executed.rows)
    return [rank for rank, row in rows if any((each.kind, each.version) == running for each in row)]


def _first_of(queue: ReductionQueue) -> tuple[Kind, int | None]:
    return _key(queue.posted[0])


def _key(posted: tuple[int, int, Instruction]) -> tuple[Kind, int | None]:
    return posted[2].kind, posted[2].version


def _text(reduction: tuple[Kind, int | None]) -> str:
    kind, version = reduction
    return f"{kind.value}@{version}"
