"""Images in numpy's files: what is read, and which files are refused with which sentence."""

import argparse

import numpy
import pytest

from megatron import backend

backend.install()

from megatron.trainer.data.classification import ImageSamples, _read_images
from megatron.trainer.files import image_files
from tests.trainer.run.vision_helper import SMALL, vision_arguments, write_images


def flags(**changes) -> argparse.Namespace:
    return argparse.Namespace(**{"img_h": 8, "img_w": 8, "num_channels": 1, "num_classes": 3, **changes})


def test_folders_and_files_in_their_order(tmp_path):
    """A folder stands for its files by name; channels may be left out where there is one."""
    write_images(tmp_path / "b.npz", 3, seed=1)
    write_images(tmp_path / "a.npz", 4, seed=2, size=(8, 8, 1))
    one = write_images(tmp_path / "one.npy.npz", 2, seed=3)
    images = image_files.read([str(tmp_path)])
    assert image_files.count([str(tmp_path)]) == len(images.labels) == 9 and images.pixels.shape == (9, 8, 8, 1)
    with numpy.load(tmp_path / "a.npz") as first:
        assert numpy.array_equal(images.pixels[:4], first["images"])
    assert image_files.count([one, one]) == 4


def test_bytes_are_scaled_and_other_numbers_stand():
    """0 to 255 become -1 to 1."""
    assert image_files.as_float(numpy.array([0, 255], numpy.uint8)).tolist() == [-1.0, 1.0]
    assert image_files.as_float(numpy.array([0.5, 3.0])).tolist() == [0.5, 3.0]


def test_the_digest_is_of_the_data(tmp_path):
    """One label or pixel makes another; the file's name does not."""
    path = write_images(tmp_path / "a.npz", 4)
    images = image_files.read([path])
    again = ImageSamples(image_files.read([write_images(tmp_path / "b.npz", 4)]))
    assert ImageSamples(images).digest == again.digest
    images.labels[0] = 2 - images.labels[0] if images.labels[0] != 1 else 0
    assert ImageSamples(images).digest != again.digest
    images = image_files.read([path])
    images.pixels[3, 7, 7] += 1
    assert ImageSamples(images).digest != again.digest


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"images": numpy.zeros((2, 8, 8))}, r"has no array 'labels', but images; store images and labels"),
        ({"images": numpy.zeros((2, 8, 8)), "labels": numpy.zeros(3, int)}, r"has 2 images and 3 labels"),
        ({"images": numpy.zeros((2, 8)), "labels": numpy.zeros(2, int)}, r"has images of shape \[2, 8\]"),
        ({"images": numpy.zeros((2, 8, 8)), "labels": numpy.array([0, -1])}, r"labels that are not whole numbers"),
        ({"images": numpy.zeros((2, 8, 8)), "labels": numpy.zeros(2)}, r"labels that are not whole numbers"),
        ({"images": numpy.full((2, 8, 8), numpy.nan), "labels": numpy.zeros(2, int)}, r"pixels that are not finite"),
        (
            {"images": numpy.zeros((2, 6, 8)), "labels": numpy.zeros(2, int)},
            r"images of 6 x 8 x 1, not 8 x 8 x 1; give",
        ),
        (
            {"images": numpy.zeros((2, 8, 8)), "labels": numpy.array([0, 3])},
            r"has class 3, but --num-classes 3 go from",
        ),
        ({"images": numpy.zeros((0, 8, 8)), "labels": numpy.zeros(0, int)}, r"has no images"),
    ],
)
def test_files_that_do_not_fit(tmp_path, arrays, message):
    """One sentence with file and remedy."""
    numpy.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message) as caught:
        _read_images(flags(), [str(tmp_path / "a.npz")])
    assert str(caught.value).startswith(str(tmp_path / "a.npz")) and "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path):
    """Missing, empty, of other bytes, cut off; a folder without any; a second file of other images."""
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npz").touch()
    whole = write_images(tmp_path / "whole.npz", 4)
    (tmp_path / "half.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:300])
    for name in ("text.npz", "empty.npz", "half.npz"):
        with pytest.raises(ValueError, match=rf"{name} is no file of numpy arrays"):
            image_files.read([str(tmp_path / name)])
    with pytest.raises(ValueError, match=r"none\.npz does not exist"):
        image_files.count([str(tmp_path / "none.npz")])
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"folder .*folder has no \*\.npz"):
        image_files.count([str(tmp_path / "folder")])
    with pytest.raises(ValueError, match=r"has images of 4 x 4 x 1 .*prepare all alike"):
        image_files.read([whole, write_images(tmp_path / "other.npz", 2, size=(4, 4))])


@pytest.mark.parametrize("lengths", [(0, 8), (8, 0)])
def test_files_without_images_are_refused(tmp_path, lengths):
    """By name, before anything is derived from their number."""
    paths = [write_images(tmp_path / f"{name}.npz", each) for name, each in zip("ab", lengths, strict=True)]
    base = f"{SMALL.replace('--train-iters 10', '--epochs 2')} --data-path {' '.join(paths)}"
    with pytest.raises(ValueError, match=rf"^{paths[lengths.index(0)]} has no samples; give files that hold samples"):
        vision_arguments(base=base)
