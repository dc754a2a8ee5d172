"""The channels of a program's rows: which send meets which receive, and which outputs arrive without a word."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from megatron.pipeline.graph.execution import START
from megatron.pipeline.program.edges import StageGraph
from megatron.pipeline.program.instruction import RECEIVE_OF, RECEIVES, SEND_OF, SENDS, Instruction, Kind, Tensor
from megatron.pipeline.program.move_order import Pairs

NOBODY = -1


class Executed(Protocol):
    """Anything with rows: a program, or the timeline of a program."""

    rows: Sequence[Sequence[Instruction]]
    rank_of_stage: Sequence[int]
    batches: Sequence[int]
    first_microbatch: int
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
    """

    def __init__(self, executed: Executed, node_of: list[list[int]]) -> None:
        kinds, num_stages, graph = SENDS | RECEIVES, len(executed.rank_of_stage), executed.graph
        self.all: list[Channel] = []
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
