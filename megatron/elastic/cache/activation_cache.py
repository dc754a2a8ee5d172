"""The outputs of a frozen prefix of layers, one per sample, for all processes of a node."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from megatron.backend.streams import streams_of
from megatron.elastic.cache.environment import Environment, require_lmdb
from megatron.elastic.cache.file_lock import FileLock
from megatron.elastic.cache.folder import PATIENCE, close_folder, lock_generation, open_folder
from megatron.elastic.cache.generation import Generation
from megatron.elastic.cache.measured import Measured
from megatron.elastic.cache.store import CacheEntry, CacheStore
from megatron.elastic.cache.value import Layout
from megatron.elastic.cache.window import Window
from megatron.elastic.cache.writer import Writer

PUT_PATIENCE = 10.0
"""Seconds that `put` waits for a writer that has fallen behind before it gives up its samples."""
CLOSE_PATIENCE = 60.0
"""Seconds that `close` waits for writes."""
logger = logging.getLogger(__name__)


@dataclass
class _Here:
    """What this process, and no fork of it, has open."""

    environment: Environment
    store: CacheStore
    writer: Writer
    window: Window
    locks: dict[bytes, FileLock] = field(default_factory=dict)


class ActivationCache:
    """Reads and writes values of one generation, and reads those of the one before it. Never raises for a fault of
    the disk or its files: such is one warning, and a miss.

    To be used by one thread of a process, and by any number of processes. A process that was forked opens it anew, and
    so does one that it is pickled for; each closes its own.

    Args:
        folder: on a disk of this node; may be shared with other jobs.
        generation: whose values are read and written.
        most_bytes: the file never becomes larger. Where others have it open already, their limit stays.
        older: the generation before, if the job went on from there.
        window: samples that `prefetch` may hold in memory.
        most_waiting: calls of `put` whose samples wait in memory for the writer.
        in_background: write on a thread.

    Raises:
        ValueError: lmdb is missing, the limit is too small, the folder cannot be one of a cache, or a sample's output
            is too large.
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
        require_lmdb()
        self._layout = Layout(generation)
        self._older = Layout(older) if older is not None and generation.deepens(older) else None
        self._said: set[str] = set()
        self._closed = False
        self._here: _Here | None = None
        self._after_fork()
        self._opened()
        _caches.add(self)

    @property
    def generation(self) -> Generation:
        return self._layout.generation

    @property
    def older(self) -> Generation | None:
        """Whose values `get_older` finds."""
        return self._older.generation if self._older is not None else None

    def get(self, samples: Sequence[Hashable]) -> list[Tensor | None]:
        """The outputs of these samples, in the host's memory and the caller's own; None where there is none.

        Args:
            samples: whole numbers or texts that name them in the data set of the generation.

        Raises:
            ValueError: a name of another kind.
        """
        found = self._get(self._layout, samples)
        count = sum(each is not None for each in found)
        self.measured.add(hits=count, misses=len(found) - count)
        return found

    def get_older(self, samples: Sequence[Hashable]) -> list[Tensor | None]:
        """The same of the generation before, from which the new layers are computed; None where there is none."""
        found = self._get(self._older, samples) if self._older is not None else [None] * len(samples)
        self.measured.add(older_hits=sum(each is not None for each in found))
        return found

    def put(self, samples: Sequence[Hashable], tensors: Sequence[Tensor]) -> None:
        """Keep these outputs; the older ones of the same samples make way where there is no room for both. The tensors
        are copied before it returns (on a device: before what its stream is given next).

        Raises:
            ValueError: a tensor is not of the generation's dtype and shape, or a name is of another kind.
        """
        assert len(samples) == len(tensors)
        layout, older = self._layout, self._older
        for tensor in tensors:
            layout.require(tensor)
        keys = [(layout.key(sample), older.key(sample) if older is not None else None) for sample in samples]
        here = self._opened()
        if not keys:
            return
        if here is None or not here.store.takes(replacing=older is not None):
            self.measured.add(not_written=len(keys))
            return
        streams = streams_of(tensors[0].device)
        entries = []
        for (key, older_key), tensor in zip(keys, tensors, strict=True):
            value, place = layout.new_value(streams)
            place.copy_(tensor.detach(), non_blocking=True)
            entries.append(CacheEntry(key, older_key, value))
        copied = streams.record()

        def write() -> None:
            streams.finish(copied)
            here.store.write(layout, entries, [each.prefix for each in self._layouts()])

        if not self._options["in_background"]:
            write()
        elif not here.writer.submit(write, PUT_PATIENCE):
            self.measured.add(not_written=len(keys))
            self._warn("behind", f"writing to the cache in {self.folder} takes too long; some samples are not written")

    def prefetch(self, samples: Sequence[Hashable]) -> None:
        """Read these ahead on a thread, at this depth or else at the one before, for the `get` that comes."""
        here = self._opened()
        if here is not None and here.store.readable:
            here.window.request([self._layout.key(sample) for sample in samples])

    def deepen(self, generation: Generation) -> None:
        """From now on read and write another generation. What there is of the present one can be had by `get_older`, if
        it is the same but for depth and weights; else, and what is older than that, is deleted unless another process
        needs it.

        The weights of the layers that were frozen before have to be those that they were.
        """
        assert generation.depth >= self.generation.depth, "what is frozen stays so"
        if generation == self.generation:
            return
        layout = Layout(generation)
        superseded = [] if self._older is None else [self._older]
        if generation.deepens(self.generation):
            self._older = self._layout
        else:
            superseded.append(self._layout)
            self._older = None
        self._layout = layout
        here = self._opened()
        if here is not None:
            here.window.clear()
            here.store.full = False
            self._lock_generations(here)
        self._drop(superseded)

    def forget_older(self) -> None:
        """Delete the values of the generation before, unless another process needs them."""
        if self._older is not None:
            superseded, self._older = [self._older], None
            self._drop(superseded)

    def flush(self) -> None:
        """Wait until what was put is written, and what is not needed is deleted."""
        if self._here is not None:
            self._here.writer.flush()

    def close(self) -> None:
        """Write what was put, end the threads, close the files. What was written stays for the next one."""
        here, self._here, self._closed = self._here, None, True
        if here is None:
            return
        try:
            here.window.close(CLOSE_PATIENCE)
            here.writer.close(CLOSE_PATIENCE)
        finally:
            if here.writer.is_alive or here.window.is_alive:  # held up by a process that was stopped
                self._warn(
                    "stuck", f"the cache in {self.folder} has not answered for {CLOSE_PATIENCE:g} s; it stays open"
                )
            else:
                for lock in here.locks.values():
                    lock.release()
                close_folder(here.environment)

    def __enter__(self) -> ActivationCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable, tuple]:
        return partial(ActivationCache, older=self.older, **self._options), (self.folder, self.generation)

    def _get(self, layout: Layout, samples: Sequence[Hashable]) -> list[Tensor | None]:
        keys = [layout.key(sample) for sample in samples]
        here = self._opened()
        if here is None:
            return [None] * len(keys)
        found = [here.window.take(key) for key in keys]
        missing = [index for index, tensor in enumerate(found) if tensor is None]
        self.measured.add(prefetched=len(keys) - len(missing))
        for index, tensor in zip(missing, here.store.read(layout, [keys[each] for each in missing]), strict=True):
            found[index] = tensor
        return found

    def _read_ahead(self, store: CacheStore, keys: Sequence[bytes]) -> dict[bytes, Tensor]:
        found: dict[bytes, Tensor] = {}
        for layout in self._layouts():
            mine = [layout.prefix + key[len(layout.prefix) :] for key in keys]
            tensors = store.read(layout, mine)
            found |= {key: tensor for key, tensor in zip(mine, tensors, strict=True) if tensor is not None}
            keys = [key for key, tensor in zip(keys, tensors, strict=True) if tensor is None]
        return found

    def _layouts(self) -> list[Layout]:
        layout, older = self._layout, self._older
        return [layout] if older is None else [layout, older]

    def _drop(self, layouts: Sequence[Layout]) -> None:
        here = self._opened()
        if here is None:
            return
        for layout in layouts:
            lock = here.locks.pop(layout.prefix, None)
            if lock is not None:
                lock.release()
            drop = partial(here.store.drop_some, layout.prefix)
            if self._options["in_background"]:
                here.writer.do_in_time(drop)
            else:
                while drop():
                    pass

    def _opened(self) -> _Here | None:
        """What this process has open, opened if need be; None where that cannot be."""
        assert not self._closed
        if self._here is None and not self._off:
            import lmdb

            try:
                environment = open_folder(self.folder, self._options["most_bytes"], self._warn)
            except (OSError, lmdb.Error) as error:
                self._off = True
                self._warn("off", f"the cache in {self.folder} cannot be opened ({error}); all is computed")
                return None
            store = CacheStore(environment, self.measured, self._warn)
            writer = Writer(self._options["most_waiting"])
            window = Window(partial(self._read_ahead, store), self._options["window"])
            self._here = _Here(environment, store, writer, window)
            self._lock_generations(self._here)
        return self._here

    def _lock_generations(self, here: _Here) -> None:
        """Say that these are needed. Where that cannot be said, they may be deleted, and are missed."""
        for layout in self._layouts():
            if layout.prefix not in here.locks:
                with suppress(OSError):
                    lock = lock_generation(here.environment, layout.generation.digest, layout.generation.text)
                    here.locks[layout.prefix] = lock
                    lock.share(PATIENCE)

    def _after_fork(self) -> None:
        for lock in self._here.locks.values() if self._here is not None else ():
            lock.abandon()
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
