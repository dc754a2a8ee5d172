"""A small valid command line of pretrain_vision_classify.py, its images, and what tests of it share."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import numpy

from megatron.trainer.arguments import Platform
from megatron.trainer.arguments.flags.config import TrainConfig
from tests.trainer.arguments.command_line import CPU, configuration
from tests.trainer.run.run_case import train

ROOT = Path(__file__).parents[3]
SHAPE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --img-h 8 --img-w 8 --patch-dim 4 --num-channels 1 "
    "--num-classes 3"
)
SMALL = f"{SHAPE} --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3"
BASE = (
    f"{SHAPE} --num-workers 0 --log-interval 1 --eval-interval 3 --train-iters 6 --lr-decay-style constant --lr 1e-2 "
    "--clip-grad 0 --micro-batch-size 1 --global-batch-size 8"
)
NUM_TRAINING, NUM_VALIDATION, NUM_TEST = 20, 10, 5  # neither divides a batch


def defaults() -> dict:
    """The defaults of pretrain_vision_classify.py."""
    from megatron.trainer.programs import pretrain_vision_classify

    return pretrain_vision_classify.DEFAULTS


def vision_arguments(extra: str = "", *, base: str = f"{SMALL} --data-path none", world_size: int = 1,
                     platform: Platform = CPU) -> TrainConfig:  # fmt: skip
    """The configuration of `base` with `extra` flags, on a machine like `platform`."""
    words = f"{base} {extra}".split()
    return configuration(words, defaults=defaults(), world_size=world_size, platform=platform, padded_vocab_size=0)


def write_images(path: Path, number: int, *, classes: int = 3, size: tuple[int, ...] = (8, 8), seed: int = 0) -> str:
    """Noise around a brightness that grows with the class, as bytes; returns the path."""
    random = numpy.random.RandomState(seed)
    labels = random.randint(0, classes, number)
    pixels = random.randint(0, 60, (number, *size)) + labels.reshape(-1, *[1] * len(size)) * 180 // classes
    numpy.savez(path, images=pixels.astype(numpy.uint8), labels=labels)
    return str(path)


@functools.cache
def data_flags() -> str:
    """Flags of a small dataset, written once in the session."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sizes = enumerate((NUM_TRAINING, NUM_VALIDATION, NUM_TEST))
    paths = [write_images(folder / f"{seed}.npz", number, seed=seed) for seed, number in sizes]
    return f"--data-path {' '.join(paths)}"


def train_vision(num_ranks: int, flags: str = "", **options) -> list[dict]:
    """See `run_case.train`."""
    return train(num_ranks, f"{data_flags()} {flags}", program="pretrain_vision_classify", base=BASE, **options)


def norms(results: list[dict]) -> list[float]:
    """The norms of the gradients of each batch."""
    return [record["grad_norm"] for record in results[-1]["records"] if "grad_norm" in record]


def numbers(results: list[dict]) -> list[tuple]:
    """What the last rank recorded of each batch and evaluation, in order."""
    names = ("loss", "accuracy", "validation_loss", "validation_accuracy", "test_loss", "test_accuracy")
    return [(record["iteration"], *(record.get(name) for name in names)) for record in results[-1]["records"]]
