"""Stages and updates that sleep instead of computing, while their transfers are real.

Problem: on two cores one cannot measure how well the computations and lanes of sixteen stages overlap, because the
processors and their memory would be the limit.

Solution: forward and backward sleep until a deadline, so many stages run on few cores. Transfers and reductions move
real bytes between real processes. `EmulatedRelayUpdate` sleeps for the times of fetch, store, update and reduction, in
the real lanes and threads. So a measurement shows the schedule, the executor and the lanes.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.pipeline.program.edges import StageGraph
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.instruction import Tensor as Travelling
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.contract.stage import (
    BatchInfo,
    BatchReport,
    Eviction,
    GraphStage,
    Microbatch,
    OptimisticUpdate,
    PredictingUpdate,
    RelayUpdate,
    RepeatingStage,
    SplittingStage,
    Stage,
    StageUpdate,
    StagewiseUpdate,
)
from megatron.pipeline.runtime.contract.tensors import EdgeTensors, TensorSpec
from megatron.pipeline.runtime.update.gradients import all_reduce_norm

_PR_SET_TIMERSLACK = 29


def sharpen_sleep() -> None:
    """Ask Linux to wake this thread with a timer slack of 1 ns instead of 50 us. No effect on other systems."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
    except (AttributeError, OSError):
        return


_OVERSLEEP = 0.0002


def sleep_for(seconds: float) -> None:
    """Wait for `seconds` by the monotonic clock.

    `time.sleep` takes too long, by 0.1 ms and more on a virtual machine. So the last 0.2 ms are a busy wait.
    """
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(max(left - _OVERSLEEP, 0.0))


@dataclass(frozen=True)
class EmulatedTimes:
    """The seconds that a microbatch takes at a stage.

    Attributes:
        forward, backward, recompute: of a whole forward, backward and recompute.
        backward_input, backward_weight: of the halves I and W of a split backward, both given or both None; None: each
            takes half of `backward`.

    Raises:
        ValueError: only one of the halves is given.
    """

    forward: float
    backward: float
    recompute: float = 0.0
    backward_input: float | None = None
    backward_weight: float | None = None

    def __post_init__(self) -> None:
        if (self.backward_input is None) != (self.backward_weight is None):
            raise ValueError(
                f"backward_input is {self.backward_input} and backward_weight {self.backward_weight}; give seconds "
                "for both halves of a backward, or for none"
            )

    @property
    def halves(self) -> tuple[float, float]:
        """The seconds of I and of W."""
        if self.backward_input is None:
            return self.backward / 2, self.backward / 2
        return self.backward_input, self.backward_weight


class EmulatedStage(Stage, SplittingStage, RepeatingStage):
    """Stage `index` of a chain of `num_stages` that sleeps instead of computing.

    Args:
        times: the seconds that it sleeps.
        payload_bytes: the bytes of a microbatch sent to each neighbour.
        activation_bytes: the bytes that count as saved for each microbatch, and that move if it is evicted.
        deferred_bytes: the bytes that count as saved between the halves of a split backward.
        activation_memory: counts and moves the activations of the rank; None: nothing is evicted.

    Raises:
        ValueError: less than 8 `activation_bytes` with an `activation_memory`.
    """

    loss_names = ("loss",)

    def __init__(
        self,
        *,
        index: int,
        num_stages: int,
        times: EmulatedTimes,
        payload_bytes: int,
        activation_bytes: int = 0,
        deferred_bytes: int = 0,
        activation_memory: ActivationMemory | None = None,
    ) -> None:
        spec = TensorSpec((max(1, payload_bytes // 4),), torch.float32)
        self.index = index
        self.num_stages = num_stages
        self.input_spec = None if index == 0 else spec
        self.output_spec = None if index == num_stages - 1 else spec
        self._times = times
        self._payload = torch.zeros(spec.shape, dtype=spec.dtype)  # never written, so all sends read the same tensor
        self._output = None if self.output_spec is None else self._payload
        self._input_grad = None if self.input_spec is None else self._payload
        if activation_memory is not None and activation_bytes < 8:
            raise ValueError(
                f"activation_bytes is {activation_bytes}; give 8 and more, for a moved microbatch carries its number"
            )
        self._activation_bytes = activation_bytes
        self._memory = activation_memory
        self._saved: dict[int, Tensor | None] = {}  # microbatch -> the buffer from which it was loaded, if it was
        self._deferred_bytes = deferred_bytes
        self._halfway: set[int] = set()  # microbatches between I and W
        sharpen_sleep()

    def forward(self, microbatch: Microbatch, input: Tensor | None) -> Tensor | None:
        sleep_for(self._times.forward)
        if self._memory is not None:
            self._saved[microbatch.index] = None
            self._memory.hold(self.index, microbatch.index, self._activation_bytes)
        return self._output

    def recompute(self, microbatch: Microbatch) -> None:
        sleep_for(self._times.recompute)

    def backward(self, microbatch: Microbatch, output_grad: Tensor | None) -> Tensor | None:
        return self._backward(microbatch, self._times.backward)

    def begin_again(self, microbatches: Sequence[Microbatch]) -> None:
        """Forget these microbatches."""
        for microbatch in microbatches:
            self._saved.pop(microbatch.index, None)

    def backward_input(self, microbatch: Microbatch, output_grad: Tensor | None) -> Tensor | None:
        self._halfway.add(microbatch.index)
        return self._backward(microbatch, self._times.halves[0])

    def backward_weights(self, microbatch: Microbatch) -> None:
        """Sleep for W.

        Raises:
            KeyError: the microbatch is not between its I and its W.
        """
        self._halfway.remove(microbatch.index)
        sleep_for(self._times.halves[1])

    def deferred_bytes(self, microbatch: Microbatch) -> int:
        return self._deferred_bytes if microbatch.index in self._halfway else 0

    def _backward(self, microbatch: Microbatch, seconds: float) -> Tensor | None:
        """Sleep, and drop the saved activations."""
        sleep_for(seconds)
        if self._memory is not None:
            del self._saved[microbatch.index]
            self._memory.drop(self.index, microbatch.index)
        return self._input_grad

    def _require_memory(self) -> None:
        if self._memory is None:
            raise RuntimeError(
                f"stage {self.index} has no activation_memory, so nothing of it is counted, and nothing can move"
            )

    def saved_bytes(self, microbatch: Microbatch) -> int:
        self._require_memory()
        return self._activation_bytes if microbatch.index in self._saved else 0

    def evict(self, microbatch: Microbatch) -> Eviction:
        self._require_memory()
        index = microbatch.index
        del self._saved[index]

        def pack(buffer: Tensor | None = None) -> Tensor:
            if buffer is None:
                buffer = self._memory.take_buffer(self._activation_bytes, instead_of=(self.index, index))
            self._memory.drop(self.index, index)
            buffer[:8].view(torch.int64).fill_(index)
            return buffer

        return Eviction(self._activation_bytes, pack)

    def load(self, microbatch: Microbatch, buffer: Tensor) -> None:
        """Take back the activations of a microbatch.

        Raises:
            RuntimeError: `buffer` has the activations of another microbatch, or the stage has no `activation_memory`.
        """
        self._require_memory()
        assert microbatch.index not in self._saved, f"microbatch {microbatch.index} is here already"
        if (found := buffer[:8].view(torch.int64).item()) != microbatch.index:
            raise RuntimeError(f"stage {self.index} was given back microbatch {found} for {microbatch.index}")
        self._saved[microbatch.index] = buffer

    def release_input(self, microbatch: Microbatch) -> Tensor:
        return torch.full_like(self._payload, microbatch.index)

    def restore_input(self, microbatch: Microbatch, input: Tensor) -> None:
        """Check that this is the input of the microbatch.

        Raises:
            RuntimeError: it is another input.
        """
        if not torch.equal(input, torch.full_like(self._payload, microbatch.index)):
            raise RuntimeError(f"stage {self.index} was given back another input for microbatch {microbatch.index}")

    def forward_only(self, microbatch: Microbatch, input: Tensor | None) -> Tensor | None:
        sleep_for(self._times.forward)
        return self._output

    def take_losses(self, batch: int) -> Mapping[str, tuple[float, float]]:
        return {}


class EmulatedGraphStage(EmulatedStage, GraphStage):
    """Stage `index` of `graph` that sleeps for `times` instead of computing.

    It sends `payload_bytes` per microbatch over each of its edges, in both directions.
    """

    def __init__(self, *, index: int, graph: StageGraph, times: EmulatedTimes, payload_bytes: int) -> None:
        super().__init__(index=index, num_stages=graph.num_stages, times=times, payload_bytes=payload_bytes)
        targets, spec = graph.takers(Travelling.ACTIVATION, index), TensorSpec(tuple(self._payload.shape))
        self.edges = {other: EdgeTensors([spec]) for other in (*graph.makers(Travelling.ACTIVATION, index), *targets)}
        self._output = dict.fromkeys(targets, (self._payload,))
        self._input_grad = dict.fromkeys(graph.takers(Travelling.GRADIENT, index), (self._payload,))

    def edges_at(self, microbatch: Microbatch) -> Mapping[int, EdgeTensors]:
        return self.edges


@dataclass(frozen=True)
class EmulatedReduction:
    """A reduction of the chain: an all-reduce of `num_bytes` bytes over `group`, if given, and a sleep of `seconds`."""

    num_bytes: int = 0
    group: Any = None
    seconds: float = 0.0

    def run(self, buffer: Tensor | None) -> None:
        if self.group is not None:
            torch.distributed.all_reduce(buffer, group=self.group)
        if self.seconds:
            sleep_for(self.seconds)


class EmulatedUpdate(OptimisticUpdate, PredictingUpdate):
    """A weight update without weights, whose reductions are real and whose other calls sleep.

    Args:
        grad: the reduction of gradients over the replicas.
        embed: the reduction of the gradient of the tied embedding.
        job_group: all ranks of the job, for the reduction of the norm; None for a single rank.
        step_seconds, predict_seconds, hold_seconds: how long these calls sleep.
    """

    def __init__(
        self,
        *,
        grad: EmulatedReduction | None = None,
        embed: EmulatedReduction | None = None,
        job_group: Any = None,
        step_seconds: float = 0.0,
        predict_seconds: float = 0.0,
        hold_seconds: float = 0.0,
    ) -> None:
        self._grad, self._grad_buffer = grad, self._buffer(grad)
        self._embed, self._embed_buffer = embed, self._buffer(embed)
        self._job_group = job_group
        self._step_seconds = step_seconds
        self._predict_seconds = predict_seconds
        self._hold_seconds = hold_seconds
        self._reports: dict[int, BatchReport] = {}
        self._unfinished: dict[int, int] = {}  # version -> calls still to come: step, norm

    @staticmethod
    def _buffer(reduction: EmulatedReduction | None) -> Tensor | None:
        if reduction is None or reduction.group is None:
            return None
        return torch.zeros(max(1, reduction.num_bytes // 4))

    def begin_batch(self, info: BatchInfo) -> None:
        self._reports[info.index + 1] = BatchReport(batch=info.index, num_samples=info.num_samples)
        self._unfinished[info.index + 1] = 2

    def reduce_grad(self, version: int, stage: int) -> None:
        self.reduce_partial(version)

    def reduce_partial(self, version: int) -> None:
        if self._grad is not None:
            self._grad.run(self._grad_buffer)

    def reduce_embed(self, version: int) -> None:
        if self._embed is not None:
            self._embed.run(self._embed_buffer)

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        report = self._report(version)
        sums = all_reduce_norm(
            norm_squared=1.0,
            overflow=False,
            stop_requests=stop_requests,
            losses=losses,
            loss_names=EmulatedStage.loss_names,
            group=self._job_group,
            device=torch.device("cpu"),
        )
        report.grad_norm = sums.norm
        report.stop_requests = sums.stop_requests

    def step(self, version: int, *, with_prediction: bool = False) -> BatchReport:
        sleep_for(self._step_seconds)
        return self._report(version)

    def validate(self, version: int) -> bool:
        """Accept every step."""
        return True

    def hold(self, version: int, num_microbatches: int) -> None:
        sleep_for(self._hold_seconds)

    reduce_partial_embed = reduce_embed

    reads_gradients = True

    def predict(self, version: int, num_microbatches: int) -> None:
        sleep_for(self._predict_seconds)

    def _report(self, version: int) -> BatchReport:
        """Return the report of a batch, and remove it at the second of the calls by `step` and `reduce_norm`."""
        self._unfinished[version] -= 1
        if self._unfinished[version]:
            return self._reports[version]
        del self._unfinished[version]
        return self._reports.pop(version)


class EmulatedStageUpdates(EmulatedUpdate, StagewiseUpdate):
    """An `EmulatedUpdate` of a rank whose stages step separately; the STEP of each stage sleeps for `step_seconds`."""

    def of_stage(self, stage: int) -> _StageStep:
        return _StageStep(step_seconds=self._step_seconds)

    def step(self, version: int) -> BatchReport:
        """Return the report of a batch that all stages have stepped."""
        return self._report(version)


class _StageStep(EmulatedUpdate, StageUpdate):
    """The update of one stage that steps separately."""

    def step(self, version: int) -> None:
        sleep_for(self._step_seconds)


class EmulatedRelayUpdate(EmulatedUpdate, RelayUpdate):
    """An `EmulatedUpdate` of a rank whose weights live on the host: the calls of its lanes sleep.

    Args:
        seconds: kind -> seconds of each stage, as in `Costs.seconds`, for FETCH, FREE, STORE_GRAD, UPDATE, REDUCE_GRAD
            and STEP. A STEP sleeps for the sum over `stages`.
        stages: the stages of this rank.
        job_group: all ranks of the job, for the reduction of the norm; None for a single rank.
    """

    residency = None

    def __init__(
        self, seconds: Mapping[Kind, Sequence[float]], *, stages: Sequence[int], job_group: Any = None
    ) -> None:
        super().__init__(job_group=job_group, step_seconds=sum(seconds[Kind.STEP][stage] for stage in stages))
        self._seconds = seconds

    def reduce_grad(self, version: int, stage: int) -> None:
        sleep_for(self._seconds[Kind.REDUCE_GRAD][stage])

    def fetch(self, stage: int, version: int) -> Callable[[], None]:
        return self._sleep(Kind.FETCH, stage)

    def free(self, stage: int) -> Callable[[], None]:
        return self._sleep(Kind.FREE, stage)

    def store_grad(self, stage: int, version: int) -> Callable[[], None]:
        return self._sleep(Kind.STORE_GRAD, stage)

    def update(self, stage: int, version: int) -> Callable[[], None]:
        return self._sleep(Kind.UPDATE, stage)

    def _sleep(self, kind: Kind, stage: int) -> Callable[[], None]:
        return partial(sleep_for, self._seconds[kind][stage])
