"""Ctrl-C ends a program at once, with one line and status 130, even while the program imports torch.

Problem: Python raises KeyboardInterrupt at whatever line the program has reached. During an import the result is a
traceback of many screens, an error of the interrupted library, or nothing at all. Importing torch takes seconds.

Solution: a program imports this file first, and this file imports only the standard library. A program that has changes
to undo replaces the handler for that time (`unwinding` in documents/command_line.py). A launcher such as torchrun
gets the signal, too, and prints its own message.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

STATUS = 128 + signal.SIGINT
before_exit: list[Callable[[], None]] = []
"""Functions that are called when Ctrl-C ends the process; they must not block."""


def end_at_interrupt(*, says: str = "ended by SIGINT") -> None:
    """Make SIGINT end this process and the processes that it forks from now on.

    A handler that is already installed stays, and an ignored SIGINT stays ignored. Forked processes end silently.

    Args:
        says: the line for stderr; only rank 0 of a job prints it.
    """
    process = os.getpid()

    def end(number: int, frame: object) -> None:
        if os.getpid() == process:
            for act in [*before_exit, sys.stdout.flush]:
                with suppress(Exception):
                    act()
            if os.environ.get("RANK", "0") == "0":
                os.write(2, f"{says}\n".encode())
        os._exit(STATUS)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # background jobs of a shell ignore SIGINT
        signal.signal(signal.SIGINT, end)
