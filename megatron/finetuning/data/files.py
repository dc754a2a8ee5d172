"""Samples from JSONL, JSON, CSV and parquet files, as dictionaries of columns."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

Sample = dict[str, object]

_TOO_MANY = object()
"""The key of fields beyond those that the first line names."""

csv.field_size_limit(2**27)


def read_samples(path: str, *, limit: int | None = None) -> list[Sample]:
    """All samples of a file, or the first `limit`.

    Raises ValueError for a file that cannot be read, a broken line, samples with other columns than the first, and a
    file without samples: the file, the line and what to do.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"there is no file {path}; give JSONL, CSV or parquet")
    readers = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise ValueError(f"{path} has an unknown ending; give {', '.join(readers)}")
    samples: list[Sample] = []
    try:
        for number, sample in reader(file):
            if samples and (missing := samples[0].keys() - sample.keys()):
                raise ValueError(
                    f"{path}, sample {number}: no field {sorted(missing)[0]!r}, which the first sample has; add it"
                )
            samples.append(sample)
            if limit is not None and len(samples) == limit:
                break
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text (byte {error.start}); convert it") from error
    if not samples:
        raise ValueError(f"{path} has no samples; give a file that has")
    return samples


def column(samples: Sequence[Sample], path: str, given: str | None, known: Sequence[str], what: str) -> str:
    """The name of a column: the given one, or the first of `known` that there is.

    Raises ValueError where it is not there.
    """
    there = samples[0]
    if given is not None:
        if given not in there:
            raise ValueError(f"{path} has no column {given!r} for the {what}; it has {', '.join(map(str, there))}")
        return given
    for name in known:
        if name in there:
            return name
    raise ValueError(
        f"{path} has no column for the {what} (looked for {', '.join(known)}); it has {', '.join(map(str, there))}: "
        f"name one with --{what.replace(' ', '_')}_column"
    )


def texts_of(samples: Sequence[Sample], path: str, name: str) -> list[str]:
    """A column of texts. Raises ValueError for a value that is none."""
    for number, sample in enumerate(samples, start=1):
        if not isinstance(sample[name], str):
            raise ValueError(f"{path}, sample {number}: {name!r} is {sample[name]!r}, and a text is wanted; mend it")
    return [sample[name] for sample in samples]


def _json_lines(file: Path) -> Iterator[tuple[int, Sample]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _object(_loaded(line, file, f"line {number}"), file, f"line {number}")


def _json(file: Path) -> Iterator[tuple[int, Sample]]:
    text = file.read_text(encoding="utf-8")
    if not text.lstrip().startswith("["):
        yield from _json_lines(file)
        return
    for number, each in enumerate(_loaded(text, file, "the file"), start=1):
        yield number, _object(each, file, f"sample {number}")


def _loaded(text: str, file: Path, where: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}, {where} is no JSON ({error.msg} at character {error.pos}); mend it") from error


def _object(value: object, file: Path, where: str) -> Sample:
    if not isinstance(value, dict):
        raise ValueError(f"{file}, {where} is no object with fields; write one object a sample")
    return value


def _csv(file: Path) -> Iterator[tuple[int, Sample]]:
    with file.open(encoding="utf-8-sig", newline="") as stream:  # Excel marks its files so
        reader = csv.DictReader(stream, restkey=_TOO_MANY, restval=None)
        for number, row in enumerate(reader, start=1):
            if _TOO_MANY in row or None in row.values():
                raise ValueError(
                    f"{file}, line {reader.line_num}: it has not as many fields as the first line names; mend it"
                )
            yield number, dict(row)


def _parquet(file: Path) -> Iterator[tuple[int, Sample]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{file} needs the package pyarrow; pip install .[parquet]")
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        first = 1
        for batch in table.iter_batches():
            yield from enumerate(batch.to_pylist(), start=first)
            first += batch.num_rows
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file} is no parquet file ({error}); mend it") from error
