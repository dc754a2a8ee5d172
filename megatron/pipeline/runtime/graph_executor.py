"""The executors of stages that form a graph: a stage takes tensors of several stages, and hands tensors to several.

`GraphExecutor` has the instructions of a chain. A stage exchanges a tuple of tensors over each edge, which crosses to
another rank in one transfer. `StagewiseExecutor` lets each stage step by itself, with one version of its weights
(FTPipe, Table 1).

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

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron.pipeline.program.edges import StageGraph
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.instruction import Tensor as Travelling
from megatron.pipeline.program.weight_policies import Ahead, WeightPolicy
from megatron.pipeline.runtime.contract.stage import EVALUATION_BATCH, BatchInfo, GraphStage, Microbatch
from megatron.pipeline.runtime.contract.tensors import TravellingTensors
from megatron.pipeline.runtime.executor import Executor


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


_Tensors = Mapping[int, tuple[Tensor | None, ...]]  # by the other stage


class GraphExecutor(Executor):
    """Executes rows on stages of a graph; see `Executor`."""

    def __init__(self, *arguments: Any, graph: StageGraph, weights: WeightPolicy, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._graph = graph
        self._shared = SharedParameters(graph, weights)
        self._values: dict[tuple[int, int, int], Tensor] = {}  # of shared parameters: (from, to, place on the edge)
        # what waits to be sent, or to be taken by a stage of this rank: (from, to, microbatch)
        self._handed_on: dict[tuple[int, int, int], tuple[Tensor | None, ...]] = {}
        self._handed_back: dict[tuple[int, int, int], tuple[Tensor | None, ...]] = {}

    def add_batch(self, info: BatchInfo, first_microbatch: int) -> None:
        super().add_batch(info, first_microbatch)
        if info.index != EVALUATION_BATCH:
            self._shared.begin_batch(info.index, range(first_microbatch, first_microbatch + info.num_microbatches))

    def settle(self) -> None:
        self._values.clear()  # the next batch brings them anew
        self._shared.settle()

    def _input_of(self, stage: GraphStage, instruction: Instruction) -> dict[int, tuple[Tensor, ...]]:
        index, microbatch = instruction.stage, instruction.microbatch
        inputs = {}
        for source in self._graph.makers(Travelling.ACTIVATION, index):
            if source in self._stages:
                tensors = self._handed_on.pop((source, index, microbatch))
            else:
                tensors = self._received(Kind.RECV_F, instruction, source)
            if stage.edges[source].activations.has_shared:
                tensors = self._with_values(source, index, tensors)
            inputs[source] = tensors
        return inputs

    def _with_values(self, source: int, index: int, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        """The tensors; a shared parameter that has not moved has its last value."""
        for place, owner in enumerate(self._stages[index].edges[source].activations.owners):
            if owner is not None and tensors[place] is not None:
                self._values[source, index, place] = tensors[place]
        return tuple(
            self._values[source, index, place] if tensor is None else tensor for place, tensor in enumerate(tensors)
        )

    def _hand_on(self, instruction: Instruction, outputs: _Tensors) -> None:
        stage, microbatch = self._stages[instruction.stage], instruction.microbatch
        for target, tensors in outputs.items():
            travelling = stage.edges[target].activations
            if travelling.has_shared:
                tensors = self._shared_as_of_now(stage.index, microbatch, travelling, tensors)
            self._handed_on[stage.index, target, microbatch] = tensors

    def _shared_as_of_now(
        self, stage: int, microbatch: int, travelling: TravellingTensors, tensors: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """The tensors; the stage's own parameters are copied, since their values must not change when it steps."""
        moves = self._present(Kind.SEND_F, travelling, microbatch)
        return tuple(
            None if not here else tensor.clone() if owner == stage else tensor
            for here, owner, tensor in zip(moves, travelling.owners, tensors, strict=True)
        )

    def _output_grad_of(self, stage: GraphStage, instruction: Instruction) -> dict[int, tuple[Tensor, ...]]:
        index, microbatch = instruction.stage, instruction.microbatch
        grads = {}
        for target in self._graph.makers(Travelling.GRADIENT, index):
            if target in self._stages:
                grads[target] = self._handed_back.pop((target, index, microbatch))
            else:
                grads[target] = self._received(Kind.RECV_B, instruction, target)
        return grads

    def _hand_back(self, instruction: Instruction, grads: _Tensors) -> None:
        for source, tensors in grads.items():
            self._handed_back[instruction.stage, source, instruction.microbatch] = tensors

    def _send_output(self, instruction: Instruction) -> None:
        stage, peer = instruction.stage, self._graph.peer_of(instruction)
        self._wait_until_read(instruction)
        tensors = self._handed_on.pop((stage, peer, instruction.microbatch))
        self._send(instruction, self._stages[stage].edges[peer].activations, tensors)

    def _send_input_grad(self, instruction: Instruction) -> None:
        stage, peer = instruction.stage, self._graph.peer_of(instruction)
        tensors = self._handed_back.pop((stage, peer, instruction.microbatch))
        self._send(instruction, self._stages[stage].edges[peer].gradients, tensors)

    def _send(
        self, instruction: Instruction, travelling: TravellingTensors, tensors: tuple[Tensor | None, ...]
    ) -> None:
        packed = travelling.pack(tensors)
        if packed is not None:
            kind, stage, microbatch = instruction.kind, instruction.stage, instruction.microbatch
            spec = travelling.spec_of(tuple(tensor is not None for tensor in tensors))
            self._channels.post_send(kind, stage, microbatch, packed, instruction.peer, spec)

    def _post_receive(self, instruction: Instruction) -> None:
        kind, stage, microbatch = instruction.kind, instruction.stage, instruction.microbatch
        travelling = self._travelling(kind, stage, self._graph.peer_of(instruction))
        if not travelling.has_shared:
            self._channels.post_receive(kind, stage, microbatch, instruction.peer)
        elif (spec := travelling.spec_of(self._present(kind, travelling, microbatch))) is not None:
            self._channels.post_receive(kind, stage, microbatch, instruction.peer, spec)

    def _received(self, kind: Kind, instruction: Instruction, peer: int) -> tuple[Tensor | None, ...]:
        """The tensors from stage `peer`, for a computation; waits for the posted receive."""
        stage, microbatch = instruction.stage, instruction.microbatch
        travelling, present = self._travelling(kind, stage, peer), None
        if travelling.has_shared:
            present = self._present(kind, travelling, microbatch)
            if not any(present):
                return (None,) * len(present)
        named = self._graph.named_peer(Instruction(kind, stage), peer)
        packed = self._channels.wait(kind, stage, microbatch, instruction, named)
        self._waited()
        self._on_boundary(packed)
        return travelling.unpack(packed, present)

    def _travelling(self, kind: Kind, stage: int, peer: int) -> TravellingTensors:
        edge = self._stages[stage].edges[peer]
        return edge.activations if kind is Kind.RECV_F else edge.gradients

    def _present(self, kind: Kind, travelling: TravellingTensors, microbatch: int) -> tuple[bool, ...]:
        """For each tensor, whether it moves with this microbatch."""
        about = self._microbatches[microbatch]
        is_value = Travelling.ACTIVATION in (kind.row.sends, kind.row.receives)
        return tuple(
            owner is None
            or (self._shared.moves_value(owner, about) if is_value else self._shared.moves_gradient(about))
            for owner in travelling.owners
        )


class StagewiseExecutor(GraphExecutor):
    """Executes rows on stages of a graph whose update is `StageUpdates`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._begun: dict[int, int] = {}  # stage -> the batch of its last backward
        self._with_gradients: set[tuple[int, int]] = set()  # stages and batches whose gradients have begun
        self._begun_forward: dict[int, int] = {}  # stage -> the batch of its last forward
        self._num_stepped: Counter[int] = Counter()  # version -> stages

    def _show_weights(self, stage: GraphStage, instruction: Instruction) -> None:
        if instruction.horizon:
            stage.load_ahead(instruction.version, instruction.horizon)
        elif instruction.unstepped:
            self._require_whole(instruction, instruction.version)
            stage.load_provisional(instruction.version, instruction.unstepped)
        else:
            stage.load_version(instruction.version)
        batch = self._microbatches[instruction.microbatch].batch
        if self._begun_forward.get(stage.index) != batch:
            self._begun_forward[stage.index] = batch
            self._update.of_stage(stage.index).begin_forward(self._batches[batch], instruction.version)

    def _accumulate_for(self, stage: int, batch: int) -> None:
        if self._begun.get(stage) == batch:
            return
        update, info = self._update.of_stage(stage), self._batches[batch]
        if (stage, batch) in self._with_gradients:
            update.resume_backward(info)
        else:
            self._with_gradients.add((stage, batch))
            update.begin_backward(info)
        self._begun[stage] = batch

    def _step(self, instruction: Instruction) -> None:
        stage, version = instruction.stage, instruction.version
        self._late_chain.raise_error()
        self._update.of_stage(stage).step(version)
        self._with_gradients.discard((stage, version - 1))
        self._newest[stage] = version
        self._num_stepped[version] += 1
        if self._num_stepped[version] == len(self._stages):
            del self._num_stepped[version]
            self.reports[version - 1] = self._update.step(version)
            self._forget_batch(version - 1)
