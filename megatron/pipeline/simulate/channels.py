"""Channels: when tensors arrive at the stages that need them."""

from collections import deque

from megatron.pipeline.program.instruction import RECEIVE_OF, RECEIVES, SEND_OF, SENDS, Instruction, Kind, Tensor
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.state import UNKNOWN, SimulationState

NOBODY = -1


class Channel:
    """One directed edge for one kind of traffic: pairs the k-th send with the k-th receive.

    Attributes:
        arrivals: by microbatch, counted from the program's first: when its tensor is there.
        awaited: the microbatch that the receiving rank waits for, or `NOBODY`.
        sends, receives: what waits for its other end: when it was posted, its position in the row, its microbatch.
        most_unread: a further send waits until all but so many of those before it have their receives posted; None: no
            send waits.
    """

    __slots__ = (
        "arrivals", "awaited", "free_at", "latency", "most_unread", "num_sent", "occupation", "receive_times",
        "receiver", "receives", "runnable", "sender", "sender_waits", "sends",
    )  # fmt: skip

    def __init__(
        self,
        sender: int,
        receiver: int,
        *,
        occupation: float,
        latency: float,
        num_microbatches: int,
        state: SimulationState,
    ) -> None:
        self.sender, self.receiver = sender, receiver  # ranks
        self.occupation, self.latency = occupation, latency
        self.arrivals = [UNKNOWN] * num_microbatches
        self.awaited = NOBODY
        self.free_at = 0.0
        self.sends: deque[tuple[float, int, int]] = deque()
        self.receives: deque[tuple[float, int, int]] = deque()
        self.runnable = state.runnable
        self.most_unread: int | None = None
        self.num_sent = 0
        self.receive_times: list[float] = []
        self.sender_waits = False

    def may_send(self) -> float:
        """When the next send may be posted at the earliest; `UNKNOWN`: the sender is called when that is known."""
        awaited = self.num_sent - self.most_unread
        if awaited >= len(self.receive_times):
            self.sender_waits = True
            return UNKNOWN
        self.num_sent += 1
        return self.receive_times[awaited] if awaited >= 0 else 0.0

    def note_receive(self, now: float) -> None:
        """A receive is posted; a send that waits for it can go on."""
        self.receive_times.append(now)
        if self.sender_waits:
            self.sender_waits = False
            self.runnable.append(self.sender)

    def transfer(self, ready: float, microbatch: int) -> float:
        """Start of a transfer that both ends have posted by `ready`; who waits for the tensor can go on."""
        free_at = self.free_at
        start = ready if ready > free_at else free_at
        self.free_at = free_at = start + self.occupation
        self.arrivals[microbatch] = free_at + self.latency
        if self.awaited == microbatch:
            self.awaited = NOBODY
            self.runnable.append(self.receiver)
        return start


class SimulatedChannels:
    """All channels, by what they mean to the instructions of each stage.

    Attributes:
        needed: for each tensor and stage, the channels that bring it.
        posted: for each kind of transfer and stage, where it is posted, by the peer that the instruction names.
        delivered: for each tensor and stage, the channels that take it from the stage that makes it without being told:
            within a rank, and in a program without transfers.
    """

    def __init__(self, state: SimulationState, costs: Costs) -> None:
        program = state.program
        graph, ranks, num_stages = program.graph, program.rank_of_stage, len(program.rank_of_stage)
        self.needed: dict[Tensor, list[tuple[Channel, ...]]] = {tensor: [()] * num_stages for tensor in Tensor}
        self.delivered: dict[Tensor, list[tuple[Channel, ...]]] = {tensor: [()] * num_stages for tensor in Tensor}
        self.posted: dict[Kind, list[dict[int | None, Channel]]] = {
            kind: [{} for _ in range(num_stages)] for kind in SENDS | RECEIVES
        }
        transfers = any(instruction.kind in self.posted for row in state.rows for instruction in row)
        fields = {"num_microbatches": sum(program.batches), "state": state}
        for edge, up, down, latency in zip(graph.edges, *costs.edges(len(graph.edges)), strict=True):
            crosses = ranks[edge.source] != ranks[edge.target]
            ways = [
                (Tensor.ACTIVATION, edge.source, edge.target, up),
                (Tensor.GRADIENT, edge.target, edge.source, down),
            ]
            for tensor, maker, taker, occupation in ways[: 1 + edge.gradient]:
                channel = Channel(
                    ranks[maker], ranks[taker], occupation=occupation * crosses, latency=latency * crosses, **fields
                )
                self.needed[tensor][taker] += (channel,)
                if transfers and crosses:
                    channel.most_unread = graph.most_unread(maker)
                    for kind, stage, peer in ((SEND_OF[tensor], maker, taker), (RECEIVE_OF[tensor], taker, maker)):
                        named = graph.named_peer(Instruction(kind, stage), peer)
                        self.posted[kind][stage] |= {named: channel, peer: channel}
                else:
                    self.delivered[tensor][maker] += (channel,)
