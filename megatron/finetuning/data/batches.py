"""The microbatches of a run: rows of tensors, the order of the rows, and the data of a microbatch for a stage.

Every rank holds all rows and knows their order, so no sample travels between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy
import torch
from torch import Tensor

from megatron.capture.cut import StageData
from megatron.capture.randomness import Draw
from megatron.pipeline.runtime.contract.stage import EVALUATION_BATCH, Microbatch

IGNORED = -100
"""The label that transformers' losses ignore."""

Metrics = Callable[[Mapping[str, Tensor], float], dict[str, float]]
"""(summaries of the model's outputs for all rows, by name; mean loss) -> value by the name of the metric."""

Microbatches = tuple[tuple[int, ...], ...]
"""The row numbers of a batch, by microbatch."""


class Rows:
    """Samples as tensors of one shape, all in memory.

    Args:
        tensors: name -> [rows, ...], as the model's forward takes them.
        ignored: name of a tensor of labels -> the label that the loss ignores.
        num_terms: int64 [rows]; the number of terms (tokens or samples) over which the loss of a row is averaged.
        metrics: computes the metrics of an evaluation of all rows.
        notes: sentences for the user on what became of the samples.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        ignored: Mapping[str, int],
        num_terms: Tensor,
        metrics: Metrics = lambda predictions, loss: {},
        notes: Sequence[str] = (),
    ) -> None:
        self._tensors, self._ignored, self._num_terms, self.metrics = dict(tensors), ignored, num_terms, metrics
        self.notes = tuple(notes)

    def __len__(self) -> int:
        return len(self._num_terms)

    def batch(self, indices: Sequence[int], size: int) -> dict[str, Tensor]:
        """The rows with the numbers `indices`, filled up to `size` with copies of the last row with ignored labels."""
        chosen = torch.tensor([*indices, *[indices[-1]] * (size - len(indices))])
        batch = {name: tensor[chosen] for name, tensor in self._tensors.items()}
        for name, value in self._ignored.items():
            batch[name][len(indices) :] = value
        return batch

    def convert(self, dtype: torch.dtype) -> None:
        """Convert floating-point tensors, such as images, to the dtype of the model."""
        for name, tensor in self._tensors.items():
            self._tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor

    def num_terms(self, indices: Sequence[int]) -> int:
        """The number of terms over which the loss of the rows `indices` is averaged."""
        return int(self._num_terms[list(indices)].sum())


class Epochs:
    """The order of rows: shuffled anew for each epoch, the same on every rank, and restored from a count of batches.

    A batch has `accumulation` microbatches of `micro_batch_size` rows. The last batch of an epoch has the remaining
    rows; with `drop_last` a short last batch is left out.

    Raises ValueError if there are too few rows for any batch.
    """

    def __init__(
        self, *, num_samples: int, micro_batch_size: int, accumulation: int, seed: int, drop_last: bool
    ) -> None:
        self._num_samples, self._micro_batch_size, self._seed = num_samples, micro_batch_size, seed
        self._batch_size = micro_batch_size * accumulation
        self.batches_per_epoch = num_samples // self._batch_size if drop_last else -(-num_samples // self._batch_size)
        if self.batches_per_epoch == 0:
            raise ValueError(
                f"{num_samples} samples make no batch of {self._batch_size} (--per_device_train_batch_size x "
                "--gradient_accumulation_steps); give more, smaller batches, or leave out --dataloader_drop_last"
            )

    def batches(self, done: int = 0) -> Iterator[Microbatches]:
        """Yield the batches of a run after its first `done` batches, without end."""
        while True:
            epoch, place = divmod(done, self.batches_per_epoch)
            order = numpy.random.default_rng((self._seed, epoch)).permutation(self._num_samples).tolist()
            for first in range(place * self._batch_size, self.batches_per_epoch * self._batch_size, self._batch_size):
                rows, size = order[first : first + self._batch_size], self._micro_batch_size
                yield tuple(tuple(rows[start : start + size]) for start in range(0, len(rows), size))
                done += 1


class Feed:
    """The source of a stage's data: a call with a microbatch returns its data.

    All stages of the rank ask for a microbatch, in forwards and in recomputes, so it is kept until `forget`.

    A model's loss is the mean over the terms of a microbatch, and the runtime takes the mean over the microbatches of a
    batch. Each microbatch is weighted by its number of terms, so that all terms of a batch have the same weight.

    Args:
        training: the rows to train on; None if nothing is trained.
        size: rows of a microbatch.
        seed: the seed of the run, which determines dropout.
    """

    def __init__(self, training: Rows | None, *, size: int, seed: int, device: torch.device | str = "cpu") -> None:
        self._training = training
        self._size, self._seed, self._device = size, seed, torch.device(device)
        self._indices: dict[int, Sequence[int]] = {}  # microbatch -> row numbers
        self._terms: dict[int, list[int]] = {}  # batch -> terms of each microbatch
        self._made: dict[int, StageData] = {}  # by microbatch
        self._evaluated: Rows | None = None
        self._positions: list[Sequence[int]] = []

    def add(self, batch: int, first_microbatch: int, microbatches: Sequence[Sequence[int]]) -> None:
        """Begin a batch. `microbatches`: the row numbers of each of its microbatches."""
        self._indices.update(enumerate(microbatches, start=first_microbatch))
        self._terms[batch] = [self._training.num_terms(indices) for indices in microbatches]

    def forget(self, batch: int, first_microbatch: int) -> None:
        """Delete the data of all batches and microbatches before the given ones."""
        for kept, below in ((self._indices, first_microbatch), (self._made, first_microbatch), (self._terms, batch)):
            for number in [number for number in kept if number < below]:
                del kept[number]

    def counts(self, batch: int, num_microbatches: int) -> float:
        """The sum of the weights of a batch's first `num_microbatches`; over a whole batch, it is their number."""
        return self._weight(batch, slice(num_microbatches))

    def _weight(self, batch: int, part: slice) -> float:
        terms = self._terms[batch]
        return sum(terms[part]) * len(terms) / sum(terms)

    def evaluate(self, rows: Rows, microbatches: Sequence[Sequence[int]]) -> None:
        """Begin an evaluation of `rows`. `microbatches`: the row numbers of each microbatch."""
        self._evaluated, self._positions = rows, list(microbatches)

    def __call__(self, microbatch: Microbatch) -> StageData:
        if microbatch.batch == EVALUATION_BATCH:
            return self._data(self._evaluated, self._positions[microbatch.position], microbatch.index)
        made = self._made.get(microbatch.index)
        if made is None:
            weight = self._weight(microbatch.batch, slice(microbatch.position, microbatch.position + 1))
            made = self._data(self._training, self._indices[microbatch.index], microbatch.index, weight)
            self._made[microbatch.index] = made
        return made

    def _data(self, rows: Rows, indices: Sequence[int], sample: int, weight: float = 1.0) -> StageData:
        tensors = {name: tensor.to(self._device) for name, tensor in rows.batch(indices, self._size).items()}
        return StageData(tensors, Draw(self._seed, sample), weight)
