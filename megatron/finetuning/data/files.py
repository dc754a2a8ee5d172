"""Files of samples (JSONL, JSON, CSV, parquet), and the columns that a task reads from them.

The readers of the package `datasets` are no substitute. They guess the type of a CSV column, so that the text "NA"
becomes a missing value and the labels "01" and "1" become the same; they convert texts that look like dates; and their
errors name no line.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from megatron.documents.files import ending, is_compressed, open_text, require_characters

Sample = dict[str, object]

_TOO_MANY = object()
"""The key under which a CSV row holds the fields for which the first line has no name."""

csv.field_size_limit(2**27)


class Stream(Sequence[Sample]):
    """Samples that are read anew by each iteration, and never kept. `read`: begins to read them."""

    def __init__(self, read: Callable[[], Iterator[Sample]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Sample]:
        return self._read()

    @cached_property
    def _length(self) -> int:
        return sum(1 for _ in self._read())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        return next(islice(self._read(), index, None))


@dataclass(frozen=True)
class File:
    """The samples of a file, and its path. Samples may differ in fields that no task reads."""

    path: str
    samples: Sequence[Sample]

    @cached_property
    def _num_with(self) -> Counter[str]:
        """Field -> the number of samples that have it, in the order in which fields first occur."""
        return Counter(name for sample in self.samples for name in sample)

    @property
    def fields(self) -> list[str]:
        """The fields that any sample has, in the order in which they first occur."""
        return list(self._num_with)

    def column(self, given: str | None, known: Sequence[str], what: str) -> str:
        """The name of a column that every sample has: `given`, or else the first of `known` that any sample has.

        Args:
            what: the purpose of the column, as in its flag: "text pair" for --text_pair_column.

        Raises:
            ValueError: if the file or a sample lacks the column; the message lists the fields that exist.
        """
        there, flag = self.fields, f"--{what.replace(' ', '_')}_column"
        name = given if given is not None else next((name for name in known if name in there), None)
        if name is None:
            raise ValueError(
                f"{self.path} has no column for the {what} (looked for {', '.join(known)}); it has {_list(there)}: "
                f"name one with {flag}"
            )
        if name not in there:
            raise ValueError(
                f"{self.path} has no column {name!r} for the {what}; it has {_list(there)}: add it, or name another "
                f"with {flag}"
            )
        for number, sample in enumerate(self.samples if self._num_with[name] < len(self.samples) else (), start=1):
            if name not in sample:
                raise ValueError(
                    f"{self.path}, sample {number}: no field {name!r} for the {what}; it has {_list(sample)}: add it, "
                    "or leave the sample out"
                )
        return name

    def require(self, columns: Mapping[str, str]) -> None:
        """Raise ValueError if a sample lacks one of the columns. `columns`: name -> purpose."""
        for name, what in columns.items():
            self.column(name, (), what)

    def texts(self, name: str, what: str) -> list[str]:
        """The texts of a column. Raises ValueError if a sample lacks the column or its value is not a text."""
        self.column(name, (), what)
        for number, sample in enumerate(self.samples, start=1):
            if not isinstance(sample[name], str):
                raise ValueError(
                    f"{self.path}, sample {number}: {name!r} is {sample[name]!r}, and a text is wanted; mend it"
                )
            require_characters(sample[name], f"{self.path}, sample {number}: {name!r}")
        return [sample[name] for sample in self.samples]


def read_file(path: str, *, limit: int | None = None) -> File:
    """Read all samples of a file, or only the first `limit` samples.

    `path` may also be a folder that `save_to_disk` of the package datasets wrote.

    Raises ValueError for a file that cannot be read, a broken line, and a file without samples.
    """
    samples = list(_samples(path, limit))
    if not samples:
        raise ValueError(f"{path} has no samples; give a file that has")
    return File(path, samples)


def stream_file(path: str, *, limit: int | None = None) -> File:
    """Read a file as `read_file` does, but keep no samples in memory. Iterations raise the errors of samples."""
    stream = Stream(lambda: _samples(path, limit))
    if next(iter(stream), None) is None:
        raise ValueError(f"{path} has no samples; give a file that has")
    return File(path, stream)


def state_of_file(path: Path) -> str:
    """The size of a file and a digest of all its bytes; for a folder of `save_to_disk`, of its files of data."""
    files, digest = [path], hashlib.sha256()
    if path.is_dir():
        said = json.loads((path / "state.json").read_text(encoding="utf-8"))
        files = [path / part["filename"] for part in said["_data_files"]]
    for file in files:
        with file.open("rb") as stream:
            while part := stream.read(2**20):
                digest.update(part)
    return f"{sum(file.stat().st_size for file in files)} bytes, digest {digest.hexdigest()[:16]}"


def pieces_of(file: File, size: int) -> Iterator[File]:
    """The samples of a file in files of at most `size` samples each."""
    samples = iter(file.samples)
    while piece := list(islice(samples, size)):
        yield File(file.path, piece)


def _samples(path: str, limit: int | None) -> Iterator[Sample]:
    file = Path(path)
    if not file.exists():
        raise ValueError(f"there is no file {path}; give JSONL, CSV, parquet, or a folder of datasets' save_to_disk")
    readers = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    reader = _saved if file.is_dir() else readers.get(ending(file))
    if reader is None or (reader is _parquet and is_compressed(file)):
        raise ValueError(
            f"{path} has an unknown ending; give {', '.join(readers)}, or text with .gz, .bz2 or .xz behind"
        )
    try:
        yield from islice(reader(file), limit)
    except (OSError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read ({error}); mend it") from error


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "no field"


def _json_lines(file: Path) -> Iterator[Sample]:
    with open_text(file) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _object(_loaded(line, file, f"line {number}"), file, f"line {number}")


def _json(file: Path) -> Iterator[Sample]:
    with open_text(file) as stream:
        text = stream.read()
    if not text.lstrip().startswith("["):
        yield from _json_lines(file)
        return
    for number, value in enumerate(_loaded(text, file, "the file"), start=1):
        yield _object(value, file, f"sample {number}")


def _loaded(text: str, file: Path, where: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}, {where} is no JSON ({error.msg} at character {error.pos}); mend it") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}, {where} cannot be read ({error}); mend it") from error


def _object(value: object, file: Path, where: str) -> Sample:
    if not isinstance(value, dict):
        raise ValueError(f"{file}, {where} is no object with fields; write one object a sample")
    return value


def _csv(file: Path) -> Iterator[Sample]:
    """Yield the rows as samples. A row that is shorter than the first line lacks the last fields."""
    with open_text(file, newline="") as stream:
        reader = csv.DictReader(stream, restkey=_TOO_MANY, restval=None)
        names = reader.fieldnames or ()
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{file}: the first line names {_list(twice)} twice; rename one")
        for row in reader:
            if _TOO_MANY in row:
                raise ValueError(
                    f"{file}, line {reader.line_num}: it has more fields than the {len(row) - 1} that the first line "
                    f"names ({_list(names)}); mend it"
                )
            yield {name: value for name, value in row.items() if value is not None}


def _parquet(file: Path) -> Iterator[Sample]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{file} needs the package pyarrow; pip install .[parquet]")
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        for batch in table.iter_batches():
            yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file} is no parquet file ({error}); mend it") from error


def _saved(folder: Path) -> Iterator[Sample]:
    """The samples of a folder that `Dataset.save_to_disk` wrote, which are read from its files as they are needed."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        raise ValueError(f"{folder} has the splits {_list(splits)}; give one of them, as {folder / splits[0]}")
    if not (folder / "state.json").is_file():
        raise ValueError(f"{folder} is no folder that save_to_disk of the package datasets wrote; give a file")
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"{folder} needs the package datasets; pip install .[datasets]")
    import datasets

    yield from datasets.load_from_disk(str(folder))
