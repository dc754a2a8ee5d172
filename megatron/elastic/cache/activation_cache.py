"""The outputs of a frozen prefix of layers, one per sample, for all processes of a node."""

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
"""Seconds that `put` waits for a writer that has fallen behind before it gives up its samples."""
logger = logging.getLogger(__name__)


@dataclass
class _Here:
    """What this process, and no fork of it, has open."""

    store: CacheStore
    writer: Writer
    window: Window


class ActivationCache:
    """Reads and writes values of one generation, and reads those of the one before it. Never raises for a fault of
    the disk or its files: such is one warning, and a miss.

    To be used by one thread of a process, and by any number of processes. A process that was forked opens the cache
    anew, and so does one that it is pickled for; each closes its own.

    Args:
        folder: on a disk of this node; may be shared with other jobs.
        generation: whose values are read and written.
        most_bytes: the files never become larger. Where others have them open already, their limit stays.
        older: the generation before, if the job went on from there.
        window: samples that `prefetch` may hold in memory.
        most_waiting: calls of `put` whose samples wait in memory for the writer.
        in_background: write on a thread.

    Raises:
        ValueError: the limit is too small, or the folder cannot be one of a cache.
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
            "most_bytes": most_bytes,
            "window": window,
            "most_waiting": most_waiting,
            "in_background": in_background,
        }
        self.generation = generation
        self.older = older if older is not None and generation.deepens(older) else None
        """Whose values `get_older` finds."""
        self._said: set[str] = set()
        self._closed = False
        self._here: _Here | None = None
        self._after_fork()
        self._opened()
        _caches.add(self)

    def get(self, samples: Sequence[Hashable]) -> list[Tensor | None]:
        """The outputs of these samples, in the host's memory and the caller's own; None where there is none.

        Args:
            samples: whole numbers or texts that name them in the data set of the generation.

        Raises:
            ValueError: a name of another kind.
        """
        found = self._get(self.generation, samples)
        count = sum(each is not None for each in found)
        self.measured.add(hits=count, misses=len(found) - count)
        return found

    def get_older(self, samples: Sequence[Hashable]) -> list[Tensor | None]:
        """The same of the generation before, from which the new layers are computed; None where there is none."""
        found = [None] * len(samples) if self.older is None else self._get(self.older, samples)
        self.measured.add(older_hits=sum(each is not None for each in found))
        return found

    def put(self, samples: Sequence[Hashable], tensors: Sequence[Tensor]) -> None:
        """Keep these outputs; the older ones of the same samples make way where there is no room for both. The tensors
        are copied before it returns (on a device: before what its stream is given next).

        Raises:
            ValueError: a tensor is not of the generation's dtype and shape, or a name is of another kind.
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
        """Read these ahead on a thread, at this depth or else at the one before, for the `get` that comes."""
        keys = [key_of_sample(sample) for sample in samples]
        here = self._opened()
        if here is not None:
            here.window.request(keys)

    def deepen(self, generation: Generation) -> None:
        """From now on read and write another generation. What there is of the present one can be had by `get_older`, if
        it is the same but for depth and weights; else, and what is older than that, is deleted unless another process
        needs it. Waits for what was put before.

        The weights of the layers that were frozen before have to be those that they were.
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
        """Wait until what was put is written."""
        if self._here is not None:
            self._here.writer.flush()

    def close(self) -> None:
        """Write what was put, end the threads, close the files. What was written stays for the next one."""
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
        """What this process has open, opened if need be; None where that cannot be."""
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
