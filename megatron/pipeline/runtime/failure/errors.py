"""Errors that end a process with one sentence: on the screen, for the launcher, and instead of a bus error. No torch.

Problem: the last lines on the screen are a launcher's traceback and summary, which do not name the cause. Every rank
prints the same mistake of the user. If a file is mapped into memory and then truncated, a process that reads beyond its
new end dies by SIGBUS without a message.

Solution: only rank 0 prints an error that all ranks know. torchrun names a file for each rank in
TORCHELASTIC_ERROR_FILE and shows its content in the summary. So a rank that ends with a sentence also writes the
sentence there. A signal handler installed through the C library names the truncated file.
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

import psutil

from megatron.pipeline.program.instruction import Instruction

USER_ERROR = 2
"""The exit status for an error that the user can fix."""
KEEPS_SURVIVORS = "MEGATRON_KEEPS_SURVIVORS"
"""The environment variable by which tools/launch.py says that it ends no process when another process is lost."""
_RUN_ID = "TORCHELASTIC_RUN_ID"
ERROR_PATIENCE = 3.0
"""Seconds that a rank waits for the others to report the same error, and that the others wait for rank 0 to print."""


class SameEverywhere(Exception):
    """An error that every rank knows. Its text is for the user."""


class OnThisRank(Exception):
    """An error of a rank that cannot tell the others. Its text is for the user."""


class JobHasEnded(OnThisRank):
    """The job has ended before it could take in a new process."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read. The text names the file or setting, the reason and the remedy."""


class AgreedError(CheckpointError):
    """The error that every rank raises when at least one rank has failed."""


def annotate(error: BaseException, instruction: Instruction, where: str) -> None:
    """Mark `error` with the instruction that raised it, unless it is marked already.

    Sets `error.pipeline_instruction` and `error.pipeline_where`, and adds a note.
    """
    if getattr(error, "pipeline_instruction", None) is None:
        error.pipeline_instruction = instruction
        error.pipeline_where = where
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"raised in instruction {instruction} on {where}")


# --- which rank this process is ---------------------------------------------------------------------------------------


def number_of(name: str, default: int) -> int:
    """Return the whole number in an environment variable, or `default` if it holds none."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


def environment_ranks() -> tuple[int, int, int]:
    """Return (rank, world size, local rank) from the environment; (0, 1, 0) without a launcher.

    Raises ValueError if a value is not a whole number, or the rank is not below the world size.
    """
    values = []
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        text = os.environ.get(name, default)
        if not text.isdecimal():
            raise ValueError(f"the environment variable {name} is '{text}', not a whole number; start through torchrun")
        values.append(int(text))
    rank, world_size, local_rank = values
    if rank >= world_size:
        raise ValueError(f"RANK {rank} is not below WORLD_SIZE {world_size}; start through torchrun")
    return rank, world_size, local_rank


def is_ended_with_node() -> bool:
    """Return whether torchrun is about to end this process.

    When a process of a torchrun agent is lost, the agent ends all of its other processes.
    """
    if _RUN_ID not in os.environ or os.environ.get(KEEPS_SURVIVORS):
        return False
    agent, num_alive = psutil.Process(os.getppid()), 0
    while _has_run_id(agent) and (above := agent.parent()) is not None:  # a script that wraps the program
        agent = above
    for child in agent.children():
        with suppress(psutil.Error):
            num_alive += child.status() != psutil.STATUS_ZOMBIE and "RANK" in child.environ()
    return num_alive < number_of("LOCAL_WORLD_SIZE", 1)


def _has_run_id(process: psutil.Process) -> bool:
    """Return whether `process` was started by the agent of this process, or by one of that agent's ranks."""
    try:
        return process.environ().get(_RUN_ID) == os.environ[_RUN_ID]
    except psutil.Error:  # of another user
        return False


# --- the last sentence ------------------------------------------------------------------------------------------------


def write_error_file(sentence: str) -> None:
    """Write the sentence to the launcher's error file. Do nothing without a launcher or if the write fails."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    stamp = {"py_callstack": sentence, "timestamp": str(int(time.time()))}  # torchrun shows `py_callstack`
    temporary = f"{path}.{os.getpid()}"
    with suppress(OSError):
        with open(temporary, "w", encoding="utf-8") as stream:
            json.dump({"message": {"message": sentence, "extraInfo": stamp}}, stream)
        os.replace(temporary, path)  # an incomplete file would make torchrun fail


def read_error_file(path: str | os.PathLike[str]) -> str | None:
    """Return the sentence in a launcher's error file; None if there is no such file or sentence."""
    try:
        with open(path, encoding="utf-8") as stream:
            return str(json.load(stream)["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def end(prog: str, error: Exception) -> int:
    """Print the error once in the job and return the exit status.

    Rank 0 prints and ends first; the launcher then ends the others. One rank per host writes the launcher's error file.
    """
    if number_of("LOCAL_RANK", 0) == 0:
        write_error_file(f"{prog}: error: {error}")
    if number_of("RANK", 0) == 0:
        sys.stderr.write(f"{prog}: error: {error}\n")
        sys.stderr.flush()
    else:
        time.sleep(ERROR_PATIENCE)
    return USER_ERROR


# --- a file that is truncated while it is read ------------------------------------------------------------------------

_WITH_ADDRESS = 4  # SA_SIGINFO
_ADDRESS_OFFSET = 16  # offset of si_addr in siginfo_t, where pointers have 8 bytes
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """`struct sigaction` of glibc and musl on 64 bits."""

    _fields_ = (
        ("handler", _Handler),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_installed: dict[int, _Action] = {}  # process id -> its handler, kept alive because the C library calls it


def end_at_once(sentence: str) -> None:
    """End this process with a sentence, whatever its threads are doing."""
    write_error_file(sentence)
    sys.stderr.write(f"process {os.getpid()} stops: {sentence}\n")
    sys.stderr.flush()
    os._exit(1)


def name_cut_files(tell: Callable[[str], None] = end_at_once) -> None:
    """Install a handler that calls `tell` with a sentence when a bus error comes from a truncated file.

    `tell` has to end the process. Only the first call in a process has an effect. Does nothing except on 64-bit Linux.

    Python runs its own signal handlers between two interpreter instructions, and here the reading instruction never
    completes. So this handler is installed with the C library's sigaction. Any other bus error goes to the previous
    handler.
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
        sigaction(number, ctypes.byref(before), None)  # the read is then repeated, and the previous handler runs

    action = _installed[os.getpid()] = _Action(handler=_Handler(handle), flags=_WITH_ADDRESS)
    sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(before))


def _cut_file_at(address: int) -> str | None:
    """Return a sentence about the file that is mapped at `address` but ends before it; None if there is none."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as mappings:
        for line in mappings:
            span, _, offset, _, _, *path = line.rstrip("\n").split(maxsplit=5)
            first, last = (int(bound, 16) for bound in span.split("-"))
            if first <= address < last and path and os.path.isfile(path[0]):
                size, read = os.path.getsize(path[0]), address - first + int(offset, 16)
                if size <= read:
                    return (
                        f"file {path[0]} was cut short while the run read it: it has {size} bytes, and byte "
                        f"{read} is needed; write the file again, and continue from the last checkpoint"
                    )
    return None
