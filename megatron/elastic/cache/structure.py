"""Whether an LMDB file (0.9, data format 1, 64 bits) at rest is one that LMDB can work with.

Problem: LMDB maps the file and trusts most of what stands there. A page number beyond the end of the file, or a page
that is used twice, ends the process with a signal, today or after the next write. Values have a checksum; the tree that
leads to them has none.

Solution: before a file that something else may have changed is given to LMDB, its tree is walked here by reading, so
whatever stands there can at worst be refused. Each page of the tree and the header of each value's first page is
looked at, values themselves are not: seconds for a million values.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_MAGIC, _DATA_VERSION = 0xBEEFC0DE, 1
_PAGE = struct.Struct("<QHHHH")  # number, padding, flags, lower, upper
_RUN_LENGTH = struct.Struct("<I")  # of an overflow page, in place of lower and upper
_META = struct.Struct("<II16x")
_DATABASE = struct.Struct("<IHHQQQQQ")  # padding, flags, depth, pages: branch, leaf, overflow; entries, root
_ENDS = struct.Struct("<QQ")  # last page, number of the transaction
_NUMBER = struct.Struct("<Q")
_NODE = struct.Struct("<HHHH")  # size of the data or page number in three parts, size of the key
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_IN_OVERFLOW = 1
_NONE = (1 << 64) - 1
_DEEPEST = 32
_LONGEST_KEY = 511
_MOST_UNWRITTEN = 1 << 20


class UnsoundError(Exception):
    """The file cannot be worked with; the text says why."""


@dataclass(frozen=True)
class _Database:
    padding: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


def require_sound(file: Path) -> None:
    """Raises UnsoundError, or OSError where the file cannot be read. An empty file is sound: LMDB begins anew there."""
    handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        num_bytes = os.fstat(handle).st_size
        if num_bytes:
            _Walk(handle, num_bytes).require_sound()
    finally:
        os.close(handle)


class _Walk:
    def __init__(self, file: int, num_bytes: int) -> None:
        self._file, self._num_bytes = file, num_bytes
        metas = [self._meta(0, None)]
        self._page_bytes = metas[0][1][0].padding
        metas.append(self._meta(self._page_bytes, self._page_bytes))
        last_page, (self._free, self._main), _ = max(metas, key=lambda each: each[2])
        self._num_pages = last_page + 1
        # Pages at the end that were free when they came to be may never have been written.
        if not 2 <= self._num_pages <= num_bytes // self._page_bytes + _MOST_UNWRITTEN:
            raise UnsoundError(f"it has {num_bytes} bytes and should have {self._num_pages} pages")
        self._used = bytearray(self._num_pages)
        self._used[0] = self._used[1] = 1

    def require_sound(self) -> None:
        if self._main.flags or self._free.flags & ~0x8 or self._main.padding:
            raise UnsoundError("its tables are of a kind that is not used here")
        for _ in self._entries(self._main, "main"):
            pass
        # What is free can be written next, so it must be nothing that is used.
        for _, record in self._entries(self._free, "free pages"):
            if len(record) < 8 or len(record) % 8:
                raise UnsoundError("a list of free pages has no length")
            count, *pages = struct.unpack(f"<{len(record) // 8}Q", record)
            if count > len(pages):
                raise UnsoundError("a list of free pages is longer than its record")
            for page in pages[:count]:
                self._use(page, 1)
            if any(page <= following for page, following in pairwise(pages[:count])):
                raise UnsoundError("a list of free pages is out of order")

    def _meta(self, at: int, page_bytes: int | None) -> tuple[int, list[_Database], int]:
        begin = _PAGE.size + _META.size
        content = self._read(at, begin + 2 * _DATABASE.size + _ENDS.size)
        number, _, flags, _, _ = _PAGE.unpack_from(content)
        magic, version = _META.unpack_from(content, _PAGE.size)
        if magic != _MAGIC or version != _DATA_VERSION:
            raise UnsoundError("it is no LMDB file of format 1")
        databases = [_Database(*_DATABASE.unpack_from(content, begin + each * _DATABASE.size)) for each in range(2)]
        said = databases[0].padding
        if not flags & _META_PAGE or number != (0 if page_bytes is None else 1):
            raise UnsoundError("its first pages are not where they should be")
        if said not in (4096, 8192, 16384, 32768) or page_bytes not in (None, said):
            raise UnsoundError(f"its pages have {said} bytes")
        last_page, transaction = _ENDS.unpack_from(content, begin + 2 * _DATABASE.size)
        return last_page, databases, transaction

    def _entries(self, database: _Database, name: str) -> Iterator[tuple[bytes, bytes]]:
        """Key and data of each entry, in order; of the main table without the data."""
        with_data = database is self._free
        found = {_BRANCH: 0, _LEAF: 0, _OVERFLOW: 0}
        num_entries, before = 0, b""
        if database.root == _NONE:
            pages: list[tuple[int, int]] = []
        else:
            pages = [(database.root, 1)]
        if database.depth > _DEEPEST:
            raise UnsoundError(f"the tree of {name} is {database.depth} pages deep")
        while pages:
            page, level = pages.pop()
            self._use(page, 1)
            content = self._read(page * self._page_bytes, self._page_bytes)
            number, _, kind, lower, upper = _PAGE.unpack_from(content)
            expected = _LEAF if level == database.depth else _BRANCH
            if number != page or kind != expected:
                raise UnsoundError(f"page {page} of {name} says that it is page {number} of kind {kind}")
            if not _PAGE.size <= lower <= upper <= self._page_bytes or lower % 2:
                raise UnsoundError(f"page {page} of {name} has no order")
            found[kind] += 1
            places = struct.unpack_from(f"<{(lower - _PAGE.size) // 2}H", content, _PAGE.size)
            if len(places) < (1 if kind == _LEAF or with_data else 2):
                raise UnsoundError(f"page {page} of {name} has {len(places)} entries")
            below, separator = [], b""
            for index, place in enumerate(places):
                low, high, flags, key_bytes = self._node(content, place, upper)
                key = content[place + _NODE.size : place + _NODE.size + key_bytes]
                if with_data:
                    key = key[::-1]  # numbers, little end first
                if kind == _BRANCH:
                    below.append((low | high << 16 | flags << 32, level + 1))
                    if index and key <= separator:  # the first stands for anything smaller
                        raise UnsoundError(f"page {page} of {name} is out of order")
                    separator = key if index else b""
                    continue
                if key <= before or (with_data and key_bytes != _NUMBER.size):
                    raise UnsoundError(f"page {page} of {name} is out of order")
                before = key
                num_entries += 1
                yield (
                    key,
                    self._data(content, place + _NODE.size + key_bytes, low | high << 16, flags, with_data, found),
                )
            pages += reversed(below)
        if (found[_BRANCH], found[_LEAF], found[_OVERFLOW], num_entries) != (
            database.branch_pages,
            database.leaf_pages,
            database.overflow_pages,
            database.entries,
        ):
            raise UnsoundError(f"the tree of {name} has another size than is said")

    def _node(self, content: bytes, place: int, upper: int) -> tuple[int, int, int, int]:
        if place % 2 or not upper <= place <= self._page_bytes - _NODE.size:
            raise UnsoundError("an entry lies outside of its page")
        node = _NODE.unpack_from(content, place)
        if node[3] > _LONGEST_KEY or place + _NODE.size + node[3] > self._page_bytes:
            raise UnsoundError("a key lies outside of its page")
        return node

    def _data(
        self, content: bytes, begin: int, num_bytes: int, flags: int, with_data: bool, found: dict[int, int]
    ) -> bytes:
        if not flags:
            if begin + num_bytes > self._page_bytes:
                raise UnsoundError("an entry is longer than its page")
            return content[begin : begin + num_bytes]
        if flags != _IN_OVERFLOW or begin + 8 > self._page_bytes:
            raise UnsoundError("an entry is of a kind that is not used here")
        page = _NUMBER.unpack_from(content, begin)[0]
        at = page * self._page_bytes
        if not 2 <= page < self._num_pages:
            raise UnsoundError(f"an entry lies on page {page} of {self._num_pages}")
        header = self._read(at, _PAGE.size)
        number, _, kind, _, _ = _PAGE.unpack(header)
        (num_pages,) = _RUN_LENGTH.unpack_from(header, _PAGE.size - _RUN_LENGTH.size)
        if number != page or kind != _OVERFLOW or num_pages * self._page_bytes < _PAGE.size + num_bytes:
            raise UnsoundError(f"page {page} is not the first page of an entry")
        self._use(page, num_pages)
        found[_OVERFLOW] += num_pages
        return self._read(at + _PAGE.size, num_bytes) if with_data else b""

    def _use(self, page: int, count: int) -> None:
        if not 2 <= page <= page + count <= self._num_pages:
            raise UnsoundError(f"page {page} is used, of {self._num_pages}")
        if any(self._used[page : page + count]):
            raise UnsoundError(f"page {page} is used twice")
        self._used[page : page + count] = b"\1" * count

    def _read(self, at: int, count: int) -> bytes:
        content = os.pread(self._file, count, at) if at + count <= self._num_bytes else b""
        if len(content) != count:
            raise UnsoundError("it ends too early")
        return content
