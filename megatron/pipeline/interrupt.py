"""Ctrl-C ends a program at once, with one line and status 130; also while it imports, which takes torch seconds.

Problem: Python raises KeyboardInterrupt wherever the program is. In an import that becomes a traceback of many screens,
or an error of the library that was interrupted, or nothing at all.

Solution: the first that a program imports is this file, which needs nothing else. A program that has something to undo
handles the signal by itself meanwhile (`unwinding` in commands/common/command_line.py). A launcher, such as torchrun,
gets the signal too, and prints what it likes.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

STATUS = 128 + signal.SIGINT
before_exit: list[Callable[[], None]] = []
"""Called when Ctrl-C ends the process; they must not wait."""


def end_at_interrupt(*, says: str = "ended by SIGINT") -> None:
    """From now on SIGINT ends this process, and each that it forks. Only rank 0 of a job prints the line."""
    process = os.getpid()

    def end(number: int, frame: object) -> None:
        if os.getpid() == process:
            for act in [*before_exit, sys.stdout.flush]:
                with suppress(Exception):
                    act()
            if os.environ.get("RANK", "0") == "0":
                os.write(2, f"{says}\n".encode())
        os._exit(STATUS)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
        signal.signal(signal.SIGINT, end)
