"""Images with classes in numpy files.

A file `*.npz` has the arrays `images`, [n, height, width] or [n, height, width, channels], and `labels`, n whole
numbers from 0 on. Bytes are scaled to -1 to 1; other numbers are used unchanged. A folder means its files in the order
of their names. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

_MIDDLE = 127.5  # middle of the values of a byte


@dataclass(frozen=True)
class Images:
    """Images with their classes. `pixels`: [n, height, width, channels], as stored; `labels`: int64 [n]."""

    pixels: numpy.ndarray
    labels: numpy.ndarray


def count(paths: Sequence[str]) -> int:
    """The number of images in files and folders. Raises ValueError if a file cannot be read."""
    return sum(len(_part(file, "labels")) for file in _files(paths))


def read(paths: Sequence[str]) -> Images:
    """Read all images of files and folders in order.

    Raises ValueError for a file that is missing or damaged, or whose arrays do not match each other or earlier files.
    """
    pixels, labels = [], []
    for file in _files(paths):
        pixels.append(_pixels(file))
        labels.append(_labels(file))
        if len(pixels[-1]) != len(labels[-1]):
            raise ValueError(f"{file} has {len(pixels[-1])} images and {len(labels[-1])} labels; give each image one")
        if pixels[-1].shape[1:] != pixels[0].shape[1:] or pixels[-1].dtype != pixels[0].dtype:
            raise ValueError(
                f"{file} has images of {_size(pixels[-1])} ({pixels[-1].dtype}), and {_files(paths)[0]} of "
                f"{_size(pixels[0])} ({pixels[0].dtype}); prepare all alike"
            )
    return Images(numpy.concatenate(pixels), numpy.concatenate(labels))


def as_float(pixels: numpy.ndarray) -> numpy.ndarray:
    """The pixels as float32; bytes are scaled to -1 to 1."""
    if pixels.dtype == numpy.uint8:
        return pixels.astype(numpy.float32) / _MIDDLE - 1
    return pixels.astype(numpy.float32)


def _size(pixels: numpy.ndarray) -> str:
    return " x ".join(map(str, pixels.shape[1:]))


def _files(paths: Sequence[str]) -> list[Path]:
    files = []
    for path in map(Path, paths):
        found = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"folder {path} has no *.npz; give files with images and labels")
        files += found
    return files


def _part(file: Path, name: str) -> numpy.ndarray:
    try:
        with numpy.load(file) as arrays:
            if name not in arrays:
                there = ", ".join(arrays) or "nothing"
                raise ValueError(f"{file} has no array '{name}', but {there}; store images and labels")
            return arrays[name]
    except FileNotFoundError as error:
        raise ValueError(f"file {file} does not exist") from error
    except ValueError as error:
        if str(error).startswith(str(file)):
            raise
        raise ValueError(f"{file} is no file of numpy arrays (.npz): {error}") from error
    except Exception as error:  # damaged zip files raise errors of many classes
        raise ValueError(f"{file} is no file of numpy arrays (.npz): {str(error) or type(error).__name__}") from error


def _pixels(file: Path) -> numpy.ndarray:
    pixels = _part(file, "images")
    if pixels.ndim not in (3, 4) or pixels.dtype.kind not in "uif":
        raise ValueError(
            f"{file} has images of shape {list(pixels.shape)} and type {pixels.dtype}; store numbers as [n, height, "
            "width] or [n, height, width, channels]"
        )
    if pixels.dtype.kind == "f" and not numpy.isfinite(pixels).all():
        raise ValueError(f"{file} has pixels that are not finite; prepare it again")
    return pixels if pixels.ndim == 4 else pixels[..., None]


def _labels(file: Path) -> numpy.ndarray:
    labels = _part(file, "labels")
    if labels.ndim != 1 or labels.dtype.kind not in "ui" or (labels.size and labels.min() < 0):
        raise ValueError(f"{file} has labels that are not whole numbers from 0 on, one an image; prepare it again")
    return labels.astype(numpy.int64)
