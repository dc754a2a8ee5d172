"""Directories that users name: can files be created there?"""

import os
import tempfile


def problem_with_directory(flag: str, path: str) -> str | None:
    """Make the directory that `flag` names and create a file there; returns why that fails, in one sentence."""
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".writable_"):
            pass
    except OSError as error:
        return f"{flag} {path} cannot be written: {error.strerror}; name a directory where files can be created"
    return None
