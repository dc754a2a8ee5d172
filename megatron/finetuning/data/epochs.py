"""The order of samples: shuffled anew for each epoch, the same on every rank, and found again by a count of batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy

Microbatches = tuple[tuple[int, ...], ...]
"""The indices of a batch's samples, microbatch by microbatch."""


class Epochs:
    """Batches of `accumulation` microbatches of `micro_batch_size` samples.

    The last batch of an epoch has fewer microbatches, and the last of these fewer samples, where the epoch ends; with
    `drop_last` such a batch is left out.

    Raises ValueError where nothing is left.
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
        """The batches behind the first `done` of a run, without end."""
        while True:
            epoch, place = divmod(done, self.batches_per_epoch)
            order = self._order(epoch)
            for first in range(place * self._batch_size, self.batches_per_epoch * self._batch_size, self._batch_size):
                yield self._microbatches(order[first : first + self._batch_size])
                done += 1

    def _order(self, epoch: int) -> numpy.ndarray:
        return numpy.random.default_rng((self._seed, epoch)).permutation(self._num_samples)

    def _microbatches(self, samples: numpy.ndarray) -> Microbatches:
        size = self._micro_batch_size
        return tuple(tuple(map(int, samples[first : first + size])) for first in range(0, len(samples), size))
