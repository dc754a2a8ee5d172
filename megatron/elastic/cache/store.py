"""Values in LMDB: reading, writing within the limit, dropping what nobody needs, and what is done about errors.

The limit is LMDB's map: its file never grows beyond. A small part is kept free, since deleting takes pages, too. What
is free within the file is used again, so new values are compared with the pages that are in use and not with the file.
Pages that one transaction frees can be used by the next but one. So where the map is full and old values make way for
new ones, they do so two small transactions earlier.

An error is one warning. A limit or a full disk ends writing; what was found to be damaged ends reading, too.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.elastic.cache.environment import Environment
from megatron.elastic.cache.folder import Warn, lock_generation, mark_damaged
from megatron.elastic.cache.measured import Measured
from megatron.elastic.cache.value import Layout

_FEWEST_RESERVED = 256 << 10
_RESERVED_PART = 64
_DROPPED_AT_ONCE = 256
_TICK = b"t"
_PREFIX_BYTES = 17
_PAGE_HEADER_BYTES = 16
_NODE_BYTES = 64  # of the tree, for a value in a page with others
_PAUSES = (0.0, 0.02, 0.2)  # seconds
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""What a full disk is; LMDB calls it an EIO where the disk took a part of what was to be written."""


@dataclass(frozen=True)
class CacheEntry:
    """One sample's value, sealed when it is written; `older` is the key of the value that makes way for it where there
    is no room for both."""

    key: bytes
    older: bytes | None
    value: Tensor


class CacheStore:
    """The values of one environment."""

    def __init__(self, environment: Environment, measured: Measured, warn: Warn) -> None:
        self._environment, self._measured, self._warn = environment, measured, warn
        self._page_bytes = environment.page_bytes
        reserved = max(_FEWEST_RESERVED, environment.most_bytes // _RESERVED_PART)
        self._most_bytes = environment.most_bytes - reserved
        self.readable = self.writable = True
        self.full = False
        """Whether something found no room; then only what replaces something is tried."""

    def read(self, layout: Layout, keys: Sequence[bytes]) -> list[Tensor | None]:
        found: list[Tensor | None] = [None] * len(keys)
        if not self.readable:
            return found
        begin = time.perf_counter()
        with self._errors(), self._environment.reading() as transaction:
            for index, key in enumerate(keys):
                stored = transaction.get(key)
                if stored is None:
                    continue
                tensor = layout.open(key, stored)
                if isinstance(tensor, str):
                    self._measured.add(damaged=1)
                    self._warn("value", f"a value in the cache in {self._environment.path} is not used: {tensor}")
                else:
                    found[index] = tensor
        count = sum(each is not None for each in found)
        self._measured.add_read(time.perf_counter() - begin, count, count * layout.num_bytes)
        return found

    def write(self, layout: Layout, entries: Sequence[CacheEntry], needed: Collection[bytes]) -> None:
        """Those for which there is room, in one transaction. `needed`: prefixes of keys that may not make way."""
        begin = time.perf_counter()
        left = list(entries)
        with self._errors():
            for each in entries:
                layout.seal(each.key, each.value)
            left, map_is_full = self._put(left)
            if left and not self.full and self._drop_unneeded(needed):
                left, map_is_full = self._put_again(left)
            if left and map_is_full and any(each.older for each in left):
                left = self._put_behind_deletion(left)
            if left:
                self._come_to_limit()
        count = len(entries) - len(left)
        self._measured.add(not_written=len(left))
        self._measured.add_write(time.perf_counter() - begin, count, count * layout.num_bytes)

    def takes(self, *, replacing: bool) -> bool:
        """Whether there is a point in writing something that replaces something, or does not."""
        return self.writable and (replacing or not self.full)

    def drop_some(self, prefix: bytes) -> bool:
        """Delete some values of a generation, if no process needs it. Whether there may be more."""
        more = False
        with self._errors():
            lock = lock_generation(self._environment, prefix[1:])
            try:
                if self.writable and lock.try_alone():
                    keys = self._some_keys(prefix)
                    with self._environment.writing() as transaction:
                        for key in keys:
                            transaction.delete(key)
                        transaction.put(_TICK, time.time_ns().to_bytes(8, "little"))
                    self.full = False
                    more = len(keys) == _DROPPED_AT_ONCE
                    if not more:
                        lock.remove()
            finally:
                lock.release()
        return more

    def _put(self, entries: list[CacheEntry]) -> tuple[list[CacheEntry], bool]:
        """Those that were not written, and whether LMDB said so."""
        import lmdb

        left = []
        try:
            with self._environment.writing() as transaction:
                used = self._used_bytes(transaction)
                for each in entries:
                    own, older = (self._stored_bytes(transaction, key) for key in (each.key, each.older))
                    change = self._bytes_in_pages(len(each.value)) - own
                    if used + change > self._most_bytes >= used + change - older:
                        transaction.delete(each.older)
                        used -= older
                    if used + change > self._most_bytes:
                        left.append(each)
                    else:
                        used += change
                        transaction.put(each.key, memoryview(each.value.numpy()))
        except lmdb.MapFullError:
            return entries, True
        return left, False

    def _put_behind_deletion(self, entries: list[CacheEntry]) -> list[CacheEntry]:
        with self._environment.writing() as transaction:
            for each in entries:
                if each.older is not None:
                    transaction.delete(each.older)
        return self._put_again(entries)[0]

    def _put_again(self, entries: list[CacheEntry]) -> tuple[list[CacheEntry], bool]:
        """As `_put`, behind a deletion whose pages may not be free at once: a reader may still be looking at them."""
        self._environment.forget_the_dead()
        left, map_is_full = entries, True
        for pause in _PAUSES:
            time.sleep(pause)
            with self._environment.writing() as transaction:  # what was freed two transactions before can be used
                transaction.put(_TICK, time.time_ns().to_bytes(8, "little"))
            left, map_is_full = self._put(left)
            if not map_is_full:
                break
        return left, map_is_full

    def _drop_unneeded(self, needed: Collection[bytes]) -> bool:
        """Whether anything was deleted."""
        before = self._num_entries()
        for prefix in self._prefixes():
            while prefix not in needed and self.drop_some(prefix):
                pass
        return self._num_entries() < before

    def _num_entries(self) -> int:
        with self._environment.reading() as transaction:
            return transaction.stat()["entries"]

    def _prefixes(self) -> list[bytes]:
        found = []
        with self._environment.reading() as transaction, transaction.cursor() as cursor:
            more = cursor.set_range(b"g")
            while more and bytes(cursor.key()[:1]) == b"g":
                found.append(bytes(cursor.key()[:_PREFIX_BYTES]))
                more = cursor.set_range(found[-1] + b"\xff")  # no name of a sample begins so
        return found

    def _some_keys(self, prefix: bytes) -> list[bytes]:
        keys = []
        with self._environment.reading() as transaction, transaction.cursor() as cursor:
            more = cursor.set_range(prefix)
            while more and len(keys) < _DROPPED_AT_ONCE and bytes(cursor.key()[:_PREFIX_BYTES]) == prefix:
                keys.append(bytes(cursor.key()))
                more = cursor.next()
        return keys

    def _used_bytes(self, transaction: Any) -> int:
        found = transaction.stat()
        return (found["branch_pages"] + found["leaf_pages"] + found["overflow_pages"]) * self._page_bytes

    def _stored_bytes(self, transaction: Any, key: bytes | None) -> int:
        """What the value of a key takes; 0 where there is none."""
        stored = None if key is None else transaction.get(key)
        return 0 if stored is None else self._bytes_in_pages(len(stored))

    def _bytes_in_pages(self, num_bytes: int) -> int:
        """What a value takes: pages of its own, or a part of one where it is small."""
        if num_bytes < self._page_bytes // 2:
            return num_bytes + _NODE_BYTES
        return -(-(num_bytes + _PAGE_HEADER_BYTES) // self._page_bytes) * self._page_bytes

    def _come_to_limit(self) -> None:
        self.full = True
        where, limit = self._environment.path, self._environment.most_bytes
        self._warn(
            "full",
            f"the cache in {where} has come to its limit of {limit} bytes; it is read, and nothing new is written",
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import lmdb

        try:
            yield
        except (lmdb.Error, OSError) as error:
            where, code = self._environment.path, getattr(error, "code", 0)
            if isinstance(error, lmdb.MapFullError):
                self._come_to_limit()
            elif code in _FULL or isinstance(error, OSError):
                self.writable = False
                self._warn("disk", f"the disk of the cache in {where} takes no more ({error}); what is there is read")
            elif isinstance(error, (lmdb.ReadersFullError, lmdb.MemoryError, lmdb.TxnFullError)):
                self._warn("busy", f"the cache in {where} was not used once or more often ({error})")
                self._environment.forget_the_dead()
            else:
                self.readable = self.writable = False
                if not isinstance(error, lmdb.PanicError):
                    mark_damaged(self._environment)
                self._warn("damaged", f"the cache in {where} is damaged ({error}); it is neither read nor written")
