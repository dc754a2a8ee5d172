"""Errors that end a process with one sentence: for the screen, for the launcher, and in a bus error's place. No torch.

Problem: the last lines on the screen are a launcher's traceback and summary, which say nothing, and every rank prints
the user's mistake again. A file that is mapped into memory and then cut short ends whoever reads behind its new end by
SIGBUS, without a word.

Solution: rank 0 alone prints an error that all ranks know. torchrun names a file for each rank in
TORCHELASTIC_ERROR_FILE and shows in its summary what stands there, so a rank that ends with a sentence writes the
sentence there, too. A handler of the C library names the file that was cut short.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from megatron.pipeline.program.instruction import Instruction

USER_ERROR = 2
"""The exit status for an error that is the user's to mend."""
PATIENCE = 3.0
"""Seconds that ranks wait for each other's same error, and others for rank 0 to print."""


class SameEverywhere(Exception):
    """An error that every rank knows; its text is for the user."""


class OnThisRank(Exception):
    """An error of a rank that cannot reach the others to tell them; its text is for the user."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read: which file or setting, why, and what to do, in one or two sentences."""


class AgreedError(CheckpointError):
    """The error that every rank raises where at least one has failed."""


def annotate(error: BaseException, instruction: Instruction, where: str) -> None:
    """Leave on `error` which instruction raised it, once: `error.pipeline_instruction`, `error.pipeline_where`, a
    note.
    """
    if getattr(error, "pipeline_instruction", None) is None:
        error.pipeline_instruction = instruction
        error.pipeline_where = where
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"raised in instruction {instruction} on {where}")


# --- which rank this process is ---------------------------------------------------------------------------------------


def number_of(name: str, default: int) -> int:
    """The whole number that a variable of the environment holds; `default` where it holds none."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


def environment_ranks() -> tuple[int, int, int]:
    """(rank, world size, local rank) from the environment; (0, 1, 0) without a launcher. Raises ValueError."""
    values = []
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        text = os.environ.get(name, default)
        if not text.isdigit():
            raise ValueError(f"the environment variable {name} is '{text}', not a whole number; start through torchrun")
        values.append(int(text))
    rank, world_size, local_rank = values
    if rank >= world_size:
        raise ValueError(f"RANK {rank} is not below WORLD_SIZE {world_size}; start through torchrun")
    return rank, world_size, local_rank


# --- the last sentence ------------------------------------------------------------------------------------------------


def write_error_file(sentence: str) -> None:
    """Tell the launcher; without one, or where the file cannot be written, the sentence on the screen has to do."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    stamp = {"py_callstack": sentence, "timestamp": str(int(time.time()))}  # torchrun shows the first of the two
    temporary = f"{path}.{os.getpid()}"
    with suppress(OSError):
        with open(temporary, "w", encoding="utf-8") as stream:
            json.dump({"message": {"message": sentence, "extraInfo": stamp}}, stream)
        os.replace(temporary, path)  # half a file would end torchrun with an error of its own


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


# --- a file that is cut short while it is read ------------------------------------------------------------------------

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


def end_by_bus_error(sentence: str) -> None:
    """End this process with a sentence, from where a read stands that never ends."""
    write_error_file(sentence)
    sys.stderr.write(f"process {os.getpid()} stops: {sentence}\n")
    sys.stderr.flush()
    os._exit(1)


def name_cut_files(tell: Callable[[str], None] = end_by_bus_error) -> None:
    """From now on a bus error for the sake of a file that was cut short calls `tell` with a sentence, which has to end
    the process. Once a process; nothing where there is no Linux of 64 bits.

    Python's own handlers run between two instructions of the interpreter, and the one that reads never ends. So this
    one is the C library's. Any other bus error is left to the handler before.
    """
    if os.getpid() in _installed or not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return
    sigaction = ctypes.CDLL(None).sigaction
    before = _Action()

    def handle(number: int, info: int, context: int) -> None:
        address = ctypes.c_void_p.from_address(info + _ADDRESS_OFFSET).value
        sentence = None if address is None else _cut_file_at(address)
        if sentence is not None:
            tell(sentence)
        sigaction(number, ctypes.byref(before), None)  # and the read, done again, ends the process

    action = _installed[os.getpid()] = _Action(handler=_Handler(handle), flags=_WITH_ADDRESS)
    sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(before))


def _cut_file_at(address: int) -> str | None:
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
