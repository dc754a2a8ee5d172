"""Text files of any size that users write: UTF-8, with or without the mark that Windows programs put first, plain or
compressed. What cannot be read is told with the file and, where there is one, the line.
"""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def is_compressed(path: str | Path) -> bool:
    """By its ending."""
    return Path(path).suffix.lower() in _OPENERS


def ending(path: str | Path) -> str:
    """`.jsonl` of `a.jsonl` and of `a.JSONL.gz`: what the text is, in lower case."""
    return Path(Path(path).stem if is_compressed(path) else path).suffix.lower()


@contextmanager
def open_text(path: str | Path, *, newline: str | None = None) -> Iterator[TextIO]:
    """The file's text. `newline`: as of `open`.

    Raises ValueError, also out of the block that reads: no such file, one that cannot be read, bytes that are no UTF-8,
    compressed data that are damaged or cut short.
    """
    opener = _OPENERS.get(Path(path).suffix.lower(), open)
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline=newline) as stream:
            yield stream
    except UnicodeDecodeError as error:
        with opener(path, "rb") as lines:
            number = next((number for number, line in enumerate(lines, start=1) if not _is_utf8(line)), None)
        where = "" if number is None else f", line {number}"
        raise ValueError(f"{path}{where} is no UTF-8 text ({error.reason}); convert the file") from error
    except FileNotFoundError as error:
        raise ValueError(f"file {path} does not exist") from error
    except (IsADirectoryError, PermissionError) as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a file that this user may read") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{path} cannot be read ({error}); write it anew") from error


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
