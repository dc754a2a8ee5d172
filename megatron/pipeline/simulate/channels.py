"""Channels: when tensors arrive at the stages that need them."""

from collections import deque

from megatron.pipeline.costs import Costs
from megatron.pipeline.instruction import RECEIVES, SENDS, Kind, Tensor
from megatron.pipeline.simulate.state import UNKNOWN, State

NOBODY = -1


class Channel:
    """One directed edge for one kind of traffic: pairs the k-th send with the k-th receive.

    Attributes:
        arrivals: by microbatch, counted from the program's first: when its tensor is there.
        awaited: the microbatch that the receiving rank waits for, or `NOBODY`.
        sends, receives: what waits for its other end: when it was posted, its position in the row, its microbatch.
    """

    __slots__ = (
        "arrivals", "awaited", "free_at", "latency", "occupation", "receiver", "receives", "runnable", "sender", "sends"
    )  # fmt: skip

    def __init__(
        self, sender: int, receiver: int, *, occupation: float, latency: float, num_microbatches: int, state: State
    ) -> None:
        self.sender, self.receiver = sender, receiver  # ranks
        self.occupation, self.latency = occupation, latency
        self.arrivals = [UNKNOWN] * num_microbatches
        self.awaited = NOBODY
        self.free_at = 0.0
        self.sends: deque[tuple[float, int, int]] = deque()
        self.receives: deque[tuple[float, int, int]] = deque()
        self.runnable = state.runnable

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


class Channels:
    """All channels, by what they mean to the instructions of each stage; None where there is none.

    Attributes:
        inputs: the channel that brings the input of a stage.
        gradients: the channel that brings the gradient of its output.
        posted: for each kind of transfer, where a stage posts it.
        delivered: for each tensor, the channel that takes it from the stage that makes it without being told: within a
            rank, and in a program without transfers.
    """

    def __init__(self, state: State, costs: Costs) -> None:
        program = state.program
        ranks, num_stages = program.rank_of_stage, len(program.rank_of_stage)
        self.inputs: list[Channel | None] = [None] * num_stages
        self.gradients: list[Channel | None] = [None] * num_stages
        self.posted: dict[Kind, list[Channel | None]] = {kind: [None] * num_stages for kind in SENDS | RECEIVES}
        self.delivered: dict[Tensor, list[Channel | None]] = {tensor: [None] * num_stages for tensor in Tensor}
        transfers = any(instruction.kind in self.posted for row in state.rows for instruction in row)
        fields = {"num_microbatches": sum(program.batches), "state": state}
        for edge, (up, down, latency) in enumerate(zip(*costs.edges(num_stages), strict=True)):
            low, high, crosses = ranks[edge], ranks[edge + 1], ranks[edge] != ranks[edge + 1]
            forward = Channel(low, high, occupation=up * crosses, latency=latency * crosses, **fields)
            backward = Channel(high, low, occupation=down * crosses, latency=latency * crosses, **fields)
            self.inputs[edge + 1], self.gradients[edge] = forward, backward
            if transfers and crosses:
                self.posted[Kind.SEND_F][edge] = self.posted[Kind.RECV_F][edge + 1] = forward
                self.posted[Kind.SEND_B][edge + 1] = self.posted[Kind.RECV_B][edge] = backward
            else:
                self.delivered[Tensor.ACTIVATION][edge] = forward
                self.delivered[Tensor.GRADIENT][edge + 1] = backward
