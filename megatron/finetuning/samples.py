"""The data of a run: what is trained on, what is evaluated, and what the model has to be for it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.finetuning.data.files import read_samples
from megatron.finetuning.data.rows import Rows
from megatron.finetuning.model import check_folder, first_line, read_config, require_transformers
from megatron.finetuning.tasks import TASKS, File, Task

_PROCESSOR_FILES = {
    "AutoTokenizer": ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model"),
    "AutoImageProcessor": ("preprocessor_config.json",),
}


@dataclass(frozen=True)
class Data:
    """`changes`: to the model's configuration. `processor`: tokenizer or image processor, None where images need none.
    `training`, `validation`: None where not asked for.
    """

    task: Task
    processor: Any
    changes: Mapping[str, object]
    training: Rows | None
    validation: Rows | None

    def example(self, size: int) -> dict[str, Tensor]:
        """A microbatch of real samples."""
        rows = self.training or self.validation
        return rows.batch([number % len(rows) for number in range(size)], size)


def read_data(args: argparse.Namespace) -> Data:
    """Read the files that the flags name. Raises ValueError for what is wrong with them."""
    task, classes = TASKS[args.task], _classes(args.model_name_or_path)
    processor = _processor(args.model_name_or_path, task.auto_processor)
    training, validation = (
        File(path, read_samples(path, limit=limit)) if path is not None else None
        for path, limit in (
            (args.train_file if args.do_train or not args.do_eval else None, args.max_train_samples),
            (args.validation_file if args.do_eval else None, args.max_eval_samples),
        )
    )
    prepared = task.prepare(args, processor, training or validation, classes)
    return Data(
        task,
        processor,
        prepared.changes,
        None if training is None else _of_type(prepared.rows(training), args),
        None if validation is None else _of_type(prepared.rows(validation), args),
    )


def _classes(folder: str) -> dict[str, int]:
    """The classes that a model of this task knows already; those without names of their own are none."""
    classes = read_config(folder).label2id or {}
    return {} if any(re.fullmatch("LABEL_[0-9]+", str(name)) for name in classes) else dict(classes)


def _of_type(rows: Rows, args: argparse.Namespace) -> Rows:
    rows.convert(getattr(torch, args.dtype))
    return rows


def _processor(folder: str, auto_processor: str) -> Any:
    """From the model's folder. Raises ValueError for texts without a tokenizer."""
    transformers, path = require_transformers(), check_folder(folder)
    if not any((path / name).is_file() for name in _PROCESSOR_FILES[auto_processor]):
        if auto_processor == "AutoTokenizer":
            raise ValueError(f"{folder} has no tokenizer; save it there with tokenizer.save_pretrained")
        return None
    try:
        return getattr(transformers, auto_processor).from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of a damaged file any
        raise ValueError(
            f"the {auto_processor} of {folder} cannot be read: {type(error).__name__}: {first_line(error)}; save it "
            "anew"
        ) from error
