"""Samples as tensors of one shape, all in memory: what every task becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

IGNORED = -100
"""A label that no loss of transformers counts."""

Metrics = Callable[[Mapping[str, Tensor], float], dict[str, float]]
"""(summaries of all samples by name, mean loss) -> name and value."""


class Rows:
    """`tensors`: name -> [samples, ...], as the model's forward takes them. `ignored`: of those that say what is to be
    learned, the value that counts nothing. `num_terms`: of each sample, over how many terms its loss is a mean.
    `metrics`: of an evaluation of all rows.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        ignored: Mapping[str, int],
        num_terms: Tensor,
        metrics: Metrics = lambda predictions, loss: {},
    ) -> None:
        self._tensors, self._ignored = dict(tensors), dict(ignored)
        self._num_terms, self._metrics = num_terms, metrics

    def __len__(self) -> int:
        return len(self._num_terms)

    def batch(self, indices: Sequence[int], size: int) -> dict[str, Tensor]:
        """Those rows, filled up to `size` with copies of the last that count nothing, so the mean loss is theirs."""
        chosen = torch.tensor([*indices, *[indices[-1]] * (size - len(indices))])
        batch = {name: tensor[chosen] for name, tensor in self._tensors.items()}
        for name, value in self._ignored.items():
            batch[name][len(indices) :] = value
        return batch

    def convert(self, dtype: torch.dtype) -> None:
        """Have tensors of floating dtype, such as images, in that of the model."""
        self._tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in self._tensors.items()
        }

    def num_terms(self, indices: Sequence[int]) -> int:
        """Over how many terms the loss of these samples is a mean."""
        return int(self._num_terms[list(indices)].sum())

    def metrics(self, predictions: Mapping[str, Tensor], loss: float) -> dict[str, float]:
        """The metrics of an evaluation of all rows, from the summaries of what the model gave for each."""
        return self._metrics(predictions, loss)
