"""What the stages of a rank take from other stages and hand to them, over the edges of the graph.

A stage of a graph exchanges a tuple of tensors over each edge, which crosses to another rank in one transfer. A chain
is the graph with the edges 0>1, 1>2, ...: its stages take one tensor and hand on one, without a tuple, or None at an
end.

`SharedParameters`: a parameter that several stages use, such as an embedding that is also the head, lives in its owner,
the stage that steps it; the other stages get its value over an edge and send their gradients back. Sending the whole
matrix twice with every microbatch (131 MB for T5-3B) would be waste, since its value changes only when the owner steps.
So the value goes with the first microbatch whose forward at the owner uses it, and the other stages keep it. Each user
adds up the gradients of a batch, which go back with its last microbatch. Which microbatches these are follows from the
weight policy, the owner's depth and the sizes of the batches, as the versions do (`weights`), so both ends know it
without a message. Forwards and backwards of a stage are in the order of their microbatches. The value that moves is the
one that the owner's forward uses. Where it is ahead of its version, by a prediction or a provisional step, every
further step is another value: with provisional ones it moves up to min(m, k + 1) times for a batch of m microbatches
and an owner of depth k.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from torch import Tensor

from megatron.pipeline.program.edges import StageGraph
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.weight_policies import Ahead, WeightPolicy
from megatron.pipeline.runtime.contract.stage import EVALUATION_BATCH, AnyStage, GraphStage, Microbatch
from megatron.pipeline.runtime.contract.tensors import TravellingTensors
from megatron.pipeline.runtime.transport.channels import Channels


class SharedParameters:
    """Decides which microbatches carry shared parameters, or their gradients."""

    def __init__(self, graph: StageGraph, weights: WeightPolicy) -> None:
        self._graph, self._weights = graph, weights
        deepest = max(map(graph.depth, range(graph.num_stages)))
        # Since the last drain (batch, its microbatches): those in flight, and as many that fixed their versions.
        self._batches: deque[tuple[int, range]] = deque(maxlen=2 * deepest + 2)

    def begin_batch(self, batch: int, microbatches: range) -> None:
        """Note the next batch of the run."""
        self._batches.append((batch, microbatches))

    def settle(self) -> None:
        """Forget the batches; called when nothing is in flight any more."""
        self._batches.clear()

    def moves_value(self, owner: int, microbatch: Microbatch) -> bool:
        """Whether this microbatch is the first with the weights that its forward has at stage `owner`."""
        if microbatch.batch == EVALUATION_BATCH:
            return microbatch.position == 0
        index = microbatch.index
        return index == self._batches[0][1].start or self._weights_of(owner, index) != self._weights_of(
            owner, index - 1
        )

    def moves_gradient(self, microbatch: Microbatch) -> bool:
        """Whether this microbatch is the last of its batch."""
        return microbatch.position == microbatch.num_microbatches - 1

    def _weights_of(self, stage: int, index: int) -> tuple[int, int]:
        """(version, how far ahead of it) of a microbatch's forward; see `weights`."""
        batch = self._batch_of(index)
        behind = max(index - self._graph.depth(stage), self._batches[0][1].start)
        version = self._weights.version_of(batch, newest=self._batch_of(behind))
        if batch == version or self._weights.ahead is None:
            return version, 0
        if self._weights.ahead is Ahead.PREDICTION:
            return version, batch - version
        return version, behind - next(microbatches.start for each, microbatches in self._batches if each == version)

    def _batch_of(self, index: int) -> int:
        return next(batch for batch, microbatches in reversed(self._batches) if index >= microbatches.start)


class Exchange:
    """The tensors between the stages of a rank and others.

    Args:
        about: the microbatch with an index.
        waited: called after each wait for a transfer.
        on_boundary: called with each tensor that stages exchange, or None where an exchange has no tensor.

    Attributes:
        most_unread: frozen stage, for which nothing is saved -> how many unread outputs it may have.
    """

    def __init__(
        self,
        stages: Mapping[int, AnyStage],
        graph: StageGraph,
        weights: WeightPolicy,
        channels: Channels,
        *,
        about: Callable[[int], Microbatch],
        waited: Callable[[], None],
        on_boundary: Callable[[Tensor | None], None],
    ) -> None:
        self.most_unread = {each: graph.most_unread(each) for each in stages if graph.is_forward_only(each)}
        self._stages, self._channels = stages, channels
        self._about, self._waited, self._on_boundary = about, waited, on_boundary
        # The stages of a chain: what they exchange is one tensor, without a tuple, which costs no packing.
        self._alone = frozenset(index for index, stage in stages.items() if not isinstance(stage, GraphStage))
        self._graph = graph
        self._peer_of = cache(lambda kind, stage, peer: graph.peer_of(Instruction(kind, stage, peer=peer)))
        self._named = cache(lambda kind, stage, peer: graph.named_peer(Instruction(kind, stage), peer))
        self._shared = SharedParameters(graph, weights)
        self._values: dict[tuple[int, int, int], Tensor] = {}  # of shared parameters: (from, to, place on the edge)
        # What waits to be sent, or to be taken by a stage of this rank: (from, to, microbatch).
        self._handed: dict[tuple[int, int, int], Any] = {}

    def begin_batch(self, batch: int, microbatches: range) -> None:
        """Note the next batch of the run."""
        self._shared.begin_batch(batch, microbatches)

    def settle(self) -> None:
        """Drop what was kept for later microbatches; called when nothing is in flight any more."""
        self._values.clear()  # the next batch brings them anew
        self._shared.settle()

    def __len__(self) -> int:
        """The number of results that wait to be sent or taken."""
        return len(self._handed)

    def taker(self, kind: Kind, index: int) -> Callable[[Instruction], Any]:
        """The function that takes, for a computation of a stage, the tensors from each stage that makes some.

        It waits for posted receives. `kind`: RECV_F for activations, RECV_B for gradients.
        """
        peers, stages, pop = self._graph.makers(kind.row.receives, index), self._stages, self._handed.pop
        if index in self._alone:
            if not peers:
                return lambda instruction: None
            [peer] = peers
            if peer in stages:
                return lambda instruction: pop((peer, index, instruction.microbatch))
            return partial(self._waited_for, kind, None)
        sharing = {peer for peer in peers if self._travelling(peer, index).has_shared and kind is Kind.RECV_F}

        def take(instruction: Instruction) -> dict[int, Any]:
            taken = {}
            for peer in peers:
                if peer in stages:
                    tensors = pop((peer, index, instruction.microbatch))
                else:
                    tensors = self._received(kind, instruction, peer)
                taken[peer] = self._with_values(peer, index, tensors) if peer in sharing else tensors
            return taken

        return take

    def giver(self, kind: Kind, index: int) -> Callable[[Instruction, Any], None]:
        """The function that keeps what a computation of a stage has made, for its SENDs and for stages of this rank.

        `kind`: SEND_F for activations, SEND_B for gradients.
        """
        peers, handed, on_boundary = self._graph.takers(kind.row.sends, index), self._handed, self._on_boundary

        def give_alone(instruction: Instruction, made: Tensor | None) -> None:
            on_boundary(made)
            if made is not None and peers:
                handed[index, peers[0], instruction.microbatch] = made

        if index in self._alone:
            return give_alone
        sharing = {peer for peer in peers if self._travelling(index, peer).has_shared and kind is Kind.SEND_F}

        def give(instruction: Instruction, made: Mapping[int, Any]) -> None:
            for peer, tensors in made.items():
                if peer in sharing:
                    tensors = self._as_of_now(index, peer, instruction.microbatch, tensors)
                handed[index, peer, instruction.microbatch] = tensors

        return give

    def send(self, instruction: Instruction) -> None:
        """Start the transfer of a SEND. Few of a frozen stage's outputs may be unread: no gradient holds it back."""
        kind, stage, microbatch = instruction.kind, instruction.stage, instruction.microbatch
        if stage in self.most_unread:
            self._channels.wait_until_read(instruction, self.most_unread[stage] - 1)
            self._waited()
        if stage in self._alone:
            tensor = self._handed.pop((stage, stage + (1 if kind is Kind.SEND_F else -1), microbatch))
            self._channels.post_send(kind, stage, microbatch, tensor)
            return
        peer = self._peer_of(kind, stage, instruction.peer)
        tensors = self._handed.pop((stage, peer, microbatch))
        travelling = self._travelling(stage, peer)
        packed, spec = travelling.pack(tensors), None
        if travelling.has_shared:
            spec = travelling.spec_of(tuple(tensor is not None for tensor in tensors))
        if packed is not None:
            self._channels.post_send(kind, stage, microbatch, packed, instruction.peer, spec)

    def post_receive(self, instruction: Instruction) -> None:
        """Start the transfer of a RECV."""
        kind, stage, microbatch = instruction.kind, instruction.stage, instruction.microbatch
        if stage in self._alone:
            self._channels.post_receive(kind, stage, microbatch)
            return
        peer, spec = self._peer_of(kind, stage, instruction.peer), None
        travelling = self._travelling(peer, stage)
        if travelling.has_shared:
            spec = travelling.spec_of(self._present(peer, stage, microbatch))
            if spec is None:
                return
        self._channels.post_receive(kind, stage, microbatch, instruction.peer, spec)

    def _received(self, kind: Kind, instruction: Instruction, peer: int) -> Any:
        """The tensors from stage `peer` of another rank, for a computation."""
        stage, microbatch = instruction.stage, instruction.microbatch
        travelling, present = self._travelling(peer, stage), None
        if travelling.has_shared:
            present = self._present(peer, stage, microbatch)
            if not any(present):
                return (None,) * len(present)
        packed = self._waited_for(kind, self._named(kind, stage, peer), instruction)
        return travelling.unpack(packed, present)

    def _waited_for(self, kind: Kind, peer: int | None, instruction: Instruction) -> Tensor:
        """The tensor of a posted receive; `peer` where there are several."""
        tensor = self._channels.wait(kind, instruction.stage, instruction.microbatch, instruction, peer)
        self._waited()
        self._on_boundary(tensor)
        return tensor

    def _travelling(self, source: int, target: int) -> TravellingTensors:
        """The tensors that one stage hands to another, of which one is on this rank."""
        own, other = (source, target) if source in self._stages else (target, source)
        edge = self._stages[own].edges[other]
        return edge.activations if source < target else edge.gradients

    def _present(self, source: int, target: int, microbatch: int) -> tuple[bool, ...]:
        """For each tensor, whether it moves with this microbatch."""
        about, owners = self._about(microbatch), self._travelling(source, target).owners
        if source > target:
            return tuple(owner is None or self._shared.moves_gradient(about) for owner in owners)
        return tuple(owner is None or self._shared.moves_value(owner, about) for owner in owners)

    def _with_values(self, source: int, target: int, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        """The tensors; a shared parameter that has not moved has its last value."""
        for place, owner in enumerate(self._travelling(source, target).owners):
            if owner is not None and tensors[place] is not None:
                self._values[source, target, place] = tensors[place]
        return tuple(
            self._values[source, target, place] if tensor is None else tensor for place, tensor in enumerate(tensors)
        )

    def _as_of_now(
        self, source: int, target: int, microbatch: int, tensors: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """The tensors; the stage's own parameters are copied, since their values must not change when it steps."""
        moves, owners = self._present(source, target, microbatch), self._travelling(source, target).owners
        return tuple(
            None if not here else tensor.clone() if owner == source else tensor
            for here, owner, tensor in zip(moves, owners, tensors, strict=True)
        )
