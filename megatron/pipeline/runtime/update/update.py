"""The weight update of a rank whose weights live on the device: its batches, gradients held, and predictions.

`DeviceUpdate` keeps what every such update keeps, by the version that a batch leads to. What differs between a torch
optimizer and megatron.core's is an adapter: the gradient buffers, the reduction over other ranks, and in subclasses the
norm and the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.update.versions import WeightVersions


@dataclass
class Partial:
    """The sum of the gradients of some microbatches of a batch: as a buffer, or that of the tied embedding."""

    gradients: Any
    num_microbatches: int


@dataclass
class Batch:
    """A batch between its first forward and its completed report."""

    info: BatchInfo
    report: BatchReport
    buffer: Any = None
    partial: Partial | None = None  # what a prediction reads, where that is not the buffer
    partial_embed: Partial | None = None


class DeviceUpdate:
    """`PredictingUpdate` of one rank. Subclasses add `reduce_grad`, `reduce_embed`, `reduce_norm`, `step` and

    - `_new_batch(info)`: the `Batch` of one that begins;
    - `_predict(version, batch, partial, partial_embed)`: makes predicted weights;
    - `_repeat(version)`: makes them by taking the last update again.

    Args:
        versions: the weights.
        gradients: the buffers of a rank. `take()`: a free one, zeroed, to which backwards add from now on;
            `show(buffer)`: they add to this one again; `copy_of(buffer)`. A buffer has `views`: key -> gradient.
        reduces_partial: predictions read the mean over the replicas.
        reads_gradients: predictions read gradients; else they take the last update again.

    The attribute `_reduction` has the sums over other ranks. `over_data(buffer)` averages over the replicas;
    `tied_key` is the key of the tied embedding, where its stages are on two ranks;
    `over_partial_embedding(gradient, over_data=)` adds up both stages' gradients of it, after an average.
    """

    _reduction: Any

    def __init__(
        self, versions: WeightVersions, gradients: Any, *, reduces_partial: bool, reads_gradients: bool = True
    ) -> None:
        self.versions = versions
        self.reduces_partial = reduces_partial
        self.reads_gradients = reads_gradients
        self._gradients = gradients
        self._batches: dict[int, Any] = {}  # by the version that each leads to

    def begin_batch(self, info: BatchInfo) -> None:
        self._batches[info.index + 1] = self._new_batch(info)

    def begin_backward(self, info: BatchInfo) -> None:
        self._batches[info.index + 1].buffer = self._gradients.take()

    def resume_backward(self, info: BatchInfo) -> None:
        self._gradients.show(self._batches[info.index + 1].buffer)

    def begin_evaluation(self) -> None:
        self.show_newest()

    def show_newest(self) -> None:
        """Drained: show the newest weights in the parameters. Collective over replicas of predicted weights."""
        self.versions.show_newest()

    # Predictions.

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
