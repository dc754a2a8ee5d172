"""What a task is: which model it needs, which columns, which rows they become, and what an evaluation says."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron.finetuning.data.files import Sample
from megatron.finetuning.data.rows import Rows


@dataclass(frozen=True)
class File:
    """Samples, and where they come from."""

    path: str
    samples: Sequence[Sample]


@dataclass(frozen=True)
class Prepared:
    """`rows(file)`: the samples of one as tensors. `changes`: to the model's configuration."""

    rows: Callable[[File], Rows]
    changes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """`auto_model`: the class of transformers. `keep`: fields of its output that evaluations want beside the loss.
    `prepare(args, processor, file, classes)`: reads of a file, the training one where there is one, what the rows need;
    `classes`: those that the model knows already, and their numbers.
    `summary(name, tensor, batch)`: what metrics need of a kept output. `auto_processor`: the class that makes rows.
    `new_head`: a head begins at random where the model's folder has none, or another task's.
    """

    auto_model: str
    prepare: Callable[[argparse.Namespace, Any, File, Mapping[str, int]], Prepared]
    keep: tuple[str, ...] = ()
    summary: Callable[[str, Tensor, Mapping[str, Tensor]], Tensor] = lambda name, tensor, batch: tensor
    auto_processor: str = "AutoTokenizer"
    new_head: bool = True


def most_likely(name: str, tensor: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The index of the largest score."""
    return tensor.argmax(-1)
