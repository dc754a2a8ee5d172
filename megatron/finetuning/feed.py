"""What the stages of a rank take of a microbatch: its samples as tensors, and who draws its random numbers.

Every rank has the data and the same order of samples, so nothing of it travels. A microbatch is asked for by each of
the rank's stages, in forwards and in recomputes, and is kept until its batch is through.

A model's loss is the mean over the terms of a microbatch, and the runtime takes the mean over a batch's microbatches.
So that each term counts alike in the batch, a microbatch weighs by how many it has. Every rank knows that before the
batch begins, and so does a stage that steps by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.capture.randomness import Draw
from megatron.capture.stage import StageData
from megatron.finetuning.data.rows import Rows
from megatron.pipeline.runtime.contract.stage import EVALUATION_BATCH, Microbatch


class Feed:
    """Called with a microbatch, returns what a stage takes of it.

    `training`: the samples to train on, None where nothing is trained. `size`: samples of a microbatch. `seed`: the
    run's.
    """

    def __init__(self, training: Rows | None, *, size: int, seed: int, device: torch.device | str = "cpu") -> None:
        self._training = training
        self._size, self._seed, self._device = size, seed, torch.device(device)
        self._indices: dict[int, Sequence[int]] = {}  # of the microbatches to come and in flight
        self._terms: dict[int, list[int]] = {}  # of their batches, in each microbatch
        self._made: dict[int, StageData] = {}
        self._evaluated: Rows | None = None
        self._positions: list[Sequence[int]] = []

    def add(self, batch: int, first_microbatch: int, microbatches: Sequence[Sequence[int]]) -> None:
        """A batch begins: the indices of each of its microbatches."""
        self._indices.update(enumerate(microbatches, start=first_microbatch))
        self._terms[batch] = [self._training.num_terms(each) for each in microbatches]

    def forget(self, batch: int, first_microbatch: int) -> None:
        """Nothing before this batch, and its first microbatch, will be asked for again."""
        for kept, below in ((self._indices, first_microbatch), (self._made, first_microbatch), (self._terms, batch)):
            for each in [each for each in kept if each < below]:
                del kept[each]

    def counts(self, batch: int, num_microbatches: int) -> float:
        """What so many first microbatches of a batch weigh together; see `ModuleUpdate`."""
        return self._weight(batch, slice(num_microbatches))

    def _weight(self, batch: int, part: slice) -> float:
        terms = self._terms[batch]
        return sum(terms[part]) * len(terms) / sum(terms)

    def evaluate(self, rows: Rows, microbatches: Sequence[Sequence[int]]) -> None:
        """An evaluation of these indices follows."""
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
        tensors = {name: each.to(self._device) for name, each in rows.batch(indices, self._size).items()}
        return StageData(tensors, Draw(self._seed, sample), weight)
