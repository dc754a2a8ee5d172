"""The microbatches of a run: rows of tensors, the order of the rows, and the data of a microbatch for a stage.

Every rank holds all rows and knows their order, so no sample travels between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy
import torch
from torch import Tensor

from megatron.capture.cut import StageData
from megatron.capture.randomness import Draw
from megatron.finetuning.data.lengths import Lengths, Widths, order_of
from megatron.pipeline.runtime.contract.stage import EVALUATION_BATCH, Microbatch

IGNORED = -100
"""The label that transformers' losses ignore."""

Metrics = Callable[[Mapping[str, Tensor], float], dict[str, float]]
"""(summaries of the model's outputs for all rows, by name; mean loss) -> value by the name of the metric."""

Microbatches = tuple[tuple[int, ...], ...]
"""The row numbers of a batch, by microbatch."""


class Evaluated(Protocol):
    """The rows that an evaluation runs forward, by their numbers.

    Attributes:
        lengths: the lengths of the rows; None if all rows are padded to the same length.
    """

    lengths: Lengths | None

    def batch(self, indices: Sequence[int], size: int) -> dict[str, Tensor]:
        """The rows with the numbers `indices` as the tensors of a microbatch, filled up to `size` rows."""


MEASURED_TOGETHER = 4096
"""The number of rows whose lengths are found at once."""


class Rows:
    """Samples as tensors of one shape, in memory. After `measure` a microbatch may leave out padding.

    Args:
        tensors: name -> [rows, ...], as the model's forward takes them.
        ignored: name of a tensor of labels -> the label that the loss ignores, which may be NaN.
        num_terms: int64 [rows]; the number of terms (tokens or samples) over which the loss of a row is averaged.
        metrics: computes the metrics of an evaluation of all rows.
        notes: sentences for the user on how the samples were prepared.
        targets: names of tensors of labels, [rows, tokens], whose tokens are not the tokens of the inputs.

    Attributes:
        lengths: the lengths of the rows; None before `measure`.
    """

    lengths: Lengths | None = None

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        ignored: Mapping[str, float],
        num_terms: Tensor,
        metrics: Metrics = lambda predictions, loss: {},
        notes: Sequence[str] = (),
        targets: Collection[str] = (),
    ) -> None:
        self._tensors, self._ignored, self._num_terms, self.metrics = dict(tensors), ignored, num_terms, metrics
        self.notes, self._targets = tuple(notes), tuple(targets)

    def __len__(self) -> int:
        return len(self._num_terms)

    def batch(self, indices: Sequence[int], size: int, *, whole: bool = False) -> dict[str, Tensor]:
        """The rows with the numbers `indices`, filled up to `size` with copies of the last row with ignored labels.

        Row r has the number r + e x the number of rows in epoch e. `whole`: with all padding.
        """
        filled = [*indices, *[indices[-1]] * (size - len(indices))]
        batch = self._take([number % len(self) for number in filled])
        for name, value in self._ignored.items():
            batch[name][len(indices) :] = value
        return batch if self.lengths is None or whole else self.lengths.cut(batch, self.lengths.widths(indices))

    def _take(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Copies of the rows with these numbers. A subclass that keeps rows elsewhere overrides this method."""
        chosen = torch.tensor(indices)
        return {name: tensor[chosen] for name, tensor in self._tensors.items()}

    def measure(self, multiple: int | None) -> None:
        """Find the length of each row; `multiple`: as `Lengths` takes it.

        Raises ValueError for rows without a mask of padding, and with padding before their tokens.
        """
        first = self._take([0])
        if "attention_mask" not in first:
            raise ValueError(
                "--pad_to_multiple_of and --group_by_length need the length of each row, and the tokenizer makes no "
                "attention_mask; name it in the tokenizer's model_input_names"
            )
        found = []
        for start in range(0, len(self), MEASURED_TOGETHER):
            part = self._take(range(start, min(start + MEASURED_TOGETHER, len(self))))
            if not part["attention_mask"][:, 0].all():
                raise ValueError(
                    "--pad_to_multiple_of and --group_by_length are for padding behind the tokens, and the tokenizer "
                    'puts it before them; set "padding_side": "right" in its tokenizer_config.json'
                )
            counted = [part["attention_mask"], *(part[name] != self._ignored[name] for name in self._targets)]
            found.append(torch.stack([each.sum(1) for each in counted], 1))
        place_of = {name: int(name in self._targets) for name, tensor in first.items() if tensor.dim() == 2}
        longest = tuple(first[name].shape[1] for name in ("attention_mask", *self._targets))
        self.lengths = Lengths(torch.cat(found), place_of, longest, multiple=multiple)

    def joined(self, outputs: Sequence[Tensor]) -> Tensor:
        """The outputs of all microbatches of an evaluation, [rows, ...], as if no padding had been left out."""
        if self.lengths is not None and outputs[0].dim() > 1:
            place = len(self._targets)  # outputs are of the targets' tokens, if there are any
            outputs = [self.lengths.padded(output, place) for output in outputs]
        return torch.cat(list(outputs))

    def convert(self, dtype: torch.dtype) -> None:
        """Convert floating-point tensors except labels, such as images, to the dtype of the model."""
        for name, tensor in self._tensors.items():
            if tensor.is_floating_point() and name not in self._ignored:
                self._tensors[name] = tensor.to(dtype)

    def num_terms(self, indices: Sequence[int]) -> int:
        """The number of terms over which the loss of the rows `indices` is averaged."""
        return int(self._num_terms[torch.tensor([*indices]) % len(self)].sum())


class Epochs:
    """The order of rows: shuffled anew for each epoch, the same on every rank, and restored from a count of batches.

    Row numbers continue from epoch to epoch, as `Rows.batch` takes them, so data may differ between epochs.

    A batch has `accumulation` microbatches of `micro_batch_size` rows, over all replicas. The last batch of an epoch
    has the remaining rows; with `drop_last` a short last batch is left out. `lengths`: int64 [rows]; rows of similar
    lengths make a batch; None: the order does not depend on lengths.

    Raises ValueError if there are too few rows for any batch.
    """

    def __init__(
        self, *, num_samples: int, micro_batch_size: int, accumulation: int, seed: int, drop_last: bool,
        lengths: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._num_samples, self._micro_batch_size, self._seed = num_samples, micro_batch_size, seed
        self._lengths = lengths
        self._batch_size = micro_batch_size * accumulation
        self.batches_per_epoch = num_samples // self._batch_size if drop_last else -(-num_samples // self._batch_size)
        if self.batches_per_epoch == 0:
            raise ValueError(
                f"{num_samples} samples make no batch of {self._batch_size} (--per_device_train_batch_size x "
                "--gradient_accumulation_steps x --data_parallel_size); give more, smaller batches, or leave out "
                "--dataloader_drop_last"
            )

    def batches(self, done: int = 0) -> Iterator[Microbatches]:
        """Yield the batches of a run after its first `done` batches, without end."""
        while True:
            epoch, place = divmod(done, self.batches_per_epoch)
            order = [number + epoch * self._num_samples for number in self._order(epoch)]
            for first in range(place * self._batch_size, self.batches_per_epoch * self._batch_size, self._batch_size):
                rows, size = order[first : first + self._batch_size], self._micro_batch_size
                yield tuple(tuple(rows[start : start + size]) for start in range(0, len(rows), size))
                done += 1

    def _order(self, epoch: int) -> list[int]:
        generator = numpy.random.default_rng((self._seed, epoch))
        if self._lengths is None:
            return generator.permutation(self._num_samples).tolist()
        return order_of(self._lengths, self._batch_size, int(generator.integers(2**63)))


@dataclass(frozen=True)
class Share:
    """The microbatches of one pipeline: every `replicas`-th of a batch, from the number `replica` on.

    All pipelines run the same number of microbatches, a multiple of `together`. If a batch has no more for a pipeline,
    the pipeline runs a row again with weight 0.

    Attributes:
        together: the number of replicas whose microbatches the pipeline runs, if its program is that of all replicas.
    """

    replica: int = 0
    replicas: int = 1
    together: int = 1

    def num_of(self, num_microbatches: int) -> int:
        """The number of microbatches that each pipeline runs of a batch of `num_microbatches`."""
        return -(-num_microbatches // (self.replicas * self.together)) * self.together

    def of(self, microbatches: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """This pipeline's microbatches, as row numbers; one row in the place of a missing microbatch."""
        numbers = range(self.replica, self.num_of(len(microbatches)) * self.replicas, self.replicas)
        return [microbatches[number] if number < len(microbatches) else microbatches[-1][:1] for number in numbers]


class Feed:
    """The source of a stage's data: a call with a microbatch returns its data.

    All stages of the rank ask for a microbatch, in forwards and in recomputes, so it is kept until `forget`.

    A model's loss is the mean over the terms of a microbatch, and the runtime takes the mean over the microbatches of a
    batch and over the replicas. Each microbatch is weighted by its number of terms, so that all terms of a batch have
    the same weight.

    Args:
        training: the rows to train on; None if nothing is trained.
        size: rows of a microbatch.
        seed: the seed of the run, which determines dropout, together with the number of a microbatch in the run.
        first_microbatch: the number of microbatches before this run, over all replicas.

    Attributes:
        share: the microbatches of this rank's pipeline.
        num_microbatches: the number of microbatches up to the last batch that was added, over all replicas.
    """

    def __init__(
        self,
        training: Rows | None,
        *,
        size: int,
        seed: int,
        share: Share = Share(),
        first_microbatch: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.training = training
        self.share, self.num_microbatches = share, first_microbatch
        self._size, self._seed, self._device = size, seed, torch.device(device)
        self._indices: dict[int, tuple[int, Sequence[int]]] = {}  # microbatch -> its number in the run, row numbers
        self._terms: dict[int, list[int]] = {}  # batch -> terms of each microbatch of all replicas
        self._made: dict[int, StageData] = {}  # by microbatch
        self._evaluated: Evaluated | None = None
        self._positions: list[tuple[int, Sequence[int]]] = []  # the number of a microbatch over all replicas, its rows

    def add(self, batch: int, first_microbatch: int, microbatches: Sequence[Sequence[int]]) -> int:
        """Begin a batch; returns the number of microbatches that each pipeline runs.

        `microbatches`: the row numbers of each of its microbatches, over all replicas.
        """
        replicas, own = self.share.replicas, self.share.of(microbatches)
        for position, indices in enumerate(own):
            number = self.num_microbatches + position * replicas + self.share.replica
            self._indices[first_microbatch + position] = number, indices
        terms = [self.training.num_terms(indices) for indices in microbatches]
        self._terms[batch] = terms + [0] * (len(own) * replicas - len(terms))
        self.num_microbatches += len(microbatches)
        return len(own)

    def forget(self, batch: int, first_microbatch: int) -> None:
        """Delete the data of all batches and microbatches before the given ones."""
        for kept, below in ((self._indices, first_microbatch), (self._made, first_microbatch), (self._terms, batch)):
            for number in [number for number in kept if number < below]:
                del kept[number]

    def abandon(self, num_microbatches: int) -> None:
        """Drop all batches in flight. `num_microbatches`: the number of microbatches before them."""
        for kept in (self._indices, self._made, self._terms):
            kept.clear()
        self.num_microbatches = num_microbatches

    def counts(self, batch: int, num_microbatches: int) -> float:
        """The sum of the weights of a batch's first `num_microbatches`, as the mean over the replicas.

        For a whole batch the sum is the number of its microbatches.
        """
        terms, replicas = self._terms[batch], self.share.replicas
        return sum(terms[: num_microbatches * replicas]) * (len(terms) // replicas) / sum(terms)

    def widths(self, microbatch: Microbatch) -> Widths | None:
        """The tokens to which a microbatch is padded; None if all are padded alike."""
        if microbatch.batch == EVALUATION_BATCH:
            rows, (_, indices) = self._evaluated, self._positions[microbatch.position]
        else:
            rows, (_, indices) = self.training, self._indices[microbatch.index]
        return None if rows.lengths is None else rows.lengths.widths(indices)

    def evaluate(self, rows: Evaluated, microbatches: Sequence[Sequence[int]], *, first: int = 0) -> None:
        """Begin an evaluation of `rows`. The sample of a microbatch's `Draw` is its number over all replicas.

        Args:
            microbatches: the row numbers of each microbatch of this pipeline.
            first: how many microbatches of this pipeline were evaluated before.
        """
        replica, replicas = self.share.replica, self.share.replicas
        numbers = range(first * replicas + replica, (first + len(microbatches)) * replicas, replicas)
        self._evaluated, self._positions = rows, list(zip(numbers, microbatches, strict=True))

    def __call__(self, microbatch: Microbatch) -> StageData:
        if microbatch.batch == EVALUATION_BATCH:
            number, indices = self._positions[microbatch.position]
            return self._data(self._evaluated, indices, number)
        made = self._made.get(microbatch.index)
        if made is None:
            terms, (number, indices) = self._terms[microbatch.batch], self._indices[microbatch.index]
            own = terms[microbatch.position * self.share.replicas + self.share.replica]
            made = self._data(self.training, indices, number, own * len(terms) / sum(terms))
            self._made[microbatch.index] = made
        return made

    def _data(self, rows: Evaluated, indices: Sequence[int], sample: int, weight: float = 1.0) -> StageData:
        tensors = {name: tensor.to(self._device) for name, tensor in rows.batch(indices, self._size).items()}
        return StageData(tensors, Draw(self._seed, sample), weight)
