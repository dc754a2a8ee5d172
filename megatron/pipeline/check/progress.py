"""Proof: sends and receives pair up, and the program runs to its end, even if a send completes only once its receive is
posted.

The proof of progress is the execution that finds the graph of waits (`megatron.pipeline.graph`). An instruction that
can run stays able to run while others are posted, so every order of execution ends in the same state, and one execution
stands for all. If it stops before the ends of the rows, the remaining ranks wait for one another, and the error names
the circle.

**Transfers.** A channel is an edge between two stages and one kind of traffic, activations or gradients. It carries no
tags: the n-th tensor sent is the n-th received. The proof of computations shows that every transfer is posted exactly
once at each end. This proof shows that the two ends of each channel list the same microbatches in the same order.
Otherwise a stage would compute on another microbatch's data without any error.
"""

from megatron.pipeline.check.compact import CompactProgram
from megatron.pipeline.graph.deadlock import explain_deadlock
from megatron.pipeline.graph.row_graph import RowExecution, graph_of

Channel = tuple[int, int, int]  # (code of the send, sending stage, receiving stage)


def prove_transfers(compact: CompactProgram) -> None:
    """Prove that the two ends of every channel list the same microbatches in the same order.

    Raises:
        ProgramError: for the first receive that would get another microbatch's tensor.
    """
    sent, received = list_channels(compact, [len(codes) for codes in compact.codes])
    for channel, microbatches in received.items():
        if microbatches != sent.get(channel):
            _raise_mismatch(compact, channel, sent.get(channel, []), microbatches)


def list_channels(
    compact: CompactProgram, ends: list[int]
) -> tuple[dict[Channel, list[int]], dict[Channel, list[int]]]:
    """The microbatches that each channel sends and receives in the first `ends[rank]` instructions of each row.

    Returns (sent, received), each channel -> microbatches, counted from the program's first microbatch.
    """
    num_microbatches = compact.num_microbatches
    sent: dict[Channel, list[int]] = {}
    received: dict[Channel, list[int]] = {}
    lists = {
        slot: (sent if transfer.is_send else received).setdefault(transfer.channel, [])
        for slot, transfer in compact.transfers.items()
    }
    for slots, places, end in zip(compact.slots, compact.places, ends, strict=True):
        for slot, place in zip(slots[:end], places[:end], strict=True):
            if slot in lists:
                lists[slot].append(place % num_microbatches)
    return sent, received


def _raise_mismatch(compact: CompactProgram, channel: Channel, sent: list[int], received: list[int]) -> None:
    send, sender, receiver = channel
    nth = next(nth for nth, pair in enumerate(zip(sent, received, strict=True)) if pair[0] != pair[1])
    rank = compact.rank_of_stage[receiver]
    place = receiver * compact.num_microbatches + received[nth]
    expected = compact.word(send, sender * compact.num_microbatches + sent[nth], receiver)
    receive = next(slot for slot, each in compact.transfers.items() if each.channel == channel and not each.is_send)
    reason = (
        f"receive {nth} on the channel from stage {sender} would get what send {nth} there sends, which is {expected}"
    )
    raise compact.error(rank, compact.position(rank, receive, place), reason)


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
