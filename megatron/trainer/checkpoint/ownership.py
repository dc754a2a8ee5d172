"""The ownership of a `--save` directory: the mark of the job that may write into it, and the job's heartbeat.

Problem: a requeued job may start while the previous job still runs. Two jobs that write into one directory delete and
mix up each other's files.

Solution: rank 0 of a job makes a mark in the directory, the file `.owner_N`, which names the job. The mark with the
highest N is valid. A job that finds the mark of a live owner is refused. A job that finds the mark of a dead owner
makes the mark N + 1, which the file system allows only one job, and then removes the older mark. Every save first
checks that the job's mark is valid.

An owner on this machine (same boot, same namespace of process ids) is alive if a process with its id and start time
exists. For an owner elsewhere only the file shows it: the owner changes the file every `PERIOD` seconds. If it stays
unchanged for `PATIENCE` seconds on the watcher's own clock, the owner is dead. Clocks of different hosts are never
compared.

A process beside the job (`Heartbeat`) changes the file. A thread of the job cannot: megatron.core's C++ holds Python's
global lock while it builds the index of samples, which takes most of a minute for a large data set, and no other thread
runs then. The process always ends with the job, since its input closes and its parent changes. It writes only into an
existing mark that begins with the job's own text.
"""

import atexit
import errno
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.pipeline.runtime.failure.errors import CheckpointError

DIGITS = 12
"""The width of the count in digits. The count is overwritten in place, so a reader always finds a complete mark."""
_CODE = """
import os, select, sys
path, begins, digits, period, parent = sys.argv[1:]
begins, count, failed = os.fsencode(begins), 0, False
while not select.select([0], [], [], float(period))[0] and os.getppid() == int(parent):
    count += 1
    try:
        mark = os.open(path, os.O_RDWR)
        try:
            if os.pread(mark, len(begins), 0) == begins:
                os.pwrite(mark, str(count).zfill(int(digits)).encode(), len(begins))
        finally:
            os.close(mark)
    except FileNotFoundError:
        pass
    except OSError as error:
        if not failed:
            print(error.strerror, flush=True)
            failed = True
"""
logger = logging.getLogger(__name__)


class Heartbeat:
    """A process that increments a count in the file `path` every `period` seconds, from `start` to `stop`.

    It writes only while the file starts with the text `begins`.
    """

    def __init__(self, path: Path, begins: str, period: float) -> None:
        self._path, self._begins, self._period = path, begins, period
        self._child: subprocess.Popen | None = None
        self._leaving = threading.Event()

    def start(self) -> None:
        """Start the process, and a thread that logs its messages and restarts it if it ends."""
        self._begin()
        threading.Thread(target=self._attend, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Ask the process to end, without waiting; the thread waits for it."""
        self._leaving.set()
        self._close()

    def _begin(self) -> None:
        argv = [str(self._path.absolute()), self._begins, str(DIGITS), str(self._period), str(os.getpid())]
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE, *argv], start_new_session=True, cwd="/",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            )  # fmt: skip
        except OSError as error:
            self._child = None
            logger.warning("no process can give the sign of life in %s: %s; another host may take this job for dead",
                           self._path, error.strerror)  # fmt: skip
        if self._leaving.is_set():
            self._close()

    def _close(self) -> None:
        if self._child is not None:
            with suppress(OSError):
                self._child.stdin.close()
                self._child.terminate()  # a fork of the job may keep the process's input open

    def _attend(self) -> None:
        while self._child is not None:
            with self._child.stdout as said:
                for line in said:
                    logger.warning("the sign of life cannot be written into %s: %s; another host may take this job for "
                                   "dead", self._path, line.decode().strip())  # fmt: skip
            status = self._child.wait()
            self._close()
            if self._leaving.wait(min(self._period, 1.0)):
                return
            logger.warning("the process that gives the sign of life in %s has ended (status %d); another takes "
                           "its place", self._path, status)  # fmt: skip
            self._begin()


PERIOD = 10.0
"""Seconds between two changes of a mark's count."""
PATIENCE = 45.0
"""Seconds without a change after which the owner of a mark counts as dead."""
OWNER_PATIENCE = PATIENCE + 15.0
"""Seconds that a lost process of a job, which owned the directory, may still live."""
BETWEEN_LOOKS = 1.0
"""Seconds before the mark of another job is read again; a job that loses the race soon removes its mark."""
_NAME = re.compile(r"\.owner_(\d+)")
_COUNT = "beat"
_held: list["OwnerMark"] = []


@dataclass(frozen=True)
class Owner:
    """The content of a mark.

    Attributes:
        process, started: process id, and start time in the machine's ticks.
        machine: the identity of the machine to which `process` and `started` refer; None if unknown.
    """

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
        """Whether this machine can look up the process."""
        return self.machine is not None and self.machine == _machine()

    @property
    def is_running(self) -> bool:
        """Whether an owner on this machine still runs; False for this process itself, which may have left a mark."""
        return self.process != os.getpid() and self.started is not None and _start_of(self.process) == self.started

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


@dataclass(frozen=True)
class _Sight:
    """A mark, as it was read.

    Attributes:
        owner: None if the mark is empty or unreadable.
        beat: a value that changes as long as the owner is alive.
    """

    number: int
    owner: Owner | None
    beat: tuple


class OwnerMark:
    """The mark of this process on a directory."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._number: int | None = None
        self._owner = Owner.this_process()
        self._watched: tuple[_Sight, float] | None = None  # the mark of an owner elsewhere, and when it was first read
        self._heartbeat: Heartbeat | None = None

    def try_to_take(self, until: float | None = None) -> bool:
        """Try to take the directory. Returns False if the owner may still be alive; call it again in a second.

        `until`: the time (`time.monotonic`) until which a live owner may be a lost process of this job, which its
        launcher ends.

        Raises:
            CheckpointError: the directory belongs to a live job, or no mark can be made; the text names the remedy.
        """
        try:
            try:
                return self._try_to_take()
            except OSError as error:
                full = "free some space there, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
                raise CheckpointError(
                    f"--save {self.root} takes no mark of its owner: {error.strerror}; {full}name a directory where "
                    "files can be made and removed"
                ) from error
        except CheckpointError:
            if until is None or time.monotonic() > until:
                raise
            return False

    def _try_to_take(self) -> bool:
        before = self._marks()
        if before and not self._is_dead(before[-1]):
            return False
        if not self._follow(before):
            return False
        _held.append(self)
        return True

    def _follow(self, before: list[_Sight]) -> bool:
        """Make the mark that follows the marks `before`, whose owners are all dead; False if another job was faster."""
        number = before[-1].number + 1 if before else 1
        if not self._make(number):
            return False
        judged = {(mark.number, mark.owner) for mark in before}
        try:
            others = [mark for mark in self._marks() if mark.number != number]
            if any((mark.number, mark.owner) not in judged for mark in others):
                self._path(number).unlink(missing_ok=True)  # a new mark whose owner may be alive
                return False
            for mark in others:
                self._path(mark.number).unlink(missing_ok=True)
        except OSError:
            self._path(number).unlink(missing_ok=True)  # for example, another user's files cannot be removed
            raise
        self._number, self._watched = number, None
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._heartbeat = Heartbeat(self._path(number), self._text(), PERIOD)
        self._heartbeat.start()
        return True

    def require(self) -> None:
        """Check that this process still owns the directory; if its mark was removed, make a new one.

        Raises:
            CheckpointError: another job has taken the directory, because it considered this job dead.
        """
        for pause in (BETWEEN_LOOKS, BETWEEN_LOOKS, 0.0):
            marks = self._marks()
            if marks and marks[-1].owner == self._owner:
                return
            if not marks and self._follow([]):
                logger.warning("--save %s: somebody removed the mark of this job, %s; it has made another and goes on",
                               self.root, ".owner_N")  # fmt: skip
                return
            time.sleep(pause)  # a job that loses the race soon removes its mark
        other = marks[-1].owner if marks else None
        raise CheckpointError(
            f"another job ({other or 'which does not say its name'}) has taken the directory over, as this one gave no "
            f"sign of life for {PATIENCE:.0f} s; only that one goes on: let it, or end it and start this one again, "
            "which goes on from the latest checkpoint there"
        )

    def release(self) -> None:
        """Release the directory for the next job."""
        if self._number is None or self._owner.process != os.getpid():  # a fork must not release its parent's mark
            return
        number, self._number = self._number, None
        self._heartbeat.stop()
        _held.remove(self)
        with suppress(OSError):
            mark = self._see(number)
            if mark is not None and mark.owner == self._owner:
                self._path(number).unlink(missing_ok=True)

    # -- judging ------------------------------------------------------------------------------------------------------

    def _is_dead(self, mark: _Sight) -> bool:
        """Whether a mark's owner is dead; False if that is not known yet. Raises CheckpointError if it is alive."""
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
        elif mark.beat != self._watched[0].beat:
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
        """All marks in the directory by number; the last one is valid."""
        matches = map(_NAME.fullmatch, os.listdir(self.root))
        numbers = sorted(int(match[1]) for match in matches if match)
        return [mark for mark in map(self._see, numbers) if mark is not None]

    def _see(self, number: int) -> _Sight | None:
        """Read a mark; None if it does not exist. A newly opened file makes a network file system ask its server."""
        path = self._path(number)
        try:
            try:
                with open(path, encoding="utf-8") as stream:
                    touched, text = os.fstat(stream.fileno()).st_mtime_ns, stream.read()
            except PermissionError:  # another user's mark
                touched, text = path.stat().st_mtime_ns, ""
        except FileNotFoundError:
            return None
        try:
            said = json.loads(text)
            count = said.pop(_COUNT, None)
            return _Sight(number, Owner(**said), (touched, count))
        except (ValueError, TypeError, AttributeError):
            return _Sight(number, None, (touched, text))

    def _text(self) -> str:
        """The text of this process's mark up to the count, which the count and `"}` follow."""
        return json.dumps({**asdict(self._owner), _COUNT: ""})[: -len('"}')]

    def _make(self, number: int) -> bool:
        """Make this process's mark with a number; return False if a mark with this number exists."""
        try:
            with open(self._path(number), "x", encoding="utf-8") as stream:
                stream.write(f'{self._text()}{"0" * DIGITS}"}}')
                stream.flush()
                with suppress(OSError):
                    os.fchmod(stream.fileno(), 0o644)  # other users should see the owner
                os.fsync(stream.fileno())
        except FileExistsError:
            return False
        except OSError:
            self._path(number).unlink(missing_ok=True)  # for example, the disk is full
            raise
        return True


@atexit.register
def release_all() -> None:
    """Release every mark of this process at its exit, even if no `finally` runs."""
    for mark in list(_held):
        mark.release()


# --- processes


def _machine() -> str | None:
    """The identity of a machine whose processes can look each other up by id; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _start_of(process: int) -> int | None:
    """The start time of a process in the machine's ticks; None if it does not run, or is a zombie."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])
