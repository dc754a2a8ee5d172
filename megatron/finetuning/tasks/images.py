"""Image classification: an image and a class."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron.finetuning.data.files import column
from megatron.finetuning.data.rows import IGNORED, Rows
from megatron.finetuning.tasks.labels import Labels, accuracy
from megatron.finetuning.tasks.task import File, Prepared, Task, most_likely

IMAGE = ("image", "pixel_values", "image_path", "file_name")
LABEL = ("label", "labels", "class")


def _prepare(args: argparse.Namespace, processor: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    image = column(file.samples, file.path, args.image_column, IMAGE, "image")
    labels = Labels(file, column(file.samples, file.path, args.label_column, LABEL, "label"), classes)

    def rows(each: File) -> Rows:
        column(each.samples, each.path, image, (), "image")
        images = [_image(sample[image], each, number) for number, sample in enumerate(each.samples, start=1)]
        own = labels.of(each)
        pixels = _pixels(processor, images, each)
        return Rows(
            {"pixel_values": pixels, "labels": own}, ignored={"labels": IGNORED}, num_terms=torch.ones_like(own),
            metrics=accuracy(own),
        )  # fmt: skip

    return Prepared(rows, labels.changes)


def _image(value: object, file: File, number: int) -> Any:
    """An array of numbers, or a picture from a path beside the file of samples."""
    if isinstance(value, str):
        if importlib.util.find_spec("PIL") is None:
            raise ValueError(f"{file.path} names images by path, which needs the package Pillow; pip install Pillow")
        from PIL import Image, UnidentifiedImageError

        path = Path(file.path).parent / value
        try:
            with Image.open(path) as picture:
                return numpy.asarray(picture.convert("RGB"))
        except (OSError, UnidentifiedImageError) as error:
            raise ValueError(f"{file.path}, sample {number}: the image {path} cannot be read; mend it") from error
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


def _pixels(processor: Any, images: list[Any], file: File) -> torch.Tensor:
    """float32 [images, channels, rows, columns]: by the model's processor, or where it has none as they are."""
    if processor is not None:
        return processor(images, return_tensors="pt")["pixel_values"]
    shapes = {image.shape for image in images}
    if len(shapes) > 1:
        raise ValueError(
            f"{file.path} has images of {len(shapes)} sizes, and the model's folder has no preprocessor_config.json to "
            "make them one; add it"
        )
    return torch.from_numpy(numpy.stack(images)).float().permute(0, 3, 1, 2).contiguous()


TASK = Task(
    "AutoModelForImageClassification", _prepare, keep=("logits",), summary=most_likely,
    auto_processor="AutoImageProcessor",
)  # fmt: skip
