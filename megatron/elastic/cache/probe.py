"""What reading and writing a value takes on a folder's disk, before there is anything to read."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.elastic.cache.activation_cache import ActivationCache
from megatron.elastic.cache.folder import FEWEST_BYTES
from megatron.elastic.cache.generation import Generation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheSeconds:
    """Times of a sample. What is read is still in memory: a cache that does not fit there reads as fast as its disk.

    Attributes:
        read: by who asks.
        write: on the thread that writes.
        put: that the training waits for its copy.
    """

    read: float
    write: float
    put: float


_NEVER = CacheSeconds(math.inf, math.inf, math.inf)


def measure(folder: Path | str, num_bytes: int, *, microbatch_rows: int = 8, num_microbatches: int = 4) -> CacheSeconds:
    """Medians of a few microbatches of samples of `num_bytes`, in a folder of its own in `folder` that is removed. All
    are infinite, with a warning, where it cannot be written.

    Raises:
        ValueError: as `ActivationCache`.
    """
    generation = Generation(
        weights="measured",
        depth=1,
        dtype=torch.float16,
        shape=(-(-num_bytes // 2),),
        tensor_ranks=1,
        tensor_rank=0,
        microbatch_rows=microbatch_rows,
        padding="",
        threads=1,
        kernels="",
        data="",
    )
    most_bytes = 4 * FEWEST_BYTES + 2 * (num_bytes + 8192) * microbatch_rows * num_microbatches
    draws = torch.Generator().manual_seed(0)  # of its own: who measures draws as others do
    values = torch.randint(-(1 << 15), 1 << 15, generation.shape, dtype=torch.int16, generator=draws)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="measure-", dir=folder) as own:
            return _measured(own, generation, values.view(torch.float16), most_bytes, num_microbatches)
    except OSError as error:
        logger.warning("the cache's folder %s cannot be written (%s); nothing is read from it", folder, error)
        return _NEVER


def _measured(
    folder: str, generation: Generation, values: Tensor, most_bytes: int, num_microbatches: int
) -> CacheSeconds:
    puts, microbatch_rows = [], generation.microbatch_rows
    with ActivationCache(folder, generation, most_bytes=most_bytes) as cache:
        for first in range(0, num_microbatches * microbatch_rows, microbatch_rows):
            begin = time.perf_counter()
            cache.put(range(first, first + microbatch_rows), [values] * microbatch_rows)
            puts.append((time.perf_counter() - begin) / microbatch_rows)
            cache.flush()
        for first in range(0, num_microbatches * microbatch_rows, microbatch_rows):
            cache.get(range(first, first + microbatch_rows))
        measured = cache.measured
        if measured.read_seconds is None or measured.write_seconds is None:
            return _NEVER
        return CacheSeconds(measured.read_seconds, measured.write_seconds, sorted(puts)[len(puts) // 2])
