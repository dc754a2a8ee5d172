"""What torch's C++ code says of a broken connection: nothing, where the job's sentence says it.

Problem: when the host of the store is gone, c10d prints 20 lines of C++ frames on each rank that asks it, on any thread
and so perhaps as the last lines of all, and its errors carry as many.

Solution: torch has one threshold for such messages, which TORCH_CPP_LOG_LEVEL sets before it is loaded. It is raised
while the failure board asks, and for good where a failure ends this process. Who sets the variable has it as it is.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

_ERRORS_ALONE = 2  # of 0 information, 1 warnings, 2 errors, 3 fatal ones
_FRAMES = re.compile(r"\s*Exception raised from [^\n]*\(most recent call first\):(\n(frame #|<omitting )[^\n]*)*")


_for_good = False


@cache
def _threshold() -> ctypes.c_int | None:
    """torch's own; None where this build keeps it elsewhere, so that its messages are what they are."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


@contextmanager
def silenced() -> Iterator[None]:
    """A block without warnings of C++ code, on any thread; one thread at a time has such a block."""
    threshold = None if "TORCH_CPP_LOG_LEVEL" in os.environ else _threshold()
    if threshold is None:
        yield
        return
    before = threshold.value
    threshold.value = max(before, _ERRORS_ALONE)
    try:
        yield
    finally:
        if not _for_good:
            threshold.value = before


def silence() -> None:
    """No such warnings any more, since this process ends."""
    global _for_good
    _for_good = True
    with silenced():
        pass


def without_frames(text: str) -> str:
    """The text of an error without the C++ frames that torch adds."""
    return _FRAMES.sub("", text)
