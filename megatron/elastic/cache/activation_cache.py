"""A cache of the outputs of a frozen prefix of layers, one per sample, for all processes of a node."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from megatron.backend.streams import streams_of
from megatron.elastic.cache.background import Window, Writer
from megatron.elastic.cache.folder import FEWEST_BYTES, CacheFolder
from megatron.elastic.cache.generation import Generation, key_of_sample
from megatron.elastic.cache.measured import Measured
from megatron.elastic.cache.store import CacheStore

PUT_PATIENCE = 10.0
"""Seconds that `put` waits for a writer that has fallen behind before it drops its samples."""
logger = logging.getLogger(__name__)


@dataclass
class _Here:
    """The open files and threads of this process, which a forked process must not use."""

    store: CacheStore
    writer: Writer
    window: Window


class ActivationCache:
    """A cache that reads and writes values of one generation, and reads values of the generation before.

    A fault of the disk or of the files raises no error: it is logged as one warning, and the value counts as a miss.
    Any number of processes may use the cache, each from one thread. A forked process opens the cache again, and so does
    a process that unpickles it; each process closes its own.

    Args:
        folder: a folder on a disk of this node, which may be shared with other jobs.
        generation: the generation whose values are read and written.
        most_bytes: the limit on the bytes of all files. If other processes have them open already, their limit stays.
        older: the generation before, if the job continued from it.
        window: number of samples that `prefetch` may hold in memory.
        most_waiting: number of calls of `put` whose samples may wait in memory for the writer.
        in_background: whether to write on a thread.

    Raises:
        ValueError: the limit is too small, or the folder cannot hold a cache.
    """

    def __init__(
        self,
        folder: Path | str,
        generation: Generation,
        *,
        most_bytes: int,
        older: Generation | None = None,
        window: int = 64,
        most_waiting: int = 4,
        in_background: bool = True,
    ) -> None:
        assert window >= 1 and most_waiting >= 1
        self.folder = Path(folder)
        self._options = {
            "most_bytes": most_bytes, "window": window, "most_waiting": most_waiting, "in_background": in_background,
        }  # fmt: skip
        self.generation = generation
        self.older = older if older is not None and generation.deepens(older) else None
        """The generation whose values `get_older` finds; None if there is none."""
        self._said: set[str] = set()
        self._closed = False
        self._here: _Here | None = None
        self._after_fork()
        self._opened()
        _caches.add(self)

    def get(self, samples: Sequence[Hashable]) -> list[Tensor | None]:
        """The outputs of samples, in host memory that belongs to the caller; None for a sample without a value.

        Args:
            samples: the samples' names in the generation's data set, as whole numbers or texts.

        Raises:
            ValueError: a name is of another type.
        """
        found = self._get(self.generation, samples)
        count = sum(each is not None for each in found)
        self.measured.add(hits=count, misses=len(found) - count)
        return found

    def get_older(self, samples: Sequence[Hashable]) -> list[Tensor | None]:
        """The samples' outputs in the previous generation, the inputs of the newly frozen layers; None if missing."""
        found = [None] * len(samples) if self.older is None else self._get(self.older, samples)
        self.measured.add(older_hits=sum(each is not None for each in found))
        return found

    def put(self, samples: Sequence[Hashable], tensors: Sequence[Tensor]) -> None:
        """Store outputs of samples. Without room for more, they replace the samples' values of the generation before.

        The tensors are copied before the call returns, or on a device before any later work of its current stream.

        Raises:
            ValueError: a tensor has another dtype or shape than the generation, or a name is of another type.
        """
        assert len(samples) == len(tensors)
        generation, older = self.generation, self.older
        for tensor in tensors:
            if tensor.dtype != generation.dtype or tuple(tensor.shape) != generation.shape:
                raise ValueError(
                    f"an output of {tuple(tensor.shape)} in {tensor.dtype} does not belong to a generation of "
                    f"{generation.shape} in {generation.dtype}; give it a generation of its own"
                )
        keys = [key_of_sample(sample) for sample in samples]
        here = self._opened()
        if not keys:
            return
        if here is None or not here.store.takes(replacing=older is not None):
            self.measured.add(not_written=len(keys))
            return
        streams = streams_of(tensors[0].device)
        shape = (len(keys), generation.num_bytes)
        values = (
            streams.host_buffer(shape, torch.uint8) if streams.runs_ahead else torch.empty(shape, dtype=torch.uint8)
        )
        places = values.view(generation.dtype).view(-1, *generation.shape).unbind()
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor.detach(), non_blocking=True)
        copied = streams.record()

        def write() -> None:
            streams.finish(copied)
            here.store.write(generation, older, keys, values)

        if not self._options["in_background"]:
            write()
        elif not here.writer.submit(write, PUT_PATIENCE):
            self.measured.add(not_written=len(keys))
            self._warn("behind", f"writing to the cache in {self.folder} takes too long; some samples are not written")

    def prefetch(self, samples: Sequence[Hashable]) -> None:
        """Read values of samples ahead on a thread, for a later `get` or `get_older`.

        For a sample without a value in this generation, the value of the generation before is read.
        """
        keys = [key_of_sample(sample) for sample in samples]
        here = self._opened()
        if here is not None:
            here.window.request(keys)

    def deepen(self, generation: Generation) -> None:
        """Make `generation` the generation that is read and written, after all earlier `put` calls are written.

        If the generation so far differs in depth and weights only, `get_older` finds its values. Otherwise its values
        are deleted, and so are those of the generation before it, unless another process needs them. Precondition: the
        weights of the layers that were frozen before have not changed.
        """
        assert generation.depth >= self.generation.depth, "what is frozen stays so"
        if generation != self.generation:
            older = self.generation if generation.deepens(self.generation) else None
            self._need(generation, older)

    def forget_older(self) -> None:
        """Delete the values of the generation before, unless another process needs them."""
        if self.older is not None:
            self._need(self.generation, None)

    def flush(self) -> None:
        """Wait until the samples of all earlier `put` calls are written."""
        if self._here is not None:
            self._here.writer.flush()

    def close(self) -> None:
        """Write all samples that were put, end the threads and close the files, which stay for later caches."""
        here, self._here, self._closed = self._here, None, True
        if here is not None:
            try:
                here.window.close()
                here.writer.close()
            finally:
                here.store.close()

    def __enter__(self) -> ActivationCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable, tuple]:
        return partial(ActivationCache, older=self.older, **self._options), (self.folder, self.generation)

    def _get(self, generation: Generation, samples: Sequence[Hashable]) -> list[Tensor | None]:
        keys = [key_of_sample(sample) for sample in samples]
        here = self._opened()
        if here is None:
            return [None] * len(keys)
        found = [here.window.take(generation, key) for key in keys]
        missing = [index for index, tensor in enumerate(found) if tensor is None]
        self.measured.add(prefetched=len(keys) - len(missing))
        for index, tensor in zip(missing, here.store.read(generation, [keys[each] for each in missing]), strict=True):
            found[index] = tensor
        return found

    def _read_ahead(self, store: CacheStore, keys: Sequence[bytes]) -> dict[bytes, tuple[Generation, Tensor]]:
        found: dict[bytes, tuple[Generation, Tensor]] = {}
        for generation in self._generations():
            left = [key for key in keys if key not in found]
            tensors = store.read(generation, left)
            found |= {key: (generation, each) for key, each in zip(left, tensors, strict=True) if each is not None}
        return found

    def _generations(self) -> list[Generation]:
        return [self.generation] if self.older is None else [self.generation, self.older]

    def _need(self, generation: Generation, older: Generation | None) -> None:
        here = self._opened()
        if here is not None:
            here.window.clear()
            here.writer.flush()
        self.generation, self.older = generation, older
        if here is not None:
            here.store.need(self._generations())

    def _opened(self) -> _Here | None:
        """The open files and threads of this process, which are opened if necessary; None if this is impossible."""
        assert not self._closed
        if self._here is None and not self._off:
            try:
                folder = CacheFolder(self.folder, self._options["most_bytes"], self._warn)
            except OSError as error:
                self._off = True
                self._warn("off", f"the cache in {self.folder} cannot be opened ({error}); all is computed")
                return None
            store = CacheStore(folder, self.measured, self._warn)
            store.need(self._generations())
            window = Window(partial(self._read_ahead, store), self._options["window"])
            self._here = _Here(store, Writer(self._options["most_waiting"]), window)
        return self._here

    def _after_fork(self) -> None:
        if self._here is not None:
            self._here.store.abandon()
        self._here = None
        self._off = False
        self._saying = threading.Lock()
        self.measured = Measured()

    def _warn(self, kind: str, sentence: str) -> None:
        with self._saying:
            new = kind not in self._said
            self._said.add(kind)
        if new:
            logger.warning(sentence)


_caches: weakref.WeakSet[ActivationCache] = weakref.WeakSet()


def _in_child() -> None:
    for cache in list(_caches):
        cache._after_fork()


os.register_at_fork(after_in_child=_in_child)


@dataclass(frozen=True)
class CacheSeconds:
    """Measured seconds for one sample.

    The measured reads find the files in memory. A cache that does not fit into memory reads at the speed of its disk.

    Attributes:
        read: seconds of reading, on the thread that asks.
        write: seconds of writing, on the thread that writes.
        put: seconds that the training waits in `put` for the copy.
    """

    read: float
    write: float
    put: float


_NEVER = CacheSeconds(math.inf, math.inf, math.inf)


def measure(folder: Path | str, num_bytes: int, *, microbatch_rows: int = 8, num_microbatches: int = 4) -> CacheSeconds:
    """Measure reading and writing of a few microbatches of samples, in a temporary folder within `folder`.

    `num_bytes`: bytes of a sample. Returns medians; all are infinite, with a warning, if the folder cannot be written.

    Raises:
        ValueError: as `ActivationCache`.
    """
    generation = Generation(
        weights="measured", depth=1, dtype=torch.float16, shape=(-(-num_bytes // 2),), tensor_ranks=1, tensor_rank=0,
        microbatch_rows=microbatch_rows, padding="", threads=1, kernels="", data="",
    )  # fmt: skip
    most_bytes = 4 * FEWEST_BYTES + 2 * (num_bytes + 8192) * microbatch_rows * num_microbatches
    draws = torch.Generator().manual_seed(0)  # its own, so that a measurement does not change the run's random numbers
    value = torch.randint(-(1 << 15), 1 << 15, generation.shape, dtype=torch.int16, generator=draws)
    samples = torch.arange(num_microbatches * microbatch_rows).split(microbatch_rows)
    puts = []
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix="measure-", dir=folder) as own,
            ActivationCache(own, generation, most_bytes=most_bytes) as cache,
        ):
            for each in samples:
                begin = time.perf_counter()
                cache.put(each, [value.view(torch.float16)] * microbatch_rows)
                puts.append((time.perf_counter() - begin) / microbatch_rows)
                cache.flush()
            for each in samples:
                cache.get(each)
    except OSError as error:
        logger.warning("the cache's folder %s cannot be written (%s); nothing is read from it", folder, error)
        return _NEVER
    read, write = cache.measured.read_seconds, cache.measured.write_seconds
    return _NEVER if read is None or write is None else CacheSeconds(read, write, median(puts))
