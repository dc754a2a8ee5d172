"""Small .bin/.idx pairs for tests."""

from pathlib import Path

import numpy

from megatron import backend


def write_dataset(prefix: Path, *, documents: int = 40, length: int = 50, vocab: int = 100, seed: int = 0) -> str:
    """Write `documents` documents of about `length` random token ids below `vocab`; returns the prefix."""
    backend.install()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = numpy.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(documents):
        size = int(random.integers(length // 2, length * 3 // 2))
        builder.add_document(random.integers(0, vocab, size), [size])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
