"""Gradient buffers, the squared norm of gradients, and one small all-reduce per batch for equal decisions of ranks.

Problem: without flushes the first backwards of batch j+1 run while the gradients of batch j are still being reduced and
clipped, so the two batches must not share memory.

Solution: flat buffers, one tensor per dtype, with a view per parameter. Before the first backward of a batch,
``param.grad`` is pointed at the views of a free buffer, and autograd adds to them in place. Replicas all-reduce the
flat tensors.

One float64 vector is summed over all ranks of the job, that is all stages and replicas. It holds the squared norm, the
overflow, the losses and the stop requests (to stop, save or evaluate), so all ranks make the same decisions. Each bit
of the stop requests has its own element, whose sum is positive if any rank makes the request. The vector also holds
measurements of single ranks (rank_metrics): for each measurement every rank has its own element, which is 0 on the
other ranks. It also holds the squared norms of layers, to which each rank adds its part.

**Updates with weights on the device.** `DeviceUpdate` is what torch's and megatron.core's optimizers share: it stores
the batches in flight with their gradient buffers, and runs the calls of the executor that choose a buffer or prepare a
prediction. Its two subclasses differ in the gradient buffers and the reductions, which are objects that they pass in,
and in the norm and the step, which are their methods."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.contract.tensors import as_real
from megatron.pipeline.runtime.update.versions import WeightVersions


class GradientBuffer:
    """One set of gradients, zero at first.

    Attributes:
        flat: one tensor per dtype.
        views: name -> view of a flat tensor with the parameter's shape.
        written: names of the gradients to which a backward has added, if `GradientBuffers` records them.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.flat: list[Tensor] = []
        self.views: dict[str, Tensor] = {}
        self.written: set[str] = set()
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, parameter in parameters.items():
            by_dtype.setdefault(parameter.dtype, []).append(name)
        for dtype, names in by_dtype.items():
            device = parameters[names[0]].device
            flat = torch.zeros(sum(parameters[name].numel() for name in names), dtype=dtype, device=device)
            parts = flat.split([parameters[name].numel() for name in names])
            self.views.update({name: part.view_as(parameters[name]) for name, part in zip(names, parts, strict=True)})
            self.flat.append(flat)

    def zero(self) -> None:
        self.written.clear()
        for flat in self.flat:
            flat.zero_()

    def untouched(self) -> list[str]:
        """The names of the gradients that no backward is known to have written and whose elements are all 0."""
        rest = (name for name in self.views if name not in self.written)
        return [name for name in rest if not self.views[name].count_nonzero()]

    def norm_squared(self, *, leave_out: frozenset[str] = frozenset()) -> Tensor:
        """The squared norm without the gradients in `leave_out`: a float64 scalar, possibly still being computed."""
        norms = [norm_of(view) for name, view in self.views.items() if name not in leave_out]
        return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)

    def scale(self, factor: float) -> None:
        for flat in self.flat:
            flat.mul_(factor)

    def divide(self, divisor: float) -> None:
        for flat in self.flat:
            flat.div_(divisor)


class GradientBuffers:
    """A fixed number of gradient buffers, which batches take and give back.

    `notes_writes`: record in `GradientBuffer.written` the gradients to which backwards add.

    Attributes:
        shown: the buffer to which backwards add now; None if there is none.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], *, num_buffers: int, notes_writes: bool = False
    ) -> None:
        self._parameters = dict(parameters)
        self._free = [GradientBuffer(self._parameters) for _ in range(num_buffers)]
        self.shown: GradientBuffer | None = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._note, name))
            for name, parameter in (self._parameters.items() if notes_writes else ())
        ]

    def _note(self, name: str, parameter: torch.nn.Parameter) -> None:
        if self.shown is not None:
            self.shown.written.add(name)

    def take(self) -> GradientBuffer:
        """Take a free buffer, zero it, and point every parameter's ``grad`` at it."""
        assert self._free, "every gradient buffer still waits for its step: the program needs more gradient buffers"
        buffer = self._free.pop()
        buffer.zero()
        self.show(buffer)
        return buffer

    def show(self, buffer: GradientBuffer | None, *, without: Collection[str] = ()) -> None:
        """Point every parameter's ``grad`` at a buffer; None for the names in `without`, or if there is no buffer."""
        self.shown = buffer
        for name, parameter in self._parameters.items():
            parameter.grad = None if buffer is None or name in without else buffer.views[name]

    def copy_of(self, buffer: GradientBuffer) -> SimpleNamespace:
        """Return a copy of the gradients, with `views` as in `GradientBuffer` and with the same tensors as `flat`."""
        views = {name: view.clone() for name, view in buffer.views.items()}
        return SimpleNamespace(views=views, flat=views.values())

    def give_back(self, buffer: GradientBuffer) -> None:
        self._free.append(buffer)

    def close(self) -> None:
        """Stop recording writes, and set every parameter's ``grad`` to None."""
        self.show(None)
        while self._hooks:
            self._hooks.pop().remove()


def norm_squared(gradients: Iterable[Tensor], *, device: torch.device) -> Tensor:
    """The sum of squares of all elements: a float64 scalar on `device`, possibly still being computed.

    It is the sum of the squares of `norms_of`. Not finite if an element is not finite; 0 if there are no tensors.
    """
    return sum_of_squares(norms_of(gradients), device=device)


def norms_of(gradients: Iterable[Tensor]) -> Sequence[Tensor]:
    """The norm of each tensor: scalars on the tensor's device, in float64 if any tensor is float64, else in FP32."""
    tensors = [as_real(each) for each in gradients]
    is_wide = any(each.dtype is torch.float64 for each in tensors)
    return torch._foreach_norm(tensors, 2, dtype=torch.float64 if is_wide else torch.float32) if tensors else []


def norm_of(gradient: Tensor) -> Tensor:
    """The norm of a tensor: a float64 scalar on its device."""
    return torch.linalg.vector_norm(as_real(gradient), dtype=torch.float64)


def sum_of_squares(norms: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """The sum of the squares of scalar tensors: a float64 scalar on `device`."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(list(norms)).double().square().sum()


CLIP_EPSILON = 1e-6
"""Added to a norm before a quotient by it, as in ``torch.nn.utils.clip_grad_norm_`` and in megatron.core."""


def clip_factor(largest: float, norm: float) -> float:
    """The factor, at most 1, that clips gradients of norm `norm` to the norm `largest`; 0: no clipping."""
    return min(1.0, largest / (norm + CLIP_EPSILON)) if largest > 0.0 else 1.0


NUM_STOP_BITS = 8
KEPT_SUMS = 4
"""The number of the last batches whose sums over all ranks an update keeps, for ranks that lack them after a loss."""


@dataclass(frozen=True)
class NormReduction:
    """The sums over the ranks of the job for one batch.

    Attributes:
        norm_squared: the squared norm of the gradients.
        num_overflows: the number of ranks whose gradients overflowed.
        stop_requests: bits, each set if any rank makes the request.
        losses: name -> (numerator, denominator).
        layers_squared: the squared norm of the gradients of each layer.
        rank_metrics: name -> values in rank order.
    """

    norm_squared: float
    num_overflows: float
    stop_requests: int
    losses: dict[str, tuple[float, float]]
    layers_squared: tuple[float, ...] = ()
    rank_metrics: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def norm(self) -> float:
        return math.sqrt(self.norm_squared)


def all_reduce_norm(
    *,
    norm_squared: float,
    overflow: bool,
    stop_requests: int,
    losses: Mapping[str, tuple[float, float]],
    loss_names: Sequence[str],
    group: Any,
    device: torch.device,
    layers_squared: Sequence[float] = (),
    rank_metrics: Mapping[str, float] | None = None,
) -> NormReduction:
    """Sum the contributions of all ranks of the job. Collective over `group`.

    Args:
        norm_squared: the squared norm of the gradients that this rank counts.
        overflow: whether the gradients of this rank overflowed.
        stop_requests: bits, as in `NormReduction`.
        losses: name -> (numerator, denominator) on this rank; names not in `loss_names` are ignored.
        loss_names: the same on all ranks.
        group: all ranks of the job, as a torch.distributed group or a bare backend that is used for nothing else; None
            for a single rank.
        device: a device on which the group communicates.
        layers_squared: this rank's part of the squared norm of each layer, with the same length on all ranks.
        rank_metrics: measurements of this rank, with the same names on all ranks.

    Raises:
        ValueError: `stop_requests` has a bit beyond the first `NUM_STOP_BITS`.
    """
    if not 0 <= stop_requests < 1 << NUM_STOP_BITS:
        raise ValueError(
            f"stop requests are {stop_requests}; they are {NUM_STOP_BITS} bits, 0 to {(1 << NUM_STOP_BITS) - 1}"
        )
    values = [norm_squared, float(overflow), *(float(stop_requests >> bit & 1) for bit in range(NUM_STOP_BITS))]
    for name in loss_names:
        values.extend(losses.get(name, (0.0, 0.0)))
    values.extend(layers_squared)
    rank_metrics = rank_metrics or {}
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    for value in rank_metrics.values():
        values.extend(float(value) if each == rank else 0.0 for each in range(size))
    if group is not None:
        vector = torch.tensor(values, dtype=torch.float64, device=device)
        group.allreduce([vector]).wait()
        values = vector.tolist()
    bits = values[2 : 2 + NUM_STOP_BITS]
    sums = iter(values[2 + NUM_STOP_BITS :])
    return NormReduction(
        norm_squared=values[0],
        num_overflows=values[1],
        stop_requests=sum(1 << bit for bit, count in enumerate(bits) if count > 0),
        losses={name: (next(sums), next(sums)) for name in loss_names},
        layers_squared=tuple(itertools.islice(sums, len(layers_squared))),
        rank_metrics={name: tuple(itertools.islice(sums, size)) for name in rank_metrics},
    )


@dataclass
class Partial:
    """The sum of the gradients of the first `num_microbatches` microbatches of a batch."""

    gradients: Any  # a gradient buffer, or the tensor of the tied embedding alone
    num_microbatches: int


@dataclass
class Batch:
    """A batch between its first forward and the completion of its report."""

    info: BatchInfo
    report: BatchReport
    buffer: Any = None
    partial: Partial | None = None  # the copy that the prediction reads; None: it reads the buffer
    partial_embed: Partial | None = None


class DeviceUpdate:
    """Base of the `PredictingUpdate` of one rank.

    A subclass adds `reduce_grad`, `reduce_embed`, `reduce_norm`, `step` and

    - `_new_batch(info)`: returns a new `Batch`;
    - `_predict(version, batch, partial, partial_embed)`: makes the predicted weights;
    - `_repeat(version)`: makes the predicted weights by taking the last update again;
    - `_reduction`: an object that reduces gradients over other ranks. `over_data(buffer)` averages a buffer over the
      replicas. `tied_key` is the key of the tied embedding, where its two stages are on different ranks.
      `over_partial_embedding(gradient, over_data=)` adds up the gradients of the embedding on the first and the last
      stage; with `over_data` it first averages them over the replicas.

    Args:
        versions: the weights.
        gradients: the gradient buffers of the rank. `take()` returns a free buffer, zeroed, to which backwards add from
            now on. `show(buffer)` makes backwards add to that buffer again. `copy_of(buffer)` copies the gradients. A
            buffer has `views`: key -> gradient.
        reduces_partial: predictions read the mean of the gradients over the replicas.
        reads_gradients: predictions read gradients; else they take the last update again.
    """

    _reduction: Any

    def __init__(
        self, versions: WeightVersions, gradients: Any, *, reduces_partial: bool, reads_gradients: bool = True
    ) -> None:
        self.versions = versions
        self.reduces_partial = reduces_partial
        self.reads_gradients = reads_gradients
        self._gradients = gradients
        self._batches: dict[int, Any] = {}  # key: the version that the batch's step makes

    def begin_batch(self, info: BatchInfo) -> None:
        self._batches[info.index + 1] = self._new_batch(info)

    def begin_backward(self, info: BatchInfo) -> None:
        self._batches[info.index + 1].buffer = self._gradients.take()

    def resume_backward(self, info: BatchInfo) -> None:
        self._gradients.show(self._batches[info.index + 1].buffer)

    def begin_evaluation(self) -> None:
        self.show_newest()

    def show_newest(self) -> None:
        """Show the newest weights in the parameters; called while drained.

        With predicted weights the call is collective over the replicas.
        """
        self.versions.show_newest()

    def hold(self, version: int, num_microbatches: int) -> None:
        batch = self._batches[version]
        batch.partial = Partial(self._gradients.copy_of(batch.buffer), num_microbatches)

    def hold_embed(self, version: int, num_microbatches: int) -> None:
        batch = self._batches[version]
        batch.partial_embed = Partial(batch.buffer.views[self._reduction.tied_key].clone(), num_microbatches)

    def reduce_partial(self, version: int) -> None:
        self._reduction.over_data(self._batches[version].partial.gradients)

    def reduce_partial_embed(self, version: int) -> None:
        gradient = self._batches[version].partial_embed.gradients
        self._reduction.over_partial_embedding(gradient, over_data=self.reduces_partial)

    def predict(self, version: int, num_microbatches: int) -> None:
        if not self.reads_gradients:
            self._repeat(version)
            return
        batch = self._batches[version]
        self._predict(version, batch, batch.partial or Partial(batch.buffer, num_microbatches), batch.partial_embed)
        batch.partial = batch.partial_embed = None
