"""A ViT's images: its datasets, and the parts of a microbatch."""

import argparse

import numpy
import torch

from megatron.trainer.data.classification import COMMON_FIELDS, build_datasets, digest
from megatron.trainer.data.microbatches import Field
from megatron.trainer.files import image_files


def vision_fields(args: argparse.Namespace) -> tuple[Field, ...]:
    """`images` (float32 [b, height, width, channels]) on the first stage, `labels` and `counts` on the last."""
    shape = (args.img_h, args.img_w, args.num_channels)
    images = Field(
        name="images", stages="first", shape=lambda size, length: (size, *shape), dtype=torch.float32
    )  # fmt: skip
    return (images, *COMMON_FIELDS)


class ImageSamples:
    """Images and labels in memory. `digest`: of all of them."""

    def __init__(self, images: image_files.Images) -> None:
        self.images = images
        self.digest = digest(images.pixels, images.labels)

    def __len__(self) -> int:
        return len(self.images.labels)

    def __getitem__(self, index: int) -> dict:
        return {"images": image_files.as_float(self.images.pixels[index]), "labels": self.images.labels[index]}


def build_vision_datasets(args: argparse.Namespace, tokenizer: None) -> list:
    """A ViT's three datasets. Raises ValueError for images or labels that do not fit the flags."""
    return build_datasets(args, vision_fields(args), lambda paths: ImageSamples(_read(args, paths)))


def _read(args: argparse.Namespace, paths: list[str]) -> image_files.Images:
    images = image_files.read(paths)
    expected, found = (args.img_h, args.img_w, args.num_channels), images.pixels.shape[1:]
    if found != expected:
        raise ValueError(
            f"{' '.join(paths)} has images of {' x '.join(map(str, found))}, not {' x '.join(map(str, expected))}; "
            f"give --img-h {found[0]} --img-w {found[1]} --num-channels {found[2]}, or prepare other images"
        )
    if not len(images.labels):
        raise ValueError(f"{' '.join(paths)} has no images; prepare it again")
    if (largest := int(numpy.max(images.labels))) >= args.num_classes:
        raise ValueError(
            f"{' '.join(paths)} has class {largest}, but --num-classes {args.num_classes} go from 0 to "
            f"{args.num_classes - 1}; give --num-classes {largest + 1} or more"
        )
    return images
