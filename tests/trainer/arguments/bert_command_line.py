"""A small valid command line of pretrain_bert.py, its data, and what tests of BERT share."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import numpy

from megatron import backend
from megatron.trainer.arguments.flags.config import TrainConfig
from tests.trainer.arguments.command_line import SMALL, configuration

ROOT = Path(__file__).parents[3]
NUM_WORDS = 60
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SMALL_BERT = SMALL.partition("--mock-data")[0] + "--data-path none --vocab-file none"


def defaults() -> dict:
    """The defaults of pretrain_bert.py."""
    from megatron.trainer.programs import pretrain_bert

    return pretrain_bert.DEFAULTS


def bert_arguments(extra: str = "", *, base: str = SMALL_BERT, world_size: int = 1) -> TrainConfig:
    """The configuration of `base` with `extra` flags, on a machine without CUDA."""
    return configuration(f"{base} {extra}".split(), defaults=defaults(), world_size=world_size)


def write_vocabulary(path: Path) -> str:
    """A WordPiece vocabulary of `NUM_WORDS` words, every third of which goes on with the word before it."""
    words = [f"##w{number}" if number % 3 == 2 else f"w{number}" for number in range(NUM_WORDS)]
    path.write_text("".join(f"{word}\n" for word in (*SPECIAL, *words)))
    return str(path)


def write_sentences(prefix: Path, documents: list[list[int]], *, seed: int = 0) -> str:
    """Write documents of sentences of the given lengths, of random words; returns the prefix."""
    backend.install()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = numpy.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for lengths in documents:
        tokens = random.integers(len(SPECIAL), len(SPECIAL) + NUM_WORDS, sum(lengths))
        builder.add_document(tokens, lengths)
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def random_documents(number: int = 60, *, seed: int = 0) -> list[list[int]]:
    """Lengths of sentences: documents of 2 to 6 of them, so that samples have many lengths."""
    random = numpy.random.default_rng(seed)
    return [random.integers(2, 9, int(random.integers(2, 7))).tolist() for _ in range(number)]


@functools.cache
def data_flags() -> str:
    """Flags of a small dataset and its vocabulary, written once in the session."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    prefix = write_sentences(folder / "text", random_documents())
    vocabulary = write_vocabulary(folder / "vocab.txt")
    return f"--data-path {prefix} --split 8,1,1 --data-cache-path {folder}/cache --vocab-file {vocabulary}"
