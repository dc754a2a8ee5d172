"""The tensors that a rank's stages exchange with other stages over the edges of the graph.

A stage of a graph exchanges a tuple of tensors over each edge. The tuple goes to another rank in one transfer. A chain
is the graph with the edges 0>1, 1>2, ...: its stages exchange single tensors without a tuple, and None at an end.

`SharedParameters`: several stages may use one parameter, such as an embedding that is also the head. It lives in its
owner, the stage that steps it. The other stages get its value over an edge and send their gradients back. Sending the
whole matrix twice with every microbatch (131 MB for T5-3B) would be waste, since its value changes only when the owner
steps. So the value goes with the first microbatch whose forward at the owner uses it, and the other stages keep it.
Each user adds up the gradients of a batch and sends the sum back with the last microbatch. The weight policy, the
owner's depth and the sizes of the batches determine which microbatches carry the value, as they determine the weight
versions (`WeightPolicy`). So both ends know these microbatches without a message. Forwards and backwards of a stage are
in the order of their microbatches.

The owner sends the value that its own forward uses. A prediction or a provisional step changes this value within one
version. With provisional steps it is sent up to min(m, k + 1) times for a batch of m microbatches and an owner of
depth k.

Copies: where several stages of a program are copies of one stage of the model, a microbatch comes from one copy of each
neighbouring stage, and goes to one. Stages name each other by the stages of the model, and `Exchange` finds the copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from torch import Tensor

from megatron.pipeline.program.copies import Copy, PeersOfCopy
from megatron.pipeline.program.edges import StageGraph
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.weight_policies import Ahead, WeightPolicy
from megatron.pipeline.runtime.contract.stage import EVALUATION_BATCH, AnyStage, GraphStage, Microbatch
from megatron.pipeline.runtime.contract.tensors import TravellingTensors
from megatron.pipeline.runtime.transport.channels import Channels

_Pair = tuple[int, int]


class SharedParameters:
    """Decides which microbatches carry shared parameters, or their gradients."""

    def __init__(self, graph: StageGraph, weights: WeightPolicy) -> None:
        self._graph, self._weights = graph, weights
        deepest = max(map(graph.depth, range(graph.num_stages)))
        # (batch, its microbatches) since the last drain: the batches in flight, and as many before them, which
        # determine their versions.
        self._batches: deque[tuple[int, range]] = deque(maxlen=2 * deepest + 2)

    def begin_batch(self, batch: int, microbatches: range) -> None:
        """Add the next batch of the run."""
        self._batches.append((batch, microbatches))

    def settle(self) -> None:
        """Forget the batches. Call it only while nothing is in flight."""
        self._batches.clear()

    def moves_value(self, owner: int, microbatch: Microbatch) -> bool:
        """Return whether this microbatch's forward at stage `owner` is the first to use its weights."""
        if microbatch.batch == EVALUATION_BATCH:
            return microbatch.position == 0
        index = microbatch.index
        return index == self._batches[0][1].start or self._weights_of(owner, index) != self._weights_of(
            owner, index - 1
        )

    def moves_gradient(self, microbatch: Microbatch) -> bool:
        """Return whether gradients go back with this microbatch: it is the last of its batch."""
        return microbatch.position == microbatch.num_microbatches - 1

    def _weights_of(self, stage: int, index: int) -> tuple[int, int]:
        """Return (version, how far ahead of it) for a microbatch's forward at a stage.

        "How far" counts steps for a prediction, and microbatches whose gradients no step has used for a provisional
        step.
        """
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
    """The tensors that the stages of one rank exchange with each other and with other ranks.

    Args:
        stages: the stages of the rank, by their numbers in the program.
        graph: the edges between the stages of the program.
        copies: for each stage of the program, the copy of a model's stage that it is; empty: there are no copies.
        about: returns the microbatch with a given index.
        waited: called after each wait for a transfer.
        on_boundary: called with each tensor that stages exchange or that arrives from another rank; called with None if
            a computation gives no tensor.

    Attributes:
        most_unread: stage of this rank that only runs forwards (frozen) -> how many unread outputs it may have; None:
            any number.

    Raises:
        ValueError: stages are copies, and share parameters over their edges.
    """

    def __init__(
        self,
        stages: Mapping[int, AnyStage],
        graph: StageGraph,
        weights: WeightPolicy,
        channels: Channels,
        *,
        copies: Sequence[Copy] = (),
        about: Callable[[int], Microbatch],
        waited: Callable[[], None],
        on_boundary: Callable[[Tensor | None], None],
    ) -> None:
        frozen = list(filter(graph.is_forward_only, stages))
        # A trained stage on the same rank holds the rank back already.
        self.most_unread = {each: graph.most_unread(each) if len(frozen) == len(stages) else None for each in frozen}
        self._stages, self._channels = stages, channels
        self._about, self._waited, self._on_boundary = about, waited, on_boundary
        # The stages of a chain: they exchange single tensors, without a tuple and without packing.
        self._alone = frozenset(index for index, stage in stages.items() if not isinstance(stage, GraphStage))
        self._graph, self._copies = graph, tuple(copies)
        if copies:
            self._require_unshared()
        self._peer_of = cache(lambda kind, stage, peer: graph.peer_of(Instruction(kind, stage, peer=peer)))
        self._named = cache(lambda kind, stage, peer: graph.named_peer(Instruction(kind, stage), peer))
        self._shared = SharedParameters(graph, weights)
        self._values: dict[tuple[int, int, int], Tensor] = {}  # (from, to, place on the edge) -> shared parameter
        # (from, to, microbatch) -> a result that waits for its SEND, or for a stage of this rank.
        # A graph stage's result is kept with its `TravellingTensors`: at its SEND the microbatch may be forgotten.
        self._handed: dict[tuple[int, int, int], Any] = {}

    def _require_unshared(self) -> None:
        for number, stage in self._stages.items():
            for other, edge in () if number in self._alone else stage.edges.items():
                if edge.activations.has_shared or edge.gradients.has_shared:
                    raise ValueError(
                        f"stages {stage.index} and {other} of the model share a parameter over their edge, and each "
                        "has several copies, only one of which would get its value; run without copies, or do not "
                        "share the parameter"
                    )

    def begin_batch(self, batch: int, microbatches: range) -> None:
        """Add the next batch of the run."""
        self._shared.begin_batch(batch, microbatches)

    def settle(self) -> None:
        """Drop the tensors kept for later microbatches. Call it only while nothing is in flight."""
        self._values.clear()  # the next batch sends them again
        self._shared.settle()

    def drop(self, during: Instruction) -> None:
        """Drop all results that wait to be sent or taken, and the tensors of all posted receives."""
        self._channels.take_posted(during)
        self._waited()
        self._handed.clear()

    def __len__(self) -> int:
        """Return the number of results that wait to be sent or taken."""
        return len(self._handed)

    def taker(self, kind: Kind, index: int) -> Callable[[Instruction], Any]:
        """Return the function that collects the inputs of a computation of stage `index` from other stages.

        The function waits for posted receives. It returns a single tensor in a chain, else stage -> tensors. `kind`:
        RECV_F for activations, RECV_B for gradients.
        """
        peers, stages, pop = self._graph.makers(kind.row.receives, index), self._stages, self._handed.pop
        is_alone = index in self._alone
        if is_alone and not self._copies:
            if not peers:
                return lambda instruction: None
            [peer] = peers
            if peer in stages:
                return lambda instruction: pop((peer, index, instruction.microbatch))
            return partial(self._waited_for, kind, None)
        fixed, pairs_of = self._pairs(index, peers)
        sharing = {peer for peer in peers if kind is Kind.RECV_F and self._shares(peer, index)}

        def take(instruction: Instruction) -> dict[int, Any]:
            taken, microbatch = {}, instruction.microbatch
            for of_model, peer in fixed or pairs_of(microbatch):
                if peer in stages:
                    tensors = pop((peer, index, microbatch))
                elif is_alone:
                    tensors = self._waited_for(kind, self._named(kind, index, peer), instruction)
                else:
                    tensors = self._received(kind, instruction, peer)
                taken[of_model] = self._with_values(peer, index, tensors) if peer in sharing else tensors
            return taken

        return (lambda instruction: next(iter(take(instruction).values()), None)) if is_alone else take

    def giver(self, kind: Kind, index: int) -> Callable[[Instruction, Any], None]:
        """Return the function that keeps the results of a computation of stage `index`.

        SENDs and other stages of this rank take the results later. `kind`: SEND_F for activations, SEND_B for
        gradients.
        """
        peers, handed, on_boundary = self._graph.takers(kind.row.sends, index), self._handed, self._on_boundary
        stages = self._stages
        fixed, pairs_of = self._pairs(index, peers)

        def give_alone(instruction: Instruction, made: Tensor | None) -> None:
            on_boundary(made)
            if made is not None and peers:  # a stage gives no gradient to a frozen one
                peer = peers[0] if fixed else next(peer for _, peer in pairs_of(instruction.microbatch))
                handed[index, peer, instruction.microbatch] = made

        if index in self._alone:
            return give_alone
        sharing = {peer for peer in peers if kind is Kind.SEND_F and self._shares(index, peer)}

        def give(instruction: Instruction, made: Mapping[int, Any]) -> None:
            microbatch = instruction.microbatch
            for of_model, peer in fixed or pairs_of(microbatch):
                tensors = made[of_model]
                if peer in sharing:
                    tensors = self._as_of_now(index, peer, microbatch, tensors)
                here = peer in stages
                form = None if here else self._travelling(index, peer, microbatch)
                handed[index, peer, microbatch] = tensors if here else (form, tensors)
                for tensor in tensors:
                    on_boundary(tensor)

        return give

    def _pairs(self, index: int, peers: Sequence[int]) -> tuple[list[_Pair], Callable[[int], Iterable[_Pair]]]:
        """Return the stages with which a stage exchanges tensors, as pairs (stage of the model, stage of the program).

        The first result has the pairs that are the same for every microbatch, and is empty where stages are copies. The
        second result is a function from a microbatch to its pairs.
        """
        if not self._copies:
            fixed = [(peer, peer) for peer in peers]
            return fixed, lambda microbatch: fixed
        copies = PeersOfCopy(self._copies, index, peers)
        return [], lambda microbatch: copies.of(self._about(microbatch).position).items()

    def _shares(self, source: int, target: int) -> bool:
        """Return whether shared parameters go over an edge. Copies share none."""
        return not self._copies and self._travelling(source, target).has_shared

    def send(self, instruction: Instruction) -> None:
        """Start the transfer of a SEND. A frozen rank first waits while too many of its outputs are unread.

        No gradient comes back to a frozen rank, so nothing else would hold it back.
        """
        kind, stage, microbatch = instruction.kind, instruction.stage, instruction.microbatch
        if self.most_unread.get(stage) is not None:
            self._channels.wait_until_read(instruction, self.most_unread[stage] - 1)
            self._waited()
        if stage in self._alone:
            if self._copies:
                peer = self._peer_of(kind, stage, instruction.peer)
                tensor = self._handed.pop((stage, peer, microbatch))
                self._channels.post_send(kind, stage, microbatch, tensor, self._named(kind, stage, peer))
                return
            tensor = self._handed.pop((stage, stage + (1 if kind is Kind.SEND_F else -1), microbatch))
            self._channels.post_send(kind, stage, microbatch, tensor)
            return
        peer = self._peer_of(kind, stage, instruction.peer)
        travelling, tensors = self._handed.pop((stage, peer, microbatch))
        packed = travelling.pack(tensors)
        if packed is not None:
            spec = travelling.spec_of(tuple(tensor is not None for tensor in tensors))
            self._channels.post_send(kind, stage, microbatch, packed, instruction.peer, spec)

    def post_receive(self, instruction: Instruction) -> None:
        """Start the transfer of a RECV, unless no tensor moves with this microbatch."""
        kind, stage, microbatch = instruction.kind, instruction.stage, instruction.microbatch
        if stage in self._alone:
            peer = None
            if self._copies:
                peer = self._named(kind, stage, self._peer_of(kind, stage, instruction.peer))
            self._channels.post_receive(kind, stage, microbatch, peer)
            return
        peer = self._peer_of(kind, stage, instruction.peer)
        spec = self._travelling(peer, stage, microbatch).spec_of(self._present(peer, stage, microbatch))
        if spec is not None:
            self._channels.post_receive(kind, stage, microbatch, instruction.peer, spec)

    def _received(self, kind: Kind, instruction: Instruction, peer: int) -> Any:
        """Return the tensors from stage `peer` on another rank, with None for each that has not moved."""
        stage, microbatch = instruction.stage, instruction.microbatch
        travelling, present = self._travelling(peer, stage, microbatch), self._present(peer, stage, microbatch)
        if not any(present):
            return (None,) * len(present)
        packed = self._waited_for(kind, self._named(kind, stage, peer), instruction)
        return travelling.unpack(packed, present)

    def _waited_for(self, kind: Kind, peer: int | None, instruction: Instruction) -> Tensor:
        """Return the tensor of a posted receive. `peer`: the sending stage where the kind has several, else None."""
        tensor = self._channels.wait(kind, instruction.stage, instruction.microbatch, instruction, peer)
        self._waited()
        self._on_boundary(tensor)
        return tensor

    def _travelling(self, source: int, target: int, microbatch: int | None = None) -> TravellingTensors:
        """Return the tensors that stage `source` sends to stage `target`; one of the two is on this rank.

        Both are stages of the program. `microbatch`: the tensors have its shapes; None: if only their number and owners
        matter.
        """
        own, other = (source, target) if source in self._stages else (target, source)
        stage = self._stages[own]
        if self._copies:
            other = self._copies[other].stage
        edge = (stage.edges if microbatch is None else stage.edges_at(self._about(microbatch)))[other]
        return edge.activations if source < target else edge.gradients

    def _present(self, source: int, target: int, microbatch: int) -> tuple[bool, ...]:
        """Return, for each tensor, whether it moves with this microbatch."""
        travelling = self._travelling(source, target)
        owners = travelling.owners
        if not travelling.has_shared:
            return (True,) * len(owners)
        about = self._about(microbatch)
        if source > target:
            return tuple(owner is None or self._shared.moves_gradient(about) for owner in owners)
        return tuple(owner is None or self._shared.moves_value(owner, about) for owner in owners)

    def _with_values(self, source: int, target: int, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        """Return the tensors, with the last value of each shared parameter that has not moved."""
        for place, owner in enumerate(self._travelling(source, target).owners):
            if owner is not None and tensors[place] is not None:
                self._values[source, target, place] = tensors[place]
        return tuple(
            self._values[source, target, place] if tensor is None else tensor for place, tensor in enumerate(tensors)
        )

    def _as_of_now(
        self, source: int, target: int, microbatch: int, tensors: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Return the tensors, with None for each that does not move. Own parameters are copied: a step changes them."""
        moves, owners = self._present(source, target, microbatch), self._travelling(source, target).owners
        return tuple(
            None if not here else tensor.clone() if owner == source else tensor
            for here, owner, tensor in zip(moves, owners, tensors, strict=True)
        )
