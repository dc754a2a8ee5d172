"""A small valid command line of finetune_bert.py, its texts, and what tests of it share."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import numpy

from megatron.trainer.arguments.flags.config import TrainConfig
from tests.trainer.arguments.bert_command_line import NUM_WORDS, write_vocabulary
from tests.trainer.arguments.command_line import configuration
from tests.trainer.run.run_case import train

ROOT = Path(__file__).parents[3]
SHAPE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 12 --max-position-embeddings 12 "
    "--make-vocab-size-divisible-by 16"
)
BASE = (
    f"{SHAPE} --num-workers 0 --log-interval 1 --eval-interval 3 --train-iters 6 --lr-decay-style constant --lr 1e-2 "
    "--clip-grad 0 --micro-batch-size 1 --global-batch-size 8"
)
NUM_TRAINING, NUM_VALIDATION = 20, 10
GOOD, BAD = "w0 w1", "w3 w4"


def defaults() -> dict:
    """The defaults of finetune_bert.py."""
    from megatron.trainer.programs import finetune_bert

    return finetune_bert.DEFAULTS


def texts(number: int, *, seed: int = 0) -> list[dict]:
    """Samples of 2 to 16 words, of which two say the class."""
    random = numpy.random.RandomState(seed)
    found = []
    for _ in range(number):
        words = [f"w{word}" for word in random.randint(6, NUM_WORDS, random.randint(0, 15)) if word % 3 != 2]
        label = "good" if random.rand() < 0.5 else "bad"
        found.append({"text": " ".join([GOOD if label == "good" else BAD, *words]), "label": label})
    return found


def write_texts(path: Path, samples: list[dict]) -> str:
    """As JSON lines; returns the path."""
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return str(path)


@functools.cache
def data_flags() -> str:
    """Flags of a small dataset and its vocabulary, written once in the session."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    train_data = write_texts(folder / "train.jsonl", texts(NUM_TRAINING))
    validation = write_texts(folder / "validation.jsonl", texts(NUM_VALIDATION, seed=1))
    vocabulary = write_vocabulary(folder / "vocab.txt")
    return f"--train-data {train_data} --valid-data {validation} --vocab-file {vocabulary}"


def text_arguments(extra: str = "", *, world_size: int = 1) -> TrainConfig:
    """The configuration of the small command line with `extra` flags, on a machine without CUDA."""
    words = f"{BASE} {data_flags()} {extra}".split()
    return configuration(words, defaults=defaults(), world_size=world_size, padded_vocab_size=256)


def train_texts(num_ranks: int, flags: str = "", **options) -> list[dict]:
    """See `run_case.train`."""
    if "--pipeline-model-parallel-size" not in flags:
        flags += f" --pipeline-model-parallel-size {num_ranks}"
    return train(num_ranks, f"{data_flags()} {flags}", program="finetune_bert", base=BASE, **options)
