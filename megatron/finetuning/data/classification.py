"""Classification: a class for a text, a pair of texts or an image."""

from __future__ import annotations

import argparse
import importlib.util
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron.documents.files import require_characters
from megatron.finetuning.data.batches import IGNORED, Rows
from megatron.finetuning.data.files import File
from megatron.finetuning.data.task import Prepared, Task, give_padding, most_likely, padded

FIRST = ("text", "sentence", "sentence1", "premise", "question1", "review", "content")
SECOND = ("text_pair", "sentence2", "hypothesis", "question2")
IMAGE = ("image", "pixel_values", "image_path", "file_name")
LABEL = ("label", "labels", "class")


class Labels:
    """The classes of a file, numbered from 0.

    The model's classes are used if they include all classes of the file; otherwise the file's classes, sorted.

    Args:
        given: the name of the column; None tries the usual names.
        known: name -> number of the classes that the model knows.

    Raises ValueError for a column with a single class, and for a column of 100 or more values that all differ.
    """

    def __init__(self, file: File, given: str | None, known: Mapping[str, int]) -> None:
        self.column = name = file.column(given, LABEL, "label")
        values = set(self._values(file))
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
        """The changes to the model's configuration: the classes, of which each sample has one."""
        return {
            "num_labels": len(self.names), "id2label": dict(enumerate(self.names)), "label2id": dict(self._number),
            "problem_type": "single_label_classification",
        }  # fmt: skip

    def of(self, file: File) -> Tensor:
        """The class numbers of a file's samples, int64 [samples]. Raises ValueError for an unknown class."""
        file.column(self.column, (), "label")
        values = self._values(file)
        for number, name in enumerate(values, start=1):
            if name not in self._number:
                raise ValueError(
                    f"{file.path}, sample {number}: the label {name!r} is not one of the model's, which "
                    f"are those of the training file: {', '.join(self.names[:10])}; leave the sample out"
                )
        return torch.tensor([self._number[name] for name in values])

    def _values(self, file: File) -> list[str]:
        return [class_name(sample[self.column], f"{file.path}, sample {number}: {self.column!r}")
                for number, sample in enumerate(file.samples, start=1)]  # fmt: skip


def class_rows(tensors: Mapping[str, Tensor], labels: Tensor, notes: Sequence[str] = ()) -> Rows:
    """Rows of the model's inputs and their classes, int64 [rows]; the metric is the accuracy."""

    def accuracy(predictions: Mapping[str, Tensor], loss: float) -> dict[str, float]:
        return {"accuracy": (predictions["logits"] == labels).double().mean().item()}

    return Rows(
        {**tensors, "labels": labels}, ignored={"labels": IGNORED}, num_terms=torch.ones_like(labels),
        metrics=accuracy, notes=notes,
    )  # fmt: skip


def class_name(value: object, where: str) -> str:
    """The name of a class. Raises ValueError for a value that is neither a text nor a whole number."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError(f"{where} is {value!r}, and a class is a text or a whole number; mend it")
    if value == "":
        raise ValueError(f"{where} is empty; name its class, or leave the sample out")
    return require_characters(str(value), where)


def encoder_of_texts(args: argparse.Namespace, tokenizer: Any, file: File) -> Callable[[File], dict[str, Tensor]]:
    """A function that encodes the texts of a file with the same columns, or pairs of texts, as `padded`.

    Texts have a second one if a flag or the file names a column for it.
    """
    first, second = file.column(args.text_column, FIRST, "text"), args.text_pair_column
    if second is not None or set(SECOND) & set(file.fields):
        second = file.column(second, SECOND, "text pair")
    give_padding(tokenizer)

    def encoded(file: File) -> dict[str, Tensor]:
        texts = file.texts(first, "text")
        pairs = None if second is None else file.texts(second, "text pair")
        return padded(tokenizer, texts, pairs, length=args.max_seq_length)

    return encoded


def _prepare_texts(args: argparse.Namespace, tokenizer: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    encoded, labels = encoder_of_texts(args, tokenizer, file), Labels(file, args.label_column, classes)

    def rows(file: File) -> Rows:
        return class_rows(encoded(file), labels.of(file))

    return Prepared(rows, {**labels.changes, "pad_token_id": tokenizer.pad_token_id})


def _prepare_images(args: argparse.Namespace, processor: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    image = file.column(args.image_column, IMAGE, "image")
    labels = Labels(file, args.label_column, classes)

    def rows(file: File) -> Rows:
        images, own = images_of(file, image), labels.of(file)
        return class_rows({"pixel_values": pixels_of(processor, images, file)}, own)

    return Prepared(rows, labels.changes)


def images_of(file: File, column: str) -> list[numpy.ndarray]:
    """The images of all samples, as `image_of`."""
    file.column(column, (), "image")
    return [image_of(sample[column], file, number) for number, sample in enumerate(file.samples, start=1)]


def image_of(value: object, file: File, number: int) -> numpy.ndarray:
    """The image of a sample, [rows, columns, channels].

    `value`: nested lists of numbers, the path of a picture relative to the file, or a picture in a form of the package
    datasets: an object with its `bytes`, or with its `path` alone, or Pillow's image.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (str, bytes)) or hasattr(value, "convert"):
        return _picture(value, file, number)
    try:
        array = numpy.asarray(value, dtype=numpy.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{file.path}, sample {number}: its image is no path and no rectangle of numbers; mend it"
        ) from error
    if array.ndim not in (2, 3):
        raise ValueError(
            f"{file.path}, sample {number}: its image has {array.ndim} dimensions, and rows of columns are wanted, "
            "with or without channels; mend it"
        )
    return array if array.ndim == 3 else array[:, :, None]


def _picture(value: Any, file: File, number: int) -> numpy.ndarray:
    """A picture as [rows, columns, 3]. `value`: its path relative to the file, its bytes, or Pillow's image."""
    if importlib.util.find_spec("PIL") is None:
        raise ValueError(f"{file.path} has pictures, which need the package Pillow; pip install Pillow")
    from PIL import Image, UnidentifiedImageError

    path = Path(file.path).parent / value if isinstance(value, str) else "of its bytes"
    try:
        if hasattr(value, "convert"):
            return numpy.asarray(value.convert("RGB"))
        with Image.open(path if isinstance(value, str) else io.BytesIO(value)) as picture:
            return numpy.asarray(picture.convert("RGB"))
    except (OSError, UnidentifiedImageError) as error:
        raise ValueError(f"{file.path}, sample {number}: the image {path} cannot be read; mend it") from error


def pixels_of(processor: Any, images: list[numpy.ndarray], file: File) -> Tensor:
    """The images as float32 [images, channels, rows, columns].

    The model's processor converts them; without a processor the numbers stay unchanged.
    """
    if processor is not None:
        return processor(images, return_tensors="pt")["pixel_values"]
    shapes = {image.shape for image in images}
    if len(shapes) > 1:
        raise ValueError(
            f"{file.path} has images of {len(shapes)} sizes, and the model's folder has no preprocessor_config.json to "
            "make them one; add it"
        )
    return torch.from_numpy(numpy.stack(images)).float().permute(0, 3, 1, 2).contiguous()


TEXTS = Task("AutoModelForSequenceClassification", _prepare_texts, keep=("logits",), summary=most_likely)
IMAGES = Task(
    "AutoModelForImageClassification", _prepare_images, keep=("logits",), summary=most_likely,
    auto_processor="AutoImageProcessor",
)  # fmt: skip
