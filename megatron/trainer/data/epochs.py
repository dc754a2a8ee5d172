"""Samples that come again, epoch after epoch, in a new order each time.

A run counts positions: position i is sample i % n of epoch i // n, and the order of an epoch depends on the seed and
its number only. Neither replicas nor microbatches, nor where a run was resumed, are part of that; an epoch's last
samples and the next one's first may be in one batch, so none is left out. No random augmentation: a sample is the same
whenever it comes, and `sample_id` says which it is.
"""

from typing import Protocol

import numpy
import torch


class Samples(Protocol):
    """What is read: as many as its length, each a dictionary of numbers and arrays; `digest` says which they are."""

    digest: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict: ...


class EpochSamples(torch.utils.data.Dataset):
    """The positions of a run.

    Args:
        samples: of one epoch.
        seed: the run's.
        length: positions that the run takes.
    """

    samples_repeat = True
    """Whether a number of `sample_id` stands for one sample, the same in every epoch and every run over these data."""

    def __init__(self, samples: Samples, *, seed: int, length: int) -> None:
        self.samples, self.seed, self.length = samples, seed, length
        self._epoch, self._order = -1, numpy.empty(0, dtype=numpy.int64)

    @property
    def digest(self) -> str:
        """The digest of the data, without their order."""
        return self.samples.digest

    def __len__(self) -> int:
        return self.length

    def sample_id(self, index: int) -> int:
        """The number of the sample at a position, from 0 to less than the samples of an epoch."""
        epoch, place = divmod(index, len(self.samples))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, order_of_epoch(len(self.samples), seed=self.seed, epoch=epoch)
        return int(self._order[place])

    def __getitem__(self, index: int) -> dict:
        number = self.sample_id(index)
        return {**self.samples[number], "counts": 1.0, "sample_id": number}


class EvaluationSamples(torch.utils.data.Dataset):
    """All samples once, in order, and then fillers that do not count, up to whole batches.

    Args:
        samples: of the data.
        batch_size: samples in a batch over all replicas.
        per_evaluation: samples that an evaluation takes, a multiple of that.
    """

    samples_repeat = True

    def __init__(self, samples: Samples, *, batch_size: int, per_evaluation: int) -> None:
        self.samples = samples
        self.length = max(per_evaluation, -(-len(samples) // batch_size) * batch_size)
        self.starts_over = self.length == per_evaluation
        """Whether every evaluation begins with the first sample."""

    @property
    def digest(self) -> str:
        return self.samples.digest

    def __len__(self) -> int:
        return self.length

    def sample_id(self, index: int) -> int:
        """The number of the sample at a position; of a filler, one of those that counted before."""
        return index % len(self.samples)

    def __getitem__(self, index: int) -> dict:
        number = self.sample_id(index)
        return {**self.samples[number], "counts": float(index < len(self.samples)), "sample_id": number}


def order_of_epoch(num_samples: int, *, seed: int, epoch: int) -> numpy.ndarray:
    """The samples of an epoch in the order in which they are taken, int64 [num_samples]."""
    return numpy.random.RandomState([seed, epoch]).permutation(num_samples)  # its numbers are numpy's promise
