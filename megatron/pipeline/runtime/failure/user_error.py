"""An error that is the user's to mend, and that every rank finds alike: one sentence for the job, and status 2."""

import os
import sys
import time

from megatron.pipeline.runtime.failure.error_file import write_error_file

USER_ERROR = 2
"""The exit status."""

PATIENCE = 3.0
"""Seconds that ranks wait for each other's same error, and others for rank 0 to print."""


def number_of(name: str, default: int) -> int:
    """The whole number that a variable of the environment holds; `default` where it holds none."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


def end(prog: str, error: Exception) -> int:
    """Print the error once in the job: rank 0 prints and ends first, and the launcher then ends the others. Each host's
    launcher is told by one rank. Returns the exit status."""
    if number_of("LOCAL_RANK", 0) == 0:
        write_error_file(f"{prog}: error: {error}")
    if number_of("RANK", 0) == 0:
        sys.stderr.write(f"{prog}: error: {error}\n")
        sys.stderr.flush()
    else:
        time.sleep(PATIENCE)
    return USER_ERROR
