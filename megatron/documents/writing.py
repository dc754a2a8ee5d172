"""Where files can be written, and how: in whole or not at all."""

import os
import tempfile
from pathlib import Path


def problem_with_directory(flag: str, path: str) -> str | None:
    """Make the directory that `flag` names and create a file there; returns why that fails, in one sentence."""
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".writable_"):
            pass
    except OSError as error:
        return f"{flag} {path} cannot be written: {error.strerror}; name a directory where files can be created"
    return None


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that nobody sees a part of it: beside its place, then renamed."""
    data = content.encode() if isinstance(content, str) else content
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
