"""The closing of pipelines when a script ends.

A pipeline's thread that wakes up while the interpreter shuts down would abort the process.
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
    """A running pipeline. `has_failed`: whether the state of its work is unknown, so that it cannot be closed."""

    has_failed: bool

    def close(self) -> None: ...


_running: dict[Running, bool] = {}  # pipeline -> whether closing it needs the process group


def watch(pipeline: Running, *, needs_group: bool) -> None:
    """Close `pipeline` when the script ends. `needs_group`: whether closing it needs the process group."""
    _running[pipeline] = needs_group


def forget(pipeline: Running) -> None:
    """Do not close `pipeline` when the script ends: it is closed already, or its failure ends the process."""
    _running.pop(pipeline, None)


@atexit.register
def _close_all() -> None:
    """Close all pipelines, unless the script ends by an uncaught exception, after which other ranks may not close.

    After an exception the threads of a failed pipeline would abort the process, so the process ends at once.
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
