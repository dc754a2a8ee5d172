"""Which line of a model's source an operator or an error comes from."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path

import torch
from torch import fx

_OURS = (Path(torch.__file__).parent, Path(__file__).parent)
_FRAME = re.compile(r'File "([^"]+)", line ([0-9]+)')


def line_of_node(node: fx.Node) -> str:
    """``file.py:12: code`` of the innermost call outside of torch; empty where torch.export has kept none."""
    frames = [(file, int(number)) for file, number in _FRAME.findall(node.meta.get("stack_trace") or "")]
    return _innermost(frames)


def line_of_error(error: BaseException) -> str:
    """The same of what was running when an error was raised; empty where that was torch alone."""
    return _innermost([(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)])


def _innermost(frames: list[tuple[str, int]]) -> str:
    for file, number in reversed(frames):
        path = Path(file)
        if not file.startswith("<") and not any(path.is_relative_to(folder) for folder in _OURS):
            code = linecache.getline(file, number).strip()
            return f"{path.name}:{number}: {code}" if code else f"{path.name}:{number}"
    return ""
