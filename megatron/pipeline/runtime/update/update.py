"""The part of a weight update that is the same for torch's and megatron.core's optimizers, with weights on the device.

`DeviceUpdate` stores the batches in flight with their gradient buffers, and runs the calls of the executor that choose
a buffer or prepare a prediction. Its two subclasses differ in the gradient buffers and the reductions, which are
objects that they pass in, and in the norm and the step, which are their methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.update.versions import WeightVersions


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
    - `_repeat(version)`: makes them by taking the last update again;
    - `_reduction`: an object that reduces gradients over other ranks. `over_data(buffer)` averages a buffer over the
      replicas. `tied_key` is the key of the tied embedding, where its two stages are on different ranks.
      `over_partial_embedding(gradient, over_data=)` adds up the gradients of the embedding on the first and the last
      stage; with `over_data` it averages them over the replicas before.

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
