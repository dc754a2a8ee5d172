"""The reading and writing of users' files: text of any size, JSON and YAML.

An error is one sentence with the file and the line. Text is UTF-8, with or without a byte order mark, plain or
compressed. JSON is tried before YAML, since YAML 1.1 is not a superset of JSON: tabs and numbers such as 1e2 are valid
in JSON only. A key that is given twice is an error in both formats; the parsers alone would silently take the last
value. A file is written as a whole or not at all.
"""

import bz2
import errno
import gzip
import json
import lzma
import os
import secrets
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import yaml

# --- text -------------------------------------------------------------------------------------------------------------

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def is_compressed(path: str | Path) -> bool:
    """Whether the file's suffix says that it is compressed."""
    return Path(path).suffix.lower() in _OPENERS


def ending(path: str | Path) -> str:
    """The suffix of the uncompressed file, in lower case: `.jsonl` for `a.jsonl` and for `a.JSONL.gz`."""
    return Path(Path(path).stem if is_compressed(path) else path).suffix.lower()


@contextmanager
def open_text(path: str | Path, *, newline: str | None = None) -> Iterator[TextIO]:
    """Open the file's text, decompressed. `newline`: as in `open`.

    Raises ValueError, also while the block reads, if the file does not exist or cannot be read, is not UTF-8, or its
    compressed data are damaged or truncated. What the block raises about another file by its name is raised as it is.
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
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if getattr(error, "filename", None) not in (None, os.fspath(path)):
            raise
        if isinstance(error, FileNotFoundError):
            raise ValueError(f"file {path} does not exist") from error
        if isinstance(error, IsADirectoryError | PermissionError):
            reason = f"{path} cannot be read ({error.strerror}); give a file that this user may read"
            raise ValueError(reason) from error
        raise ValueError(f"{path} cannot be read ({error}); write it anew") from error


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


# --- JSON and YAML ----------------------------------------------------------------------------------------------------


def read_document(path: str | Path) -> object:
    """The content of a YAML or JSON file. Raises ValueError, which names the file, if the file cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a YAML or JSON file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text ({error.reason}); give a YAML or JSON file") from error
    try:
        return _parsed(text)
    except _RepeatedKey as error:
        raise ValueError(f"{path}{error}; give it once") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "unreadable characters"
        raise ValueError(f"{path}{where}: {reason}; write YAML or JSON") from error
    except RecursionError as error:
        raise ValueError(f"{path}: brackets are nested too deeply; write YAML or JSON") from error
    except ValueError as error:  # an invalid date, or a number with too many digits
        raise ValueError(f"{path}: {error}; write YAML or JSON") from error


def read_json(text: str) -> object:
    """The content of a JSON text. Raises ValueError with the reason, also for a text that is nested too deeply."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except _RepeatedKey as error:
        raise ValueError(str(error).removeprefix(": ")) from error
    except RecursionError as error:
        raise ValueError("brackets are nested too deeply") from error


def require_characters(text: str, where: str) -> str:
    """Return `text`, or raise ValueError if it has a lone surrogate, as JSON can write it (``"\\ud800"``).

    No tokenizer accepts such half a character, and each tokenizer reports another error.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(
            f"{where} has the lone surrogate {half} at character {error.start + 1}, which is half a character; mend "
            "it, or leave the text out"
        ) from error
    return text


class _RepeatedKey(ValueError):
    """An error for a key that is given twice. Its message is appended to the file's name."""


def _parsed(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except _RepeatedKey:
        raise
    except (ValueError, RecursionError):  # not JSON: the error message is that of YAML
        return yaml.load(text, Loader=_StrictLoader)


def _without_repeats(pairs: list[tuple[str, object]]) -> dict:
    result = {}
    for key, value in pairs:
        if key in result:
            raise _RepeatedKey(f": {key} is given twice in one place")
        result[key] = value
    return result


class _StrictLoader(yaml.SafeLoader):
    """A yaml.SafeLoader that raises an error for a key that is given twice in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    mark = key.start_mark
                    raise _RepeatedKey(
                        f", line {mark.line + 1}, column {mark.column + 1}: {key.value} is given twice in one place"
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def problem_with_directory(flag: str, path: str) -> str | None:
    """Make the directory `path` of `flag`, and test that a file can be created there.

    Returns None, or one sentence on the failure.
    """
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".writable_"):
            pass
    except OSError as error:
        return f"{flag} {path} cannot be written: {error.strerror}; name a directory where files can be created"
    return None


@contextmanager
def with_room(place: str | Path) -> Iterator[None]:
    """Raise ValueError, which names `place`, if the disk is full in the block: the system's error names another file or
    none."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ValueError(f"{place} cannot be written ({error.strerror}); make room, or name another place") from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: write a temporary file in the same folder, then rename it.

    Its permissions are those of any new file of this process. A link stays, and the file that it names is written. What
    is no regular file, such as a pipe or /dev/null, is written as it is: a rename would put a file in its place. In an
    open file, such as /dev/stdout, the content follows what was written there before.

    Raises OSError, which names the file.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        links = _links(path)
        if _is_written_in_place(path, links):
            with _opened(path, links) as stream:
                stream.write(data)
        else:
            _replace(Path(os.path.realpath(path)), data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _links(path: Path) -> list[Path]:
    """The absolute path, and those to which links lead from there."""
    links = [Path(os.path.abspath(path))]
    while links[-1].is_symlink() and len(links) < 40:
        links.append(Path(os.path.normpath(links[-1].parent / links[-1].readlink())))
    return links


def _is_written_in_place(path: Path, links: Sequence[Path]) -> bool:
    """Whether the file is none that a rename may replace: a device, a pipe, or an open file by its name in /dev."""
    is_open = any(link.parts[1] in ("dev", "proc") and link.parts[2] != "shm" for link in links if len(link.parts) > 2)
    return path.exists() and (is_open or not path.is_file())


def _opened(path: Path, links: Sequence[Path]) -> BinaryIO:
    """A stream that truncates nothing. A file that this process has open is written at its place, which moves on."""
    for link in links:
        if link.parent in (Path("/dev/fd"), Path("/proc/self/fd"), Path(f"/proc/{os.getpid()}/fd")):
            return os.fdopen(os.dup(int(link.name)), "wb")
    return open(path, "ab")


def _replace(path: Path, data: bytes) -> None:
    name = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask, which mkstemp ignores
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
