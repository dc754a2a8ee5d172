"""Stages of a graph that sleep instead of computing, and their updates: see `stage`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.pipeline.program.edges import StageGraph
from megatron.pipeline.program.instruction import Tensor as Travelling
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport, Microbatch
from megatron.pipeline.runtime.contract.tensors import EdgeTensors, TensorSpec
from megatron.pipeline.runtime.stages.emulated.stage import EmulatedTimes, EmulatedUpdate, sharpen_sleep, sleep_for

_Tensors = Mapping[int, tuple[Tensor, ...]]


class EmulatedGraphStage:
    """Stage `index` of `graph` that takes `times` and sends `payload_bytes` per microbatch over each of its edges, in
    both directions.
    """

    loss_names = ("loss",)

    def __init__(self, *, index: int, graph: StageGraph, times: EmulatedTimes, payload_bytes: int) -> None:
        spec = TensorSpec((max(1, payload_bytes // 4),))
        sources, targets = graph.makers(Travelling.ACTIVATION, index), graph.takers(Travelling.ACTIVATION, index)
        self.index = index
        self.num_stages = graph.num_stages
        self.edges = {other: EdgeTensors([spec]) for other in (*sources, *targets)}
        self._times = times
        payload = torch.zeros(spec.shape)  # never written: every send may read the same tensor
        self._outputs = dict.fromkeys(targets, (payload,))
        self._grads = dict.fromkeys(graph.takers(Travelling.GRADIENT, index), (payload,))
        sharpen_sleep()

    def load_version(self, version: int) -> None:
        """No weights to show."""

    def load_ahead(self, version: int, horizon: int) -> None:
        """Nor any to predict."""

    def load_provisional(self, version: int, unstepped: int) -> None:
        """Nor any to step."""

    def forward(self, microbatch: Microbatch, inputs: _Tensors) -> _Tensors:
        sleep_for(self._times.forward)
        return self._outputs

    def recompute(self, microbatch: Microbatch) -> None:
        sleep_for(self._times.recompute)

    def backward(self, microbatch: Microbatch, output_grads: _Tensors) -> _Tensors:
        sleep_for(self._times.backward)
        return self._grads

    def split_backward(self) -> None:
        """Nothing to prepare."""

    def backward_input(self, microbatch: Microbatch, output_grads: _Tensors) -> _Tensors:
        sleep_for(self._times.halves[0])
        return self._grads

    def backward_weights(self, microbatch: Microbatch) -> None:
        sleep_for(self._times.halves[1])

    def deferred_bytes(self, microbatch: Microbatch) -> int:
        return 0

    def forward_only(self, microbatch: Microbatch, inputs: _Tensors) -> _Tensors:
        sleep_for(self._times.forward)
        return self._outputs

    def take_losses(self, batch: int) -> Mapping[str, tuple[float, float]]:
        return {}


class _StageStep:
    """The update of one stage that steps by itself."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def begin_forward(self, info: BatchInfo, version: int) -> None:
        """No weights."""

    def begin_backward(self, info: BatchInfo) -> None:
        """No gradients."""

    def step(self, version: int) -> None:
        sleep_for(self._seconds)


class EmulatedStageUpdates(EmulatedUpdate):
    """Where each stage steps by itself: its STEP takes `step_seconds`."""

    def of_stage(self, stage: int) -> _StageStep:
        return _StageStep(self._step_seconds)

    def step(self, version: int) -> BatchReport:
        """All stages have stepped."""
        return self._report(version)
