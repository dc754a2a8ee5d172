"""Class labels: texts or numbers, as numbers from 0."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.documents.reading import require_characters
from megatron.finetuning.data.files import column
from megatron.finetuning.data.rows import Metrics
from megatron.finetuning.tasks.task import File


class Labels:
    """The classes of a file, in order; or those that the model knows, if they are all of them. `name`: of the column.

    Raises ValueError for a column with a single one, or with one for each sample of a hundred and more, as scores have.
    """

    def __init__(self, file: File, name: str, known: Mapping[str, int]) -> None:
        self.column = name
        values = {_plain(file, number, name) for number, _ in enumerate(file.samples)}
        if values <= known.keys():
            self.names = sorted(known, key=known.__getitem__)
            self._number = dict(known)
            return
        if len(values) < 2:
            raise ValueError(f"{file.path}: {name!r} has the value {values.pop()} alone; two classes are needed")
        if len(values) == len(file.samples) >= 100:
            raise ValueError(
                f"{file.path}: {name!r} has another value in each of {len(values)} samples, so it is no class; name "
                "another with --label_column"
            )
        numeric = all(re.fullmatch("-?[0-9]+", value) for value in values)
        self.names = sorted(values, key=int if numeric else str)
        self._number = {name: number for number, name in enumerate(self.names)}

    @property
    def changes(self) -> dict[str, object]:
        """Changes to the model's configuration."""
        return {"num_labels": len(self.names), "id2label": dict(enumerate(self.names)), "label2id": dict(self._number)}

    def of(self, file: File) -> Tensor:
        """int64 [samples]. Raises ValueError for a class that the first file has not."""
        column(file.samples, file.path, self.column, (), "label")
        found = []
        for number, _ in enumerate(file.samples):
            name = _plain(file, number, self.column)
            if name not in self._number:
                raise ValueError(
                    f"{file.path}, sample {number + 1}: the label {name!r} is not one of the model's, which "
                    f"are those of the training file: {', '.join(self.names[:10])}; leave the sample out"
                )
            found.append(self._number[name])
        return torch.tensor(found)


def accuracy(labels: Tensor) -> Metrics:
    """The part of samples whose most likely class is theirs."""

    def metrics(predictions: Mapping[str, Tensor], loss: float) -> dict[str, float]:
        return {"accuracy": (predictions["logits"] == labels).double().mean().item()}

    return metrics


def _plain(file: File, number: int, name: str) -> str:
    value = file.samples[number][name]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError(
            f"{file.path}, sample {number + 1}: {name!r} is {value!r}, and a class is a text or a whole number; mend it"
        )
    if value == "":
        raise ValueError(
            f"{file.path}, sample {number + 1}: {name!r} is empty; name its class, or leave the sample out"
        )
    return require_characters(str(value), f"{file.path}, sample {number + 1}: {name!r}")
