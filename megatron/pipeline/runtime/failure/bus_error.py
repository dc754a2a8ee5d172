"""Which file a bus error is about.

Problem: a file that is mapped into memory and then cut short ends whoever reads behind its new end by SIGBUS, without a
word. Python's own handlers run between two instructions of the interpreter, and the one that reads never ends.

Solution: a handler of the C library, which runs where the read stands. It looks the address up in the process's
mappings. Where these name a file that ends before that address, it tells so and ends the process; any other bus error
is left to the handler before.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

from megatron.pipeline.runtime.failure.error_file import write_error_file

_WITH_ADDRESS = 4  # SA_SIGINFO
_ADDRESS_OFFSET = 16  # of si_addr in siginfo_t, where pointers have 8 bytes
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """`struct sigaction` of glibc and musl on 64 bits."""

    _fields_ = (
        ("handler", _Handler),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_installed: dict[int, _Action] = {}  # by process; kept, since the C library calls into it


def end(sentence: str) -> None:
    """End this process with a sentence."""
    write_error_file(sentence)
    sys.stderr.write(f"process {os.getpid()} stops: {sentence}\n")
    sys.stderr.flush()
    os._exit(1)


def name_files(tell: Callable[[str], None] = end) -> None:
    """From now on a bus error for the sake of a file that was cut short calls `tell` with a sentence, which has to end
    the process. Once a process; nothing where there is no Linux of 64 bits."""
    if os.getpid() in _installed or not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return
    sigaction = ctypes.CDLL(None).sigaction
    before = _Action()

    def handle(number: int, info: int, context: int) -> None:
        address = ctypes.c_void_p.from_address(info + _ADDRESS_OFFSET).value
        sentence = None if address is None else cut_file_at(address)
        if sentence is not None:
            tell(sentence)
        sigaction(number, ctypes.byref(before), None)  # and the read, done again, ends the process

    action = _installed[os.getpid()] = _Action(handler=_Handler(handle), flags=_WITH_ADDRESS)
    sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(before))


def cut_file_at(address: int) -> str | None:
    """A sentence about the file that is mapped at this address and ends before it; None where there is none."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as mappings:
        for line in mappings:
            span, _, offset, _, _, *path = line.rstrip("\n").split(maxsplit=5)
            first, last = (int(bound, 16) for bound in span.split("-"))
            if first <= address < last and path and os.path.isfile(path[0]):
                size, read = os.path.getsize(path[0]), address - first + int(offset, 16)
                if size <= read:
                    return (
                        f"file {path[0]} was cut short while the run read it: it has {size} bytes, and the one at "
                        f"{read} is wanted; write it anew, and go on from the last checkpoint"
                    )
    return None
