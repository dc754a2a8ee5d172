"""The executor where stages are a graph: a stage gets tensors of several others, and hands tensors to several.

The instructions and their meaning are the same. What differs is what a stage takes and makes: for each stage that it
has an edge with a tuple of tensors, which cross to another rank in one transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron.pipeline.edges import StageGraph
from megatron.pipeline.instruction import Instruction, Kind
from megatron.pipeline.instruction import Tensor as Travelling
from megatron.pipeline.runtime.executor import Executor
from megatron.pipeline.runtime.stage import GraphStage

_Tensors = Mapping[int, tuple[Tensor, ...]]  # by the other stage


class GraphExecutor(Executor):
    """Executes rows on stages of a graph; see `Executor`."""

    def __init__(self, *arguments: Any, graph: StageGraph, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._graph = graph
        # what waits to be sent, or to be taken by a stage of this rank: (from, to, microbatch)
        self._handed_on: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
        self._handed_back: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}

    def _input_of(self, stage: GraphStage, instruction: Instruction) -> dict[int, tuple[Tensor, ...]]:
        index, microbatch = instruction.stage, instruction.microbatch
        inputs = {}
        for source in self._graph.makers(Travelling.ACTIVATION, index):
            if source in self._stages:
                inputs[source] = self._handed_on.pop((source, index, microbatch))
            else:
                inputs[source] = stage.edges[source].unpack(self._received(Kind.RECV_F, instruction, source))
        return inputs

    def _hand_on(self, instruction: Instruction, outputs: _Tensors) -> None:
        for target, tensors in outputs.items():
            self._handed_on[instruction.stage, target, instruction.microbatch] = tensors

    def _output_grad_of(self, stage: GraphStage, instruction: Instruction) -> dict[int, tuple[Tensor, ...]]:
        index, microbatch = instruction.stage, instruction.microbatch
        grads = {}
        for target in self._graph.makers(Travelling.GRADIENT, index):
            if target in self._stages:
                grads[target] = self._handed_back.pop((target, index, microbatch))
            else:
                packed = self._received(Kind.RECV_B, instruction, target)
                grads[target] = stage.edges[target].unpack_gradients(packed)
        return grads

    def _hand_back(self, instruction: Instruction, grads: _Tensors) -> None:
        for source, tensors in grads.items():
            self._handed_back[instruction.stage, source, instruction.microbatch] = tensors

    def _send_output(self, instruction: Instruction) -> None:
        stage, peer = instruction.stage, self._graph.peer_of(instruction)
        tensors = self._handed_on.pop((stage, peer, instruction.microbatch))
        packed = self._stages[stage].edges[peer].pack(tensors)
        self._channels.post_send(Kind.SEND_F, stage, instruction.microbatch, packed, instruction.peer)

    def _send_input_grad(self, instruction: Instruction) -> None:
        stage, peer = instruction.stage, self._graph.peer_of(instruction)
        tensors = self._handed_back.pop((stage, peer, instruction.microbatch))
        packed = self._stages[stage].edges[peer].pack_gradients(tensors)
        self._channels.post_send(Kind.SEND_B, stage, instruction.microbatch, packed, instruction.peer)

    def _post_receive(self, instruction: Instruction) -> None:
        self._channels.post_receive(instruction.kind, instruction.stage, instruction.microbatch, instruction.peer)

    def _received(self, kind: Kind, instruction: Instruction, peer: int) -> Tensor:
        """What was posted to be received from stage `peer`, for a computation."""
        stage, microbatch = instruction.stage, instruction.microbatch
        named = self._graph.named_peer(Instruction(kind, stage), peer)
        packed = self._channels.wait(kind, stage, microbatch, instruction, named)
        self._waited()
        self._on_boundary(packed)
        return packed
