"""What a process does when the one that started it is killed."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def end_with_parent() -> None:
    """Runs in the new process: if the one that started it ends, it is asked to end. On Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
