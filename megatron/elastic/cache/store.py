"""The storage of values of one size in slots of one file, with an index for each generation.

An index file has a head, which describes the generation, and then entries, which are only appended:

    key of the sample, 16 bytes | slot | checksum of the value | checksum of head and entry

The last entry of a key is valid; an entry without a slot marks the value as deleted. A value is written before its
entry, and a slot is used again only after an entry has marked its value as deleted, or after its generation is deleted.
So a process that is killed leaves at worst a slot that no entry names, or the beginning of an entry, which the next
writer cuts off. A reader returns a value only if it has the checksum of its entry; any other value is a miss.

Writers hold the folder's lock; readers hold none. The last slot within the limit stays free for values that replace
older values, so that an older value is deleted only after the new value is written.

Files are read and written, not mapped: a full disk or a truncated file then raises an error, not a signal.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import threading
import time
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.elastic.cache.folder import PATIENCE, CacheFolder, Warn, try_lock, unlock_and_close, write_all
from megatron.elastic.cache.generation import Generation, digest_of
from megatron.elastic.cache.measured import Measured

WRITE_PATIENCE = 10.0
"""Seconds that a write waits for other processes before it drops its values."""
_MAGIC, _VERSION = b"frozen\r\n", 2
_HEAD = struct.Struct("<8sII")  # magic, version, bytes of the generation's text
_ENTRY = struct.Struct("<16sIII")
_CHECKSUM = struct.Struct("<I")
_GONE = (1 << 32) - 1
_AT_ONCE = _ENTRY.size << 15
_ENTRIES_OF_SLOT = 3  # entries counted for each slot: for its value, for the deletion of it, and for the next value
_MOST_HEAD_BYTES = 1 << 16


@dataclass
class _Index:
    """The entries of one generation that this process has read.

    `places`: key -> slot << 32 | checksum of the value. `damaged`: the keys whose values could not be used.
    """

    inode: int
    seed: int  # checksum of the head
    end: int  # bytes that have been read
    file: int | None = None  # open and locked while this process needs the generation
    places: dict[bytes, int] = field(default_factory=dict)
    damaged: set[bytes] = field(default_factory=set)

    def has(self, key: bytes) -> bool:
        return key in self.places and key not in self.damaged


class CacheStore:
    """The values of the generations that this process needs.

    A fault of the disk is logged as one warning, and not raised. One thread may write while others read.
    """

    def __init__(self, folder: CacheFolder, measured: Measured, warn: Warn) -> None:
        self._folder, self._measured, self._warn = folder, measured, warn
        self._mutex = threading.RLock()  # guards the entries that are read from indexes
        self._num_bytes = self._slot_bytes = 0
        self._values = -1
        self._indexes: dict[str, _Index] = {}  # by name, of all generations with values of this size
        self._uses = array("I")  # by slot, the number of indexes that name it
        self._free: set[int] = set()  # slots that no index names
        self._bytes_left = 0
        self.writable = True
        self.full = False
        """Whether there was no room for a value; then only values that replace others are written."""

    def need(self, generations: Sequence[Generation]) -> None:
        """Make `generations`, whose values have one size, the generations that are read and written.

        Call it only while no thread reads or writes. Generations that were needed before are deleted unless another
        process needs them.
        """
        with self._errors(), self._folder.locked(PATIENCE):
            names = [_name(each) for each in generations]
            given_up = [name for name, index in self._indexes.items() if index.file is not None and name not in names]
            for name in given_up:
                self._release(self._indexes[name])
            if generations[0].num_bytes != self._num_bytes:
                self._begin(generations[0].num_bytes)
            self.full = False
            for name, generation in zip(names, generations, strict=True):
                if name not in self._indexes or self._indexes[name].file is None:
                    self._hold(name, generation)
            self._delete_unneeded(given_up)

    def read(self, generation: Generation, keys: Sequence[bytes]) -> list[Tensor | None]:
        """Read the values of `keys` into new memory; None for a key without a value."""
        begin = time.perf_counter()
        found: list[Tensor | None] = [None] * len(keys)
        with self._errors():
            index = self._needed(generation)
            if index is not None:
                if not all(key in index.places for key in keys):
                    self._catch_up(index, index.file)
                found = [self._value(index, key) for key in keys]
        count = sum(each is not None for each in found)
        self._measured.add_read(time.perf_counter() - begin, count, count * generation.num_bytes)
        return [None if each is None else each.view(generation.dtype).view(generation.shape) for each in found]

    def write(self, generation: Generation, older: Generation | None, keys: Sequence[bytes], values: Tensor) -> None:
        """Write the values for which there is room; if there is none, they replace the same keys' values of `older`.

        Args:
            values: the bytes of each key's value, a uint8 tensor [key, byte] on the host.
        """
        begin = time.perf_counter()
        num_present = num_kept = 0
        with self._errors():
            contents = [memoryview(row) for row in values.numpy()]
            checksums = [zlib.crc32(content) for content in contents]
            with self._folder.locked(WRITE_PATIENCE):
                self._look()
                index = self._needed(generation)
                if index is not None:
                    new = [each for each in zip(keys, contents, checksums, strict=True) if not index.has(each[0])]
                    num_present = len(keys) - len(new)
                    replaced = self._needed(older)
                    if replaced is not None and not self._room():
                        self._free_the_reserve(index, replaced)
                    try:
                        self._add(index, replaced, new)
                    finally:
                        num_kept = sum(map(index.has, keys))
        num_new = num_kept - num_present
        self._measured.add(written=num_present, not_written=len(keys) - num_kept)
        self._measured.add_write(time.perf_counter() - begin, num_new, num_new * generation.num_bytes)

    def takes(self, *, replacing: bool) -> bool:
        """Whether a value may still be written. `replacing`: whether the value may replace an older one."""
        return self.writable and (replacing or not self.full)

    def close(self) -> None:
        for index in self._indexes.values():
            self._release(index)
        if self._values >= 0:
            os.close(self._values)
        self._folder.close()

    def abandon(self) -> None:
        """Close the descriptors of a forked process, whose parent keeps files and locks."""
        files = [index.file for index in self._indexes.values() if index.file is not None]
        for file in (*files, *([self._values] if self._values >= 0 else [])):
            os.close(file)
        self._folder.abandon()

    def _needed(self, generation: Generation | None) -> _Index | None:
        index = None if generation is None else self._indexes.get(_name(generation))
        return None if index is None or index.file is None else index

    def _begin(self, num_bytes: int) -> None:
        """Open the file of values of another size, and forget all indexes."""
        if self._values >= 0:
            os.close(self._values)
        self._indexes, self._uses, self._free = {}, array("I"), set()
        self._num_bytes, self._values = 0, -1
        self._values = self._folder.open(f"{num_bytes}.values", os.O_RDWR | os.O_CREAT)
        self._num_bytes = num_bytes
        self._slot_bytes = num_bytes + _ENTRIES_OF_SLOT * _ENTRY.size

    def _hold(self, name: str, generation: Generation) -> None:
        """Open and lock the index of a generation, which is made if it is missing."""
        head = _head(generation.text.encode())
        while True:
            if name not in self._folder.sizes():
                self._folder.write_whole(name, head)
            file = self._folder.open(name, os.O_RDWR | os.O_APPEND)
            if os.pread(file, len(head), 0) == head:
                break
            os.close(file)
            self._folder.set_aside(name, "its index is none of this generation")
        try_lock(file, fcntl.LOCK_SH)
        self._forget(name)
        self._indexes[name] = _Index(os.fstat(file).st_ino, zlib.crc32(head), len(head), file)
        self._catch_up(self._indexes[name], file)

    def _release(self, index: _Index) -> None:
        if index.file is not None:
            unlock_and_close(index.file)
            index.file = None

    def _delete_unneeded(self, names: Sequence[str] | None) -> None:
        """Delete indexes that no process needs, and files of values without an index.

        `names`: the indexes to look at; None: all.
        """
        sizes = self._folder.sizes()
        for name in sizes if names is None else names:
            if name.endswith(".index") and name in sizes:
                file = self._folder.open(name, os.O_RDONLY)
                if try_lock(file, fcntl.LOCK_EX):
                    self._folder.unlink(name)
                os.close(file)
        left = {name.partition("-")[0] for name in self._folder.sizes() if name.endswith(".index")}
        for name in sizes:
            if name.endswith(".values") and name.removesuffix(".values") not in left:
                self._folder.unlink(name)
        self._look()

    def _look(self) -> None:
        """Read what other processes have written and deleted. Precondition: the folder's lock is held."""
        with self._mutex:
            sizes = self._folder.sizes()
            for name, index in list(self._indexes.items()):
                if index.file is not None:
                    self._catch_up(index, index.file)
                    if os.fstat(index.file).st_size != index.end:  # the file ends with an incomplete entry
                        os.ftruncate(index.file, index.end)
                elif sizes.get(name, (0, 0))[0] != index.inode:
                    self._forget(name)
            for name, (inode, size) in sizes.items():
                if name.startswith(f"{self._num_bytes}-") and name.endswith(".index"):
                    index = self._indexes.setdefault(name, _Index(inode, 0, 0))
                    if index.file is None and size > index.end:
                        self._read_foreign(index, name)
            values_bytes = os.fstat(self._values).st_size  # also where another process has removed the file
            sizes.pop(f"{self._num_bytes}.values", None)
            self._count_slots(values_bytes // self._num_bytes)
            entries_bytes = len(self._uses) * _ENTRIES_OF_SLOT * _ENTRY.size
            used = values_bytes + entries_bytes + sum(size for _, size in sizes.values())
            self._bytes_left = self._folder.most_bytes - used

    def _read_foreign(self, index: _Index, name: str) -> None:
        """Read the slots of a generation that this process does not need. A damaged index has no slots."""
        file = self._folder.open(name, os.O_RDONLY)
        try:
            if not index.end:
                head = os.pread(file, _MOST_HEAD_BYTES, 0)
                text = head[_HEAD.size :][: _HEAD.unpack(head[: _HEAD.size].ljust(_HEAD.size, b"\0"))[2]]
                is_sound = head.startswith(_head(text)) and name == _name_of(self._num_bytes, digest_of(text))
                index.end = _HEAD.size + len(text) if is_sound else sys.maxsize
                index.seed = zlib.crc32(_head(text))
            if index.end < sys.maxsize:
                self._catch_up(index, file)
        finally:
            os.close(file)

    def _forget(self, name: str) -> None:
        index = self._indexes.pop(name, None)
        if index is not None:
            for place in index.places.values():
                self._use(place >> 32, -1)

    def _catch_up(self, index: _Index, file: int) -> None:
        """Read the entries that were appended to an index since the last call."""
        with self._mutex:
            while (count := len(content := os.pread(file, _AT_ONCE, index.end)) // _ENTRY.size) > 0:
                for at in range(0, count * _ENTRY.size, _ENTRY.size):
                    key, slot, checksum, proof = _ENTRY.unpack_from(content, at)
                    begins_beyond = slot != _GONE and slot * self._num_bytes > self._folder.most_bytes
                    if begins_beyond or zlib.crc32(content[at : at + _ENTRY.size - 4], index.seed) != proof:
                        self._miss_damaged("its entry in the index is damaged")
                        continue
                    place = index.places.get(key)
                    if place is not None:
                        self._use(place >> 32, -1)
                    if slot != _GONE:
                        self._use(slot, 1)
                        index.places[key] = slot << 32 | checksum
                    elif place is not None:
                        del index.places[key]
                    index.damaged.discard(key)
                index.end += count * _ENTRY.size

    def _use(self, slot: int, change: int) -> None:
        """Add `change` to the number of indexes that name a slot.

        Two indexes may name the same slot for a while, if the new entry is read before the deletion of the old one.
        """
        self._count_slots(slot + 1)
        self._uses[slot] += change
        if self._uses[slot]:
            self._free.discard(slot)
        else:
            self._free.add(slot)

    def _count_slots(self, num_slots: int) -> None:
        """Raise the number of known slots to at least `num_slots`. New slots are free."""
        self._free.update(range(len(self._uses), num_slots))
        self._uses.extend([0] * (num_slots - len(self._uses)))

    def _room(self) -> int:
        """The number of values that can be written within the limit."""
        return len(self._free) + max(0, self._bytes_left // self._slot_bytes)

    def _add(self, index: _Index, older: _Index | None, values: Sequence[tuple[bytes, memoryview, int]]) -> None:
        """Write the values (key, bytes, checksum) for which there is room, or that may replace values of `older`."""
        entries = []
        try:
            for key, content, checksum in values:
                makes_way = older is not None and key in older.places
                slot = self._slot(makes_way)
                if slot is None:
                    continue
                write_all(self._values, content, slot * self._num_bytes)
                entries.append((key, slot, checksum))
                if makes_way and self.full:
                    self._append(index, entries)
                    self._append(older, [(key, _GONE, 0)])
                    entries = []
        finally:
            self._append(index, entries)

    def _free_the_reserve(self, index: _Index, older: _Index) -> None:
        """Delete the older values that a killed process had replaced but not deleted: they hold the reserve slot."""
        if twice := index.places.keys() & older.places.keys():
            self._append(older, [(key, _GONE, 0) for key in twice])

    def _slot(self, makes_way: bool) -> int | None:
        """A slot for a new value; None if there is no room. `makes_way`: whether the value replaces an older one."""
        if self._room() < 2 and not self.full:
            self._delete_unneeded(None)
        self.full = self._room() < 2
        if self.full and not (makes_way and self._room()):
            self._warn(
                "full",
                f"the cache in {self._folder.path} has come to its limit of {self._folder.most_bytes} bytes; it is "
                "read, and nothing new is written",
            )
            return None
        with self._mutex:
            if not self._free:
                self._bytes_left -= self._slot_bytes
                self._count_slots(len(self._uses) + 1)
            return self._free.pop()

    def _append(self, index: _Index, entries: Sequence[tuple[bytes, int, int]]) -> None:
        packed = [_ENTRY.pack(*each, 0)[:-4] for each in entries]
        content = b"".join(each + _CHECKSUM.pack(zlib.crc32(each, index.seed)) for each in packed)
        assert index.file is not None
        write_all(index.file, memoryview(content))
        self._catch_up(index, index.file)

    def _value(self, index: _Index, key: bytes) -> Tensor | None:
        """The bytes of a value; None if there is no value with the right checksum."""
        while (place := index.places.get(key)) is not None and key not in index.damaged:
            value = torch.empty(self._num_bytes, dtype=torch.uint8)
            content = memoryview(value.numpy())
            slot, checksum = divmod(place, 1 << 32)
            if _read_all(self._values, content, slot * self._num_bytes) and zlib.crc32(content) == checksum:
                return value
            assert index.file is not None
            self._catch_up(index, index.file)
            if index.places.get(key) == place:  # otherwise the value was replaced while it was read
                index.damaged.add(key)
                self._miss_damaged("its checksum is wrong")
        return None

    def _miss_damaged(self, reason: str) -> None:
        self._measured.add(damaged=1)
        self._warn("value", f"a value in the cache in {self._folder.path} is not used: {reason}")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        where = self._folder.path
        try:
            yield
        except TimeoutError:
            self._warn("behind", f"writing to the cache in {where} takes too long; some samples are not written")
        except OSError as error:
            self.writable = False
            self._warn("disk", f"the disk of the cache in {where} takes no more ({error}); what is there is read")


def _name(generation: Generation) -> str:
    return _name_of(generation.num_bytes, generation.digest)


def _name_of(num_bytes: int, digest: bytes) -> str:
    return f"{num_bytes}-{digest.hex()}.index"


def _head(text: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, _VERSION, len(text)) + text


def _read_all(file: int, content: memoryview, begin: int) -> bool:
    """Fill `content` from byte `begin` of a file. Returns False if the file is too short or the disk fails."""
    while content:
        try:
            count = os.preadv(file, [content], begin)
        except OSError:
            return False
        if not count:
            return False
        content, begin = content[count:], begin + count
    return True
