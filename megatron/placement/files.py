"""Reads the files that users write for this room: YAML, of which JSON is a part. Errors are one sentence."""

from pathlib import Path

import yaml


def read_document(path: str | Path) -> object:
    """What a YAML or JSON file holds. Raises ValueError, naming the file, where it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a YAML or JSON file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text ({error.reason}); give a YAML or JSON file") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "unreadable characters"
        raise ValueError(f"{path}{where}: {reason}; write YAML or JSON") from error
