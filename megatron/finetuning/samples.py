"""The data of a run: the rows for training and evaluation, and the model configuration that they need."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.finetuning.arguments import add_data
from megatron.finetuning.data import (
    chat,
    classification,
    contrastive,
    ctc,
    generation,
    image_chat,
    masked,
    multiple_choice,
    preference,
    question_answering,
    regression,
    sound,
    speech_to_text,
    token_classification,
)
from megatron.finetuning.data.batches import Epochs, Rows
from megatron.finetuning.data.files import File, read_file, state_of_file, stream_file
from megatron.finetuning.data.lengths import Lengths
from megatron.finetuning.data.stored_rows import cached_rows, in_parts, states
from megatron.finetuning.data.task import Forward, Prompts, Task
from megatron.finetuning.pretrained import check_folder, first_line, read_config, require_transformers

TASKS: dict[str, Task] = {
    "text-to-text": generation.TEXT_TO_TEXT,
    "sequence-classification": classification.TEXTS,
    "causal-lm": generation.CAUSAL,
    "chat": chat.TASK,
    "dpo": preference.TASK,
    "masked-lm": masked.TASK,
    "multiple-choice": multiple_choice.TASK,
    "regression": regression.TASK,
    "token-classification": token_classification.TASK,
    "question-answering": question_answering.TASK,
    "image-classification": classification.IMAGES,
    "audio-classification": sound.CLASSES,
    "contrastive-image-text": contrastive.TASK,
    "image-text-to-text": image_chat.TASK,
    "ctc": ctc.TASK,
    "speech-to-text": speech_to_text.TASK,
}
"""Word of --task -> its task."""

_PROCESSOR_FILES = {
    "AutoTokenizer": ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model"),
    "AutoImageProcessor": ("preprocessor_config.json",),
    "AutoFeatureExtractor": ("preprocessor_config.json", "processor_config.json"),
    "AutoProcessor": ("preprocessor_config.json", "processor_config.json"),
}


@dataclass(frozen=True)
class Data:
    """The data that a run reads.

    Attributes:
        processor: tokenizer or processor; None if the model's folder has no processor of images or sound.
        changes: changes to the model's configuration.
        training, validation: rows; None if the run does not need them.
        prompts: the prompts from which evaluations generate; None if they do not generate.
        forward: computes the model's output with its loss; None: the model does.
    """

    task: Task
    processor: Any
    changes: Mapping[str, object]
    training: Rows | None
    validation: Rows | None
    prompts: Prompts | None = None
    forward: Forward | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user on how the samples were prepared."""
        sources = (self.training, self.validation, self.prompts)
        return tuple(note for source in sources if source is not None for note in source.notes)

    def example(self, size: int) -> dict[str, Tensor]:
        """A microbatch of `size` real samples, padded to the full width."""
        return self.rows.batch([number % len(self.rows) for number in range(size)], size, whole=True)

    @property
    def rows(self) -> Rows:
        """The rows to train on; without training, the rows to evaluate."""
        return self.training or self.validation

    @property
    def lengths(self) -> tuple[Lengths, ...]:
        """The lengths of the rows, if microbatches are padded to several widths; else empty."""
        found = [rows.lengths for rows in (self.training, self.validation) if rows is not None]
        return tuple(each for each in found if each is not None and each.multiple is not None)


def read_data(args: argparse.Namespace) -> Data:
    """Read the files that the flags name. Raises ValueError for a file that cannot be read or used."""
    task, classes = TASKS[args.task], _classes(args.model_name_or_path)
    processor = _processor(args.model_name_or_path, task.auto_processor)
    training = validation = None
    if args.train_file is not None and (args.do_train or not args.do_eval):
        read = read_file if args.data_cache is None else stream_file
        training = read(args.train_file, limit=args.max_train_samples)
    if args.validation_file is not None and args.do_eval:
        validation = read_file(args.validation_file, limit=args.max_eval_samples)
    prepared = task.prepare(args, processor, training or validation, classes)

    def rows(file: File | None) -> Rows | None:
        if file is None:
            return None
        if file is training and args.data_cache is not None:
            parts = partial(in_parts, file, prepared.rows_of_pieces)
            contents = partial(contents_of_files, args)
            made = cached_rows(Path(args.data_cache), _deciding(args, prepared.changes), parts, contents)
        else:
            made = prepared.rows(file)
        made.convert(getattr(torch, args.dtype))
        if args.pad_to_multiple_of is not None or args.group_by_length:
            made.measure(args.pad_to_multiple_of)
        return made

    generates = validation is not None and args.predict_with_generate
    prompts = prepared.prompts(validation) if generates else None
    return Data(task, processor, prepared.changes, rows(training), rows(validation), prompts, prepared.forward)


def require_whole_microbatches(args: argparse.Namespace, data: Data) -> None:
    """Raise ValueError if a microbatch would be filled up, and the task's loss couples the rows of a microbatch."""
    size = args.per_device_train_batch_size
    if not data.task.couples_rows:
        return
    if size == 1:
        raise ValueError(
            f"--task {args.task} tells the rows of a microbatch apart, and --per_device_train_batch_size is 1; give "
            "more"
        )
    for rows, what, remedy in (
        (None if args.dataloader_drop_last else data.training, "train", "--dataloader_drop_last"),
        (data.validation, "eval", "another --max_eval_samples"),
    ):
        if rows is not None and getattr(args, f"do_{what}") and len(rows) % size:
            raise ValueError(
                f"--task {args.task} tells the rows of a microbatch apart, which the rows that fill up the last of "
                f"{len(rows)} samples would change: they are no multiple of --per_device_train_batch_size {size}; give "
                f"{remedy}"
            )


_ELSEWHERE = {"validation_file", "max_eval_samples", "data_cache", "pad_to_multiple_of", "group_by_length",
              "attn_implementation", "ignore_mismatched_sizes"}  # fmt: skip
"""Flags of data that do not affect the rows to train on."""

FILES_OF_ROWS = ("train_file", "chat_template")
"""Flags that name a file whose content decides the rows to train on."""


def contents_of_files(args: argparse.Namespace) -> dict[str, str | None]:
    """Flag in `FILES_OF_ROWS` -> a text that changes with the content of its file; None if the flag is not given."""
    given = {name: getattr(args, name) for name in FILES_OF_ROWS}
    return {name: None if path is None else state_of_file(Path(path)) for name, path in given.items()}


def flags_of_rows() -> set[str]:
    """The names of the flags that decide the rows to train on by their values."""
    parser = argparse.ArgumentParser(add_help=False)
    add_data(parser.add_argument_group(), required=False)
    return {action.dest for action in parser._actions} - _ELSEWHERE.union(FILES_OF_ROWS)


def _deciding(args: argparse.Namespace, changes: Mapping[str, object]) -> dict[str, object]:
    """Everything that decides the rows to train on: data, flags, the tokenizer's files, and versions of packages."""
    import tokenizers

    folder = Path(args.model_name_or_path)
    small = [path for path in sorted(folder.iterdir()) if path.suffix in (".json", ".txt", ".model", ".jinja")]
    templates = [Path(args.chat_template)] if args.chat_template else []
    return {
        "form": 2, "flags": {name: getattr(args, name) for name in flags_of_rows()},
        "files": states([Path(args.train_file), *templates, *small]), "classes": repr(sorted(changes.items())),
        "versions": [require_transformers().__version__, tokenizers.__version__],
    }  # fmt: skip


def epochs_of(args: argparse.Namespace, rows: Rows) -> Epochs:
    """The order of the rows to train on. Raises ValueError if `Epochs` does."""
    return Epochs(
        num_samples=len(rows), micro_batch_size=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps * args.data_parallel_size, seed=args.seed,
        drop_last=args.dataloader_drop_last, lengths=rows.lengths.of_rows[:, 0] if args.group_by_length else None,
    )  # fmt: skip


def _classes(folder: str) -> dict[str, int]:
    """The classes that a model knows, name -> number; empty if the names are transformers' defaults, as LABEL_0."""
    classes = read_config(folder).label2id or {}
    return {} if any(re.fullmatch("LABEL_[0-9]+", str(name)) for name in classes) else dict(classes)


def _processor(folder: str, auto_processor: str) -> Any:
    """The tokenizer or processor in the model's folder; None if there is no processor of images or sound.

    Raises ValueError if a tokenizer is missing, or a file is damaged.
    """
    transformers, path = require_transformers(), check_folder(folder)
    if not any((path / name).is_file() for name in _PROCESSOR_FILES[auto_processor]):
        if auto_processor == "AutoTokenizer":
            raise ValueError(f"{folder} has no tokenizer; save it there with tokenizer.save_pretrained")
        return None
    try:
        return getattr(transformers, auto_processor).from_pretrained(folder, local_files_only=True)
    except Exception as error:  # damaged files raise errors of any class
        raise ValueError(
            f"the {auto_processor} of {folder} cannot be read: {type(error).__name__}: {first_line(error)}; save it "
            "anew"
        ) from error
