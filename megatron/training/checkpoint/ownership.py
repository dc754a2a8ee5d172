"""Which job may write into a `--save` directory: the mark of its owner.

Problem: a requeued job may start while the one before it is not quite dead. Two jobs that write into one directory
remove and mix each other's files.

Solution: rank 0 of a job leaves a mark there, the file `.owner_N`, which says who it is. The highest N counts. A job
that finds the mark of a live owner is refused. One that finds the mark of a dead owner makes the mark N + 1, which the
file system lets only one do, and then removes the older. Every save asks first whether its mark still counts.

Who is alive: a process of this machine (the same boot, the same namespace of process ids) is looked up by its id and
the time of its start. Of any other process only the file tells: its owner touches it every `PERIOD` seconds, and one
that stays as it is for `PATIENCE` seconds on the watcher's own clock belongs to a dead one. Clocks of different hosts
are never compared.
"""

import atexit
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.training.checkpoint.errors import CheckpointError

PERIOD = 10.0
"""Seconds between two touches of a mark."""
PATIENCE = 45.0
"""Seconds after which an untouched mark belongs to a dead owner."""
_NAME = re.compile(r"\.owner_(\d+)")
logger = logging.getLogger(__name__)
_held: list["OwnerMark"] = []


@dataclass(frozen=True)
class Owner:
    """What a mark says. `machine` tells where `process` and `started` mean something; None where no system says it."""

    host: str
    process: int
    machine: str | None
    started: int | None
    since: str
    token: str

    @classmethod
    def this_process(cls) -> "Owner":
        return cls(
            host=socket.gethostname(),
            process=os.getpid(),
            machine=_machine(),
            started=_start_of(os.getpid()),
            since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            token=uuid.uuid4().hex,
        )

    @property
    def is_here(self) -> bool:
        """Whether this machine can look the process up."""
        return self.machine is not None and self.machine == _machine()

    @property
    def is_running(self) -> bool:
        """Of an owner that `is_here`. What this very process left there is not in its way."""
        return self.process != os.getpid() and self.started is not None and _start_of(self.process) == self.started

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


@dataclass(frozen=True)
class _Sight:
    """A mark as it was seen; `owner` is None where it says nothing yet, or nothing that can be read."""

    number: int
    owner: Owner | None
    touched: int


class OwnerMark:
    """This process's mark on a directory."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._number: int | None = None
        self._owner = Owner.this_process()
        self._watched: tuple[_Sight, float] | None = None  # an owner elsewhere, and when it was first seen so
        self._leaving = threading.Event()

    def try_to_take(self) -> bool:
        """Take the directory. False: it is not known yet whether the owner before is alive; ask again in a second.

        Raises:
            CheckpointError: it belongs to a live job, or no mark can be made; the text says to which, or why, and what
                to do.
        """
        try:
            return self._try_to_take()
        except OSError as error:
            raise CheckpointError(
                f"--save {self.root} takes no mark of its owner: {error.strerror}; free some space there, or name a "
                "directory where files can be written"
            ) from error

    def _try_to_take(self) -> bool:
        before = self._marks()
        if before and not self._is_dead(before[-1]):
            return False
        number = before[-1].number + 1 if before else 1
        if not self._make(number):
            return False
        judged = {(mark.number, mark.owner) for mark in before}
        others = [mark for mark in self._marks() if mark.number != number]
        if any(mark.number > number or (mark.number, mark.owner) not in judged for mark in others):
            self._path(number).unlink(missing_ok=True)  # one has come meanwhile that is to be judged, too
            return False
        for mark in others:
            self._path(mark.number).unlink(missing_ok=True)
        self._number, self._watched = number, None
        threading.Thread(target=self._touch, args=(number,), name="owner's mark", daemon=True).start()
        _held.append(self)
        return True

    def require(self) -> None:
        """Raise CheckpointError where the mark does not count any more: another job took this one for dead."""
        marks = self._marks()
        if not marks:
            raise CheckpointError("the mark that this job left there is gone, so another job may write there, too")
        if marks[-1].owner != self._owner:
            raise CheckpointError(
                f"another job ({marks[-1].owner or 'which does not say its name'}) has taken the directory over, as "
                f"this one gave no sign of life for {PATIENCE:.0f} s; only that one goes on"
            )

    def release(self) -> None:
        """Let the next job have the directory."""
        if self._number is None or self._owner.process != os.getpid():  # a fork has it only by inheritance
            return
        number, self._number = self._number, None
        self._leaving.set()
        _held.remove(self)
        with suppress(OSError):
            mark = self._see(number)
            if mark is not None and mark.owner == self._owner:
                self._path(number).unlink(missing_ok=True)

    # -- judging ------------------------------------------------------------------------------------------------------

    def _is_dead(self, mark: _Sight) -> bool:
        """Raises CheckpointError where its owner is known to be alive; False where that is not known yet."""
        owner = mark.owner
        if owner is not None and owner.is_here:
            if owner.is_running:
                raise self._refusal(owner)
            return True
        now = time.monotonic()
        if self._watched is None or (self._watched[0].number, self._watched[0].owner) != (mark.number, mark.owner):
            self._watched = mark, now
            logger.warning(
                "--save %s is marked by another job (%s); watching for %.0f s whether that is alive",
                self.root, owner or "which does not say its name", PATIENCE,
            )  # fmt: skip
        elif mark.touched != self._watched[0].touched:
            raise self._refusal(owner)
        return now - self._watched[1] >= PATIENCE

    def _refusal(self, owner: Owner | None) -> CheckpointError:
        return CheckpointError(
            f"--save {self.root} is in use by another job ({owner or 'which does not say its name'}); wait for that to "
            "end, or end it, or name another directory"
        )

    # -- files --------------------------------------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self.root / f".owner_{number}"

    def _marks(self) -> list[_Sight]:
        """All marks in the directory; the last one counts."""
        matches = map(_NAME.fullmatch, os.listdir(self.root))
        numbers = sorted(int(match[1]) for match in matches if match)
        return [mark for mark in map(self._see, numbers) if mark is not None]

    def _see(self, number: int) -> _Sight | None:
        """Opened anew each time: a network file system asks its server then."""
        try:
            with open(self._path(number), encoding="utf-8") as stream:
                touched = os.fstat(stream.fileno()).st_mtime_ns
                try:
                    owner = Owner(**json.load(stream))
                except (ValueError, TypeError):
                    owner = None
        except FileNotFoundError:
            return None
        return _Sight(number, owner, touched)

    def _make(self, number: int) -> bool:
        """Make this process's mark; False where one of that number is there."""
        try:
            with open(self._path(number), "x", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(self._owner)))
                stream.flush()
                os.fsync(stream.fileno())
        except FileExistsError:
            return False
        except OSError:
            self._path(number).unlink(missing_ok=True)  # such as on a full disk
            raise
        return True

    def _touch(self, number: int) -> None:
        path = self._path(number)
        while not self._leaving.wait(PERIOD):
            with suppress(OSError):  # the next save says what is wrong
                os.utime(path)


@atexit.register
def release_all() -> None:
    """Release what this process holds; for an end that unwinds nothing."""
    for mark in list(_held):
        mark.release()


# --- processes


def _machine() -> str | None:
    """What processes that can look each other up by their ids have in common."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _start_of(process: int) -> int | None:
    """When a running process was started, in the machine's ticks; None where there is none, or only its remains."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])
