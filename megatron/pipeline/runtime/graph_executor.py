"""The executor where stages are a graph: a stage gets tensors of several others, and hands tensors to several.

The instructions and their meaning are the same. What differs is what a stage takes and makes: for each stage that it
has an edge with a tuple of tensors, which cross to another rank in one transfer. Shared parameters are not among them
each time (see `shared_parameters`), so a transfer may be of nothing, and is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron.pipeline.program.edges import StageGraph
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.instruction import Tensor as Travelling
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.runtime.contract.stage import EVALUATION_BATCH, BatchInfo, GraphStage
from megatron.pipeline.runtime.executor import Executor
from megatron.pipeline.runtime.transport.edge_tensors import TravellingTensors
from megatron.pipeline.runtime.update.shared_parameters import SharedParameters

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
        """The tensors, with shared parameters that have not moved as they came last."""
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
        """The tensors; of the stage's own parameters copies, which must not change when it steps."""
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
        """What was posted to be received from stage `peer`, for a computation."""
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
        """Which of the tensors move with this microbatch."""
        about = self._microbatches[microbatch]
        is_value = Travelling.ACTIVATION in (kind.row.sends, kind.row.receives)
        return tuple(
            owner is None
            or (self._shared.moves_value(owner, about) if is_value else self._shared.moves_gradient(about))
            for owner in travelling.owners
        )
