"""The data files of a language model with their weights, and checks of each .bin/.idx pair. Imports no torch.

Problem: a truncated or empty file would cause an error only hours later, in the middle of an epoch, as a wrong slice or
a crash. If a file is truncated while a run reads it, the process dies of a bus error if the file is mapped into memory;
megatron.core's other reader returns uninitialised memory.

Solution: pairs are checked at the start of a run, in constant time per pair, and at each read; the errors of
`BinReader` name the file. The layout is that of megatron.core's IndexedDataset: a header (magic, version, dtype code,
number of sequences, number of document borders), then lengths (int32), byte offsets (int64) and document borders
(int64, from 0).
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol

from megatron.documents import counted

if TYPE_CHECKING:
    import numpy

# --- files and their weights ------------------------------------------------------------------------------------------

Blend = tuple[list[str], list[float] | None]


class DataFlags(Protocol):
    """The flags that name the data of a language model."""

    mock_data: bool
    data_path: list[str] | None
    train_data_path: list[str] | None
    valid_data_path: list[str] | None
    test_data_path: list[str] | None
    data_args_path: str | None
    per_split_data_args_path: str | None


_PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")


def parse_blend(words: list[str] | None, source: str = "--data-path") -> Blend | None:
    """Parse the words of a blend: prefixes, or weights and prefixes in turn. A prefix with weight 0 is left out.

    Raises ValueError, naming `source`, for an invalid weight.
    """
    if not words:
        return None
    try:
        weights = [float(word) for word in words[0::2]]
    except ValueError:
        return list(words), None
    prefixes = words[1::2]
    if len(words) == 1 or len(prefixes) != len(weights):
        return list(words), None
    for word, weight, prefix in zip(words[0::2], weights, prefixes, strict=True):
        if not math.isfinite(weight) or weight < 0:
            what = "negative" if weight < 0 else "no finite number"
            raise ValueError(
                f"{source} gives {prefix} the weight {word}, which is {what}; give each prefix a number above 0, or 0 "
                "to leave it out"
            )
    if not any(weights):
        raise ValueError(f"{source} gives every prefix the weight 0, so there is nothing to read; weigh one above 0")
    read = [(prefix, weight) for prefix, weight in zip(prefixes, weights, strict=True) if weight]
    return [prefix for prefix, _ in read], [weight for _, weight in read]


def blends(args: DataFlags) -> tuple[Blend | None, list[Blend | None] | None]:
    """The blend to be split (or None), and the blends of the splits (or None). Both are None for mock data.

    Raises ValueError for invalid weights, and for files of words that cannot be read.
    """
    blend, *per_split = [parse_blend(words, source) for source, words in _sources(args)]
    return blend, per_split if any(per_split) else None


def notes_on_weights(args: DataFlags) -> list[str]:
    """A note for each source in which prefixes have the weight 0. Raises ValueError for invalid weights.

    Other code reports missing files.
    """
    files = (args.data_args_path, args.per_split_data_args_path)
    notes: list[str] = []
    if any(path and not os.path.isfile(path) for path in files):
        return notes
    for source, words in _sources(args):
        blend = parse_blend(words, source)
        if blend is not None and blend[1] is not None and 2 * len(blend[0]) < len(words):
            left_out = [prefix for weight, prefix in zip(words[0::2], words[1::2], strict=True) if not float(weight)]
            notes.append(f"nothing is read of {', '.join(left_out)}: {source} gives the weight 0")
    return notes


def _sources(args: DataFlags) -> list[tuple[str, list[str] | None]]:
    """The words of blends as (flag or file, words): first the blend to be split, then the blend of each split."""
    if args.mock_data:
        return [("--mock-data", None)]
    if args.data_args_path:
        return [(f"--data-args-path {args.data_args_path}", _read(args.data_args_path).split())]
    if args.per_split_data_args_path:
        name = f"--per-split-data-args-path {args.per_split_data_args_path}"
        try:
            per_split = json.loads(_read(args.per_split_data_args_path))
        except json.JSONDecodeError as error:
            raise ValueError(f"{name} is not JSON: {error}") from error
        splits = ("train", "valid", "test")
        if not isinstance(per_split, dict) or not all(isinstance(words, list) for words in per_split.values()):
            raise ValueError(f'{name} is no object of lists; write such as {{"train": ["1", "PREFIX"]}}')
        if not any(per_split.get(split) for split in splits):
            raise ValueError(f"{name} names no data; give the keys {', '.join(splits)} lists of weights and prefixes")
        return [(name, None), *((f"{name}, {split}", list(map(str, per_split.get(split, ())))) for split in splits)]
    if args.data_path:
        return [("--data-path", args.data_path)]
    return [("--data-path", None), *((f"--{name.replace('_', '-')}", getattr(args, name)) for name in _PER_SPLIT)]


def _read(path: str) -> str:
    if not os.path.isfile(path):
        raise ValueError(f"file {path} does not exist")
    with open(path, encoding="utf-8") as stream:
        return stream.read()


# --- checks of a pair -------------------------------------------------------------------------------------------------

_MAGIC = b"MMIDIDX\x00\x00"
_ITEM_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
_NAMES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_HEADER_SIZE = 34


class Contents(NamedTuple):
    """The content of a .bin/.idx pair. A document has one sequence, or with `--split-sentences` one per sentence."""

    num_sequences: int
    num_documents: int
    num_tokens: int


def check_indexed_dataset(prefix: str) -> Contents:
    """Check that `prefix`.idx and `prefix`.bin fit together. Returns their content.

    Raises ValueError that names the file and its error.
    """
    index, binary = f"{prefix}.idx", f"{prefix}.bin"
    for path in (index, binary):
        if not os.path.isfile(path):
            raise ValueError(f"data file {path} does not exist; give the prefix of a .bin/.idx pair as --data-path")
    size = os.path.getsize(index)
    if size == 0:
        raise ValueError(f"data file {index} is empty; run tools/preprocess_data.py again")
    with open(index, "rb") as stream:
        header = stream.read(_HEADER_SIZE)
        if header[: len(_MAGIC)] != _MAGIC[: len(header)]:
            raise ValueError(f"data file {index} is no index of a dataset; give the prefix of a .bin/.idx pair")
        if len(header) < _HEADER_SIZE:
            raise ValueError(f"data file {index} is truncated; run tools/preprocess_data.py again")
        version, code, num_sequences, num_documents = struct.unpack("<QBQQ", header[len(_MAGIC) :])
        if version != 1 or code not in _ITEM_SIZES:
            raise ValueError(
                f"data file {index} has version {version} and dtype {code}, and known are version 1 and dtypes 1 to "
                f"{max(_ITEM_SIZES)}; run tools/preprocess_data.py again"
            )
        if num_sequences == 0:
            raise ValueError(f"data file {index} has no sequences; was the text empty?")
        expected = _HEADER_SIZE + 12 * num_sequences + 8 * num_documents
        if size not in (expected, expected + num_sequences):  # some files have a mode byte for each sequence
            raise ValueError(_another_size(index, size, expected))
        lengths = _last_two(stream, _HEADER_SIZE, "i", num_sequences)
        offsets = _last_two(stream, _HEADER_SIZE + 4 * num_sequences, "q", num_sequences)
    expected = offsets[-1] + lengths[-1] * _ITEM_SIZES[code]
    size = os.path.getsize(binary)
    stored, is_sure = _bytes_a_token(lengths, offsets, size, _ITEM_SIZES[code])
    if stored is not None and stored != _ITEM_SIZES[code]:
        or_cut = "" if is_sure else f"is truncated, {size} of {expected} bytes, or "
        raise ValueError(
            f"data file {binary} {or_cut}holds tokens of {counted(stored, 'byte')}, and {index} says "
            f"{_NAMES[code]}, of {_ITEM_SIZES[code]}: they do not belong together; run tools/preprocess_data.py again"
        )
    if size != expected:
        raise ValueError(_another_size(binary, size, expected))
    num_tokens = expected // _ITEM_SIZES[code]
    if num_tokens == 0:
        raise ValueError(f"data file {binary} has no tokens; was the text empty?")
    return Contents(num_sequences, num_documents - 1, num_tokens)


def _last_two(stream: BinaryIO, start: int, kind: str, count: int) -> tuple[int, ...]:
    """The last two of `count` numbers in a stream, which begin at byte `start`; the only number if `count` is 1."""
    layout = struct.Struct(f"<{min(count, 2)}{kind}")
    stream.seek(start + (count - min(count, 2)) * struct.calcsize(f"<{kind}"))
    return layout.unpack(stream.read(layout.size))


def _another_size(path: str, size: int, expected: int) -> str:
    what = "empty" if size == 0 else "truncated" if size < expected else "longer than its index says"
    return f"data file {path} is {what}: {size} of {expected} bytes; run tools/preprocess_data.py again"


def _bytes_a_token(lengths: tuple[int, ...], offsets: tuple[int, ...], size: int, said: int) -> tuple[int | None, bool]:
    """The number of bytes of a token in the data, and whether it is certain; `said`: the index's number.

    The number follows from the offsets or, if these agree with the index's dtype, from the size of the data. It is None
    if no dtype has this size; then bytes are missing or superfluous. If the offsets agree with the dtype and there are
    too few bytes, the data are truncated.
    """
    known = set(_ITEM_SIZES.values())
    has_two = len(lengths) == 2 and lengths[0] > 0
    if has_two:
        by_offsets, rest = divmod(offsets[1] - offsets[0], lengths[0])
        if rest == 0 and by_offsets in known - {said}:
            return by_offsets, True
    num_tokens = offsets[-1] // said + lengths[-1]
    by_size, rest = divmod(size, num_tokens) if num_tokens > 0 else (0, 0)
    is_known = rest == 0 and by_size in known and not (has_two and by_size < said)
    return (by_size if is_known else None), by_size >= said


class BinReader:
    """A reader of a .bin file for megatron.core's IndexedDataset, with one open file that processes may share.

    Raises ValueError if the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - open for as long as the dataset
        except OSError as error:
            raise ValueError(f"data file {path} cannot be read: {error.strerror}") from error

    def read(self, dtype: type[numpy.number], count: int, offset: int) -> numpy.ndarray:
        """Read `count` numbers from byte `offset` on. Raises ValueError if the file ends earlier."""
        import numpy  # imported here, since the rules of flags import this module and need no numpy

        numbers = numpy.empty(count, dtype)
        left = numbers.view(numpy.uint8)
        try:
            while left.size:  # one call reads at most 2 GiB
                num_read = os.preadv(self._file.fileno(), [left], offset)
                if num_read == 0:
                    raise ValueError(
                        f"data file {self._path} was cut short while the run read it: it has "
                        f"{os.fstat(self._file.fileno()).st_size} bytes, and {offset + left.size} are wanted; run "
                        "tools/preprocess_data.py again, and go on from the last checkpoint"
                    )
                left, offset = left[num_read:], offset + num_read
        except OSError as error:
            raise ValueError(f"data file {self._path} cannot be read: {error.strerror}") from error
        return numbers


def damaged_index_cache(folders: Iterable[str]) -> str | None:
    """A sentence about the first damaged file of sample indices (.npy) in `folders`; None if there is none.

    A file is damaged if it has no header, or is shorter than its header says. megatron.core's error names no file.
    """
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.npy")):
            size, expected = path.stat().st_size, _bytes_of_array(path)
            if expected is None or size < expected:
                what = "damaged" if expected is None else f"truncated: {size} of {expected} bytes"
                return f"sample indices {path} are {what}; remove that file, and they are made anew"
    return None


def _bytes_of_array(path: Path) -> int | None:
    """The length in bytes that the header of a .npy file implies; None if there is no header."""
    from numpy.lib import format as layout

    with open(path, "rb") as stream:
        try:
            is_short = layout.read_magic(stream) == (1, 0)
            header = layout.read_array_header_1_0 if is_short else layout.read_array_header_2_0
            shape, _, dtype = header(stream)
        except ValueError:
            return None
        return stream.tell() + math.prod(shape) * dtype.itemsize


def document_lengths(prefix: str, part: tuple[float, float] = (0.0, 1.0)) -> Iterator[numpy.ndarray]:
    """Yield the lengths in tokens of the sequences of each document, int32 [sequences].

    `prefix`: a pair that is already checked. `part`: the range of the documents to read, as two fractions of their
    number, rounded as in megatron.core's splits.
    """
    import numpy

    index = f"{prefix}.idx"
    with open(index, "rb") as stream:
        _, _, num_sequences, num_borders = struct.unpack("<QBQQ", stream.read(_HEADER_SIZE)[len(_MAGIC) :])
    lengths = numpy.memmap(index, numpy.int32, "r", _HEADER_SIZE, (num_sequences,))
    borders = numpy.memmap(index, numpy.int64, "r", _HEADER_SIZE + 12 * num_sequences, (num_borders,))
    first, last = (round(share * (num_borders - 1)) for share in part)
    for document in range(first, last):
        yield lengths[borders[document] : borders[document + 1]]
