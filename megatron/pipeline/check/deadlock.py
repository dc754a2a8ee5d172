"""Who waits for whom, in words, when an execution is stuck.

A rank that cannot go on waits for another rank's row (a tensor that it has not sent, the other end of a move) or for
its own chain of reductions; a chain waits for a member of its running reduction, either for that member's row, where
the reduction is still to be posted, or for that member's chain, where it stands behind another one. From any of these
the next one follows; the walk ends where it meets itself, in a circle, or at a rank that has nothing left to do before
the border.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.pipeline.check.balance import moves_of_rank
from megatron.pipeline.check.compact import AWAITS, KIND_OF_CODE, RECV_F, SEND_B, SEND_F, B, F
from megatron.pipeline.check.error import ProgramError
from megatron.pipeline.check.transfers import list_channels

if TYPE_CHECKING:
    from megatron.pipeline.check.progress import Execution
    from megatron.pipeline.check.reductions import Reduction

_ROW, _QUEUE = "row", "queue"
_Node = tuple[str, int]  # what waits: the row of a rank, or a queue of reductions


def explain_deadlock(execution: Execution) -> ProgramError:
    """The error that names the circle of ranks, or the rank at whose end the waiting stops."""
    first = next(rank for rank, end in enumerate(execution.ends) if execution.position[rank] < end)
    path: list[_Node] = []
    sentences: dict[_Node, str] = {}
    node: _Node | None = (_ROW, first)
    while node is not None and node not in sentences:
        path.append(node)
        sentences[node], node = _waits_for(execution, node)
    circle = [] if node is None else path[path.index(node) :]
    told = circle if any(what == _ROW for what, _ in circle) else path
    rank = next(rank for what, rank in told if what == _ROW)
    reason = "deadlock: " + "; ".join(sentences[each] for each in told)
    return execution.compact.error(rank, execution.position[rank], reason)


def _waits_for(execution: Execution, node: _Node) -> tuple[str, _Node | None]:
    """A sentence that says what a row or a queue waits for, and the node that has to bring it (None: nobody will)."""
    what, index = node
    return _row_waits_for(execution, index) if what == _ROW else _queue_waits_for(execution, index)


def _row_waits_for(execution: Execution, rank: int) -> tuple[str, _Node | None]:
    compact, position = execution.compact, execution.position[rank]
    if position == execution.ends[rank]:
        return f"rank {rank} has executed all that stands before the border", None
    here = f"rank {rank} waits at {compact.program.rows[rank][position]}"
    if execution.reductions.are_awaited(rank) and compact.codes[rank][position] not in AWAITS:
        return f"{here}, by its lanes to and from the host, for its chain of reductions", (_QUEUE, rank)
    if compact.codes[rank][position] in AWAITS:
        return f"{here} for its chain of reductions", (_QUEUE, rank)
    if execution.awaited_moves[rank]:
        partner = execution.partners[rank]
        first = moves_of_rank(compact, rank)[execution.num_moves[partner]]
        other_end = compact.program.pairs.counterpart(compact.program.rows[rank][first])
        return f"{here} for {other_end} of rank {partner}", (_ROW, partner)
    edges = compact.program.graph.edges
    if execution.awaited_tensor[rank] >= 2 * len(edges) * compact.num_microbatches:
        return _send_waits_for(execution, rank, here)
    number, microbatch = divmod(execution.awaited_tensor[rank], compact.num_microbatches)
    edge, is_input = edges[number % len(edges)], number < len(edges)
    producer, consumer = (edge.source, edge.target) if is_input else (edge.target, edge.source)
    code = F if is_input else B
    if compact.crosses(producer, consumer):
        code = SEND_F if is_input else SEND_B
    place, other = producer * compact.num_microbatches + microbatch, compact.rank_of_stage[producer]
    return f"{here} for {compact.word(code, place, consumer)} of rank {other}", (_ROW, other)


def _send_waits_for(execution: Execution, rank: int, here: str) -> tuple[str, _Node | None]:
    """The receive without which a forward-only stage would have too much unread."""
    compact, awaited = execution.compact, execution.awaited_tensor[rank]
    number, (begin, bound) = next(
        each for each in reversed(sorted(execution.receives.items(), key=lambda item: item[1])) if each[1][0] <= awaited
    )
    edge = compact.program.graph.edges[number]
    _, received = list_channels(compact, [len(codes) for codes in compact.codes])
    microbatch = received[SEND_F, edge.source, edge.target][awaited - begin - bound]
    place = edge.target * compact.num_microbatches + microbatch
    other = compact.rank_of_stage[edge.target]
    reason = f"{here}, with {bound} sent and unread, for {compact.word(RECV_F, place, edge.source)} of rank {other}"
    return reason, (_ROW, other)


def _queue_waits_for(execution: Execution, queue: int) -> tuple[str, _Node | None]:
    reductions, num_ranks = execution.reductions, len(execution.ends)
    running = reductions.incomplete(queue)[0]
    for member in reductions.members(queue, running):
        if reductions.has_started(member, running):
            continue
        rank = member % num_ranks
        here = f"{_word(running)} of rank {queue % num_ranks} waits for rank {rank}"
        waiting = reductions.incomplete(member)
        if running in waiting:
            return f"{here}, where it stands behind {_word(waiting[0])}", (_QUEUE, member)
        return f"{here}, which has not posted it", (_ROW, rank)
    raise AssertionError("a reduction that all members have started is complete")


def _word(reduction: Reduction) -> str:
    code, version = reduction
    return f"{KIND_OF_CODE[code].value}@{version}"
