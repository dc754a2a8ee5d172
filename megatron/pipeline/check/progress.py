"""Proof: sends and receives pair up, and the program runs to its end.

It does so even if a send completes only once its receive is posted.

The proof of progress is the execution that finds the graph of waits (`megatron.pipeline.graph`). An instruction that
can run stays able to run while others are posted, so every order of execution ends in the same state, and one execution
stands for all. If it stops before the ends of the rows, the remaining ranks wait for one another, and the error names
the circle.

**Transfers.** A channel is an edge between two stages and one kind of traffic, activations or gradients. It carries no
tags: the n-th tensor sent is the n-th received. The proof of computations shows that every transfer is posted exactly
once at each end. This proof shows that the two ends of each channel list the same microbatches in the same order.
Otherwise a stage would compute on another microbatch's data without any error.

**The explanation of a deadlock** says in words who waits for whom.

A stuck rank waits for the row of another rank (for a tensor that is not yet sent, or for the other end of a move) or
for its own chain of reductions. A chain waits for a member of its first reduction. It waits for the member's row if
that row has yet to post the reduction, and for the member's chain if the reduction stands there behind another
reduction. Everything that a host lane waits for stands earlier in the same row, so a stuck lane waits for the chain in
the end.

The explanation walks from each waiting row or chain to what it waits for. The walk ends at a place that it has visited
before, which closes a circle, or at a rank that has reached its border.
"""

from dataclasses import replace

from megatron.pipeline.check.compact import CompactProgram
from megatron.pipeline.graph.execution import LANES, MOVES, REDUCTIONS, Channel, ReductionQueue
from megatron.pipeline.graph.row_graph import RowExecution, graph_of
from megatron.pipeline.program.instruction import RECEIVE_OF, SEND_OF, WORDS, Instruction, Kind

Ends = tuple[int, int, int]  # of a channel: code of the send, sending stage, receiving stage


def prove_transfers(compact: CompactProgram) -> None:
    """Prove that the two ends of every channel list the same microbatches in the same order.

    Raises:
        ProgramError: for the first receive that would get another microbatch's tensor.
    """
    sent, received = list_channels(compact, [len(codes) for codes in compact.codes])
    for channel, microbatches in received.items():
        if microbatches != sent.get(channel):
            _raise_mismatch(compact, channel, sent.get(channel, []), microbatches)


def list_channels(compact: CompactProgram, ends: list[int]) -> tuple[dict[Ends, list[int]], dict[Ends, list[int]]]:
    """The microbatches that each channel sends and receives in the first `ends[rank]` instructions of each row.

    Returns (sent, received), each channel -> microbatches, counted from the program's first microbatch.
    """
    num_microbatches = compact.num_microbatches
    sent: dict[Ends, list[int]] = {}
    received: dict[Ends, list[int]] = {}
    lists = {
        slot: (sent if transfer.is_send else received).setdefault(transfer.channel, [])
        for slot, transfer in compact.transfers.items()
    }
    for slots, places, end in zip(compact.slots, compact.places, ends, strict=True):
        for slot, place in zip(slots[:end], places[:end], strict=True):
            if slot in lists:
                lists[slot].append(place % num_microbatches)
    return sent, received


def _raise_mismatch(compact: CompactProgram, channel: Ends, sent: list[int], received: list[int]) -> None:
    send, sender, receiver = channel
    nth = next(nth for nth, pair in enumerate(zip(sent, received, strict=True)) if pair[0] != pair[1])
    expected = compact.word(send, sender * compact.num_microbatches + sent[nth], receiver)
    reason = (
        f"receive {nth} on the channel from stage {sender} would get what send {nth} there sends, which is {expected}"
    )
    raise compact.error(*compact.receive(channel, received[nth]), reason)


def prove_progress(compact: CompactProgram) -> None:
    """Prove that every rank reaches the end of its row, by executing the program.

    Args:
        compact: a program whose computations, transfers and updates are proved.

    Raises:
        ProgramError: for a deadlock; the message names the circle of waits.
    """
    graph_of(
        compact.program,
        refusal=lambda execution: compact.error(*explain_deadlock(execution)),
        moves=compact.awaited_moves,
    )


def run(execution: RowExecution, compact: CompactProgram, ends: list[int]) -> None:
    """Execute each row up to position `ends[rank]`, where every rank stops.

    Raises:
        ProgramError: if a rank cannot reach its position.
    """
    if execution.reach(ends) != ends:
        raise compact.error(*explain_deadlock(execution))


_Node = int | ReductionQueue  # what waits: the row of a rank, or a queue of reductions
_MAKERS = {word.makes: kind for kind, word in reversed(WORDS.items()) if word.makes}  # tensor -> first kind making it


def explain_deadlock(execution: RowExecution) -> tuple[int, int, str]:
    """Return a stuck rank, its position in its row, and the explanation.

    The explanation names the members of the circle. Without a circle, or with no rank in it, the whole path is named.
    """
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
    """Return a sentence about what a row waits for, and the node that has to act next (None: the row is done)."""
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
    """Name the receive that has to be posted before a forward-only stage may send another tensor."""
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
    """Return the text of a word at one end of a channel; `microbatch` is counted from the program's first."""
    at_maker = kind is not RECEIVE_OF[channel.tensor]
    stage, peer = (channel.maker, channel.taker) if at_maker else (channel.taker, channel.maker)
    word = Instruction(kind, stage, execution.executed.first_microbatch + microbatch)
    return str(replace(word, peer=execution.executed.graph.named_peer(word, peer)) if kind.row.other_end else word)


def _queue_waits_for(execution: RowExecution, queue: ReductionQueue) -> tuple[str, _Node | None]:
    running = queue.posted[0][2]
    key = execution.key_of(running)
    for rank in _members(execution, queue, running):
        queues = (execution.chains[rank], execution.reports[rank])
        member = next(
            (each for each in queues if any(execution.key_of(word) == key for _, _, word in each.posted)), None
        )
        here = f"{_text(running)} of rank {queue.rank} waits for rank {rank}"
        if member is None:
            return f"{here}, which has not posted it", rank
        first = member.posted[0][2]
        if not (member.joined and execution.key_of(first) == key):
            return f"{here}, where it stands behind {_text(first)}", member
    raise AssertionError("a reduction that all members have joined is complete")


def _members(execution: RowExecution, queue: ReductionQueue, running: Instruction) -> list[int]:
    """Return the ranks that take part in the reduction `running` of a queue."""
    if not execution.is_shared(running):
        return [queue.rank]
    key, rows = execution.key_of(running), enumerate(execution.executed.rows)
    return [
        rank for rank, row in rows if any(each.kind is running.kind and execution.key_of(each) == key for each in row)
    ]


def _text(reduction: Instruction) -> str:
    return f"{reduction.kind.value}@{reduction.version}"
