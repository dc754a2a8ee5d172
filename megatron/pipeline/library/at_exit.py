"""Pipelines whose threads run when a script ends: a thread that wakes up while the interpreter shuts down would abort
the process.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import suppress
from typing import Protocol

import torch.distributed as dist


class Running(Protocol):
    """A running pipeline. `has_failed`: the state of its work is unknown, so it cannot be closed."""

    has_failed: bool

    def close(self) -> None: ...


_running: dict[Running, bool] = {}  # whether it needs the process group


def watch(pipeline: Running, *, needs_group: bool) -> None:
    """Close `pipeline`, whose threads run, when the script ends."""
    _running[pipeline] = needs_group


def forget(pipeline: Running) -> None:
    """Forget a pipeline that is closed, or whose failure ends the process."""
    _running.pop(pipeline, None)


@atexit.register
def _close_all() -> None:
    """Close all pipelines. After an uncaught exception other ranks may not come here, and the threads of a failed
    pipeline would abort the process after the exception's message; then the process ends without closing.
    """
    if getattr(sys, "last_value", None) is not None:
        if any(each.has_failed for each in _running):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
    else:
        for pipeline in [each for each, needs_group in _running.items() if dist.is_initialized() or not needs_group]:
            with suppress(Exception):
                pipeline.close()
