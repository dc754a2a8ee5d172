"""Rows in a file that is mapped into memory, for data larger than memory.

Problem: rows in memory are held by each process of a host, and the samples beside them while they are converted.

Solution: the package `datasets` writes the rows into an Arrow file, once for all processes of a host, and reads those
of a microbatch by their numbers. The pages that the file has in memory belong to the system, which drops them as it
needs to. A process keeps 8 bytes of a row for its number of terms, and as many for each length.

A folder in the cache is named by a digest of everything that decides the rows. It appears whole or not at all: the
process that holds the lock writes a temporary folder and renames it. The system frees the lock of a killed process.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.finetuning.data.batches import Rows
from megatron.finetuning.data.files import File, pieces_of

PIECE = 250
"""The number of samples that are converted at once."""

MOST_NOTES = 3
"""The most notes on the preparation of samples that are kept."""

_TERMS = "number of terms"
"""The column of the numbers of terms."""


class StoredRows(Rows):
    """The rows in a folder that `write_rows` wrote, read as they are asked for. They are for training: no metrics.

    Attributes:
        contents: the states of the files from which the rows were made (`contents_of_files`).
    """

    def __init__(self, folder: Path) -> None:
        import datasets

        said = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
        self._shapes: dict[str, tuple[int, ...]] = {name: tuple(shape) for name, shape in said["shapes"].items()}
        self.contents: dict[str, str | None] = said["contents"]
        self._file = datasets.Dataset.from_file(str(folder / "rows.arrow")).with_format("arrow")
        terms = torch.cat([_tensor(part.column(_TERMS)) for part in self._file.select_columns([_TERMS]).iter(4096)])
        super().__init__({}, ignored=said["ignored"], num_terms=terms, notes=said["notes"], targets=said["targets"])

    def _take(self, indices: Sequence[int]) -> dict[str, Tensor]:
        table = self._file[list(indices)]
        return {name: _tensor(table.column(name)).view(-1, *shape) for name, shape in self._shapes.items()}


def _tensor(column: Any) -> Tensor:
    """The values of a column of lists of a fixed length, int64 [values]."""
    return torch.tensor(column.combine_chunks().flatten().to_numpy(zero_copy_only=False))


def write_rows(parts: Iterable[Rows], folder: Path, contents: Mapping[str, str | None]) -> None:
    """Write rows of integers, one part after another, into a folder. `contents`: as `StoredRows` has them."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    writer, notes, last = None, [], None
    for part in parts:
        columns = {**part._tensors, _TERMS: part._num_terms}
        assert not any(tensor.is_floating_point() for tensor in columns.values()), "rows of numbers that are no tokens"
        if writer is None:
            sizes = {name: tensor[0].numel() for name, tensor in columns.items()}
            features = {name: datasets.Sequence(datasets.Value("int64"), length=size) for name, size in sizes.items()}
            writer = ArrowWriter(features=datasets.Features(features), path=str(folder / "rows.arrow"))
        writer.write_batch({name: list(tensor.view(len(part), -1).numpy()) for name, tensor in columns.items()})
        notes, last = [*notes, *part.notes], part
    writer.finalize()
    writer.close()
    if len(notes) > MOST_NOTES:
        notes = [*notes[:MOST_NOTES], f"{len(notes) - MOST_NOTES} more such notes on parts of the data"]
    said = {
        "shapes": {name: tensor.shape[1:] for name, tensor in last._tensors.items()},
        "ignored": dict(last._ignored), "targets": last._targets, "notes": notes,
        "contents": contents,
    }  # fmt: skip
    (folder / "rows.json").write_text(json.dumps(said), encoding="utf-8")


def in_parts(file: File, rows_of_pieces: Callable[[Iterable[File]], Iterator[Rows]]) -> Iterator[Rows]:
    """The rows of a file, converted `PIECE` samples at a time."""
    first = 1

    def pieces() -> Iterator[File]:
        nonlocal first
        for piece in pieces_of(file, PIECE):
            yield piece
            first += PIECE

    try:
        yield from rows_of_pieces(pieces())
    except ValueError as error:
        if first == 1 or f"{file.path}, sample " not in str(error):
            raise
        raise ValueError(f"{error} (sample 1 of these is sample {first} of the file)") from error


def cached_rows(
    cache: Path,
    decides: Mapping[str, object],
    parts: Callable[[], Iterator[Rows]],
    contents: Callable[[], Mapping[str, str | None]],
) -> StoredRows:
    """The rows of a cache, made by the first process of a host that asks, while the others wait.

    Args:
        cache: the folder of all caches, which may not be there yet.
        decides: everything that decides the rows.
        parts: makes the rows.
        contents: returns the `contents` of `StoredRows`.

    Raises ValueError if the folder cannot be written, and what `parts` raises.
    """
    from filelock import FileLock

    folder = cache / hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                unfinished = folder.with_name(f"{folder.name}.unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                write_rows(parts(), unfinished, contents())
                unfinished.rename(folder)
    except OSError as error:
        raise ValueError(f"--data_cache {cache} cannot be written ({error}); give another folder") from error
    return StoredRows(folder)


def states(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Path, bytes and time of the last change of each file; a folder stands for all files in it."""
    files = [
        each for path in paths for each in (sorted(path.rglob("*")) if path.is_dir() else [path]) if each.is_file()
    ]
    return [(str(each.resolve()), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
