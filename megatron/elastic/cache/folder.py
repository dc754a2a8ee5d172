"""Opening the cache's files, whoever left them there.

    FOLDER/opening.lock              held while one of these files is opened or closed
    FOLDER/activations/data.mdb      LMDB's, and lock.mdb
                       users.lock    shared by each process that has them open
                       state.json    the boot and limit of who opened them, and how they were left
                       generations/  a lock for each, shared by those that need it
    FOLDER/activations.damaged/      what was found and could not be used, once

What is found is used as it is where others have it open. Who comes alone looks first: files of another boot of the
machine are removed, because their last pages may never have come to the disk; files that are larger than the limit too,
because LMDB's never shrink; and files that were changed since we left them, or that we left in a hurry, are walked
(`structure`).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.elastic.cache.environment import Environment, give_back, require_lmdb, share
from megatron.elastic.cache.file_lock import FileLock
from megatron.elastic.cache.structure import UnsoundError, require_sound

FEWEST_BYTES = 1 << 20
PATIENCE = 600.0
"""Seconds that an opening waits for another one, which may be walking a large file."""
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "ceph", "glusterfs", "beegfs", "fuse.sshfs"}
_STEP_BYTES = 64 << 10  # pages have as many or fewer
_LOCK_FILE_BYTES = 128 << 10
_NAME = "activations"

Warn = Callable[[str, str], None]
"""Say a sentence, once for each first word."""


@dataclass(frozen=True)
class _State:
    boot: str
    most_bytes: int
    left: list[int] | None = None

    @classmethod
    def read(cls, place: Path) -> _State | None:
        """None where there is none of ours."""
        try:
            said = json.loads((place / "state.json").read_text())
            state = cls(str(said["boot"]), int(said["most_bytes"]), said["left"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return state

    def write(self, place: Path) -> None:
        new = place / f"state.json.{os.getpid()}"
        new.write_text(json.dumps(asdict(self)))
        new.replace(place / "state.json")


def open_folder(folder: Path | str, most_bytes: int, warn: Warn) -> Environment:
    """The environment of this process there, opened if it is not open yet. To be closed with `close_folder`.

    Args:
        folder: on a disk of this node; made if it is missing.
        most_bytes: of the file.

    Raises:
        ValueError: lmdb is missing, the limit is too small, or the folder cannot be one of a cache.
        OSError, lmdb.Error: the disk is full, or has another fault.
    """
    root = require_usable(folder, most_bytes=most_bytes)
    most_bytes = most_bytes // _STEP_BYTES * _STEP_BYTES
    environment = share(root / _NAME, lambda: _Opening(root, most_bytes, warn).open())
    if environment.most_bytes != most_bytes:
        warn("limit", f"the cache in {root} is in use with a limit of {environment.most_bytes} bytes, which stays")
    return environment


def close_folder(environment: Environment) -> None:
    give_back(environment, _close)


def lock_generation(environment: Environment, digest: bytes, text: str = "") -> FileLock:
    """The lock of a generation, held by nobody yet. `text` is left there for who wants to know what it is."""
    path = environment.path / "generations" / digest.hex()
    lock = FileLock(path)
    if text:
        with suppress(OSError):
            if not path.stat().st_size:
                path.write_text(text + "\n")
    return lock


def mark_damaged(environment: Environment) -> None:
    """Who opens these files next sets them aside."""
    with suppress(OSError):
        (environment.path / "damaged").touch()


def _close(environment: Environment) -> None:
    place = environment.path
    with suppress(OSError), _alone(place.parent, patience=5.0):
        environment.close()
        state = _State.read(place)
        if state is not None:
            _State(state.boot, state.most_bytes, _size_and_time(place)).write(place)
    environment.close()
    environment.held.release()


class _Opening:
    def __init__(self, root: Path, most_bytes: int, warn: Warn) -> None:
        self._root, self._place, self._most_bytes, self._warn = root, root / _NAME, most_bytes, warn

    def open(self) -> Environment:
        import lmdb

        with _alone(self._root, PATIENCE):
            try:
                return self._open()
            except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError, lmdb.PageNotFoundError) as error:
                self._set_aside(str(error))
                return self._open()

    def _open(self) -> Environment:
        users, alone = self._enter()
        try:
            if alone:
                found = _State.read(self._place)
                state = _State(_boot(), self._most_bytes)
                # On a full disk what is found can still be read.
                with nullcontext() if found is None else suppress(OSError):
                    state.write(self._place)
                _make_lock_file(self._place / "lock.mdb")
            else:
                state = _State.read(self._place) or _State(_boot(), self._most_bytes)
            users.share(PATIENCE)
            # One limit for all who have it open, for LMDB does not grow a process's map behind its back.
            return Environment(self._place, state.most_bytes, users)
        except BaseException:
            users.release()
            raise

    def _enter(self) -> tuple[FileLock, bool]:
        """The lock of the users of files that can be opened, and whether there are no others."""
        while True:
            if not self._place.is_dir() and os.path.lexists(self._place):
                self._set_aside("it is no folder")
            (self._place / "generations").mkdir(parents=True, exist_ok=True)
            users = FileLock(self._place / "users.lock")
            alone = users.try_alone()
            try:
                usable = self._is_usable(alone)
            except BaseException:
                users.release()
                raise
            if usable:
                return users, alone
            users.release()

    def _is_usable(self, alone: bool) -> bool:
        """Whether the files can be used; if not, they are out of the way."""
        if (self._place / "damaged").exists():
            return self._set_aside("a process that read it found it damaged")
        file = self._place / "data.mdb"
        if not alone or not os.path.lexists(file):
            return True
        state = _State.read(self._place)
        if state is None:
            return self._set_aside("it has no state that a cache left there")
        if state.boot != _boot():
            return self._remove("it was written before the machine was started, and its end may be missing")
        try:
            size_and_time = _size_and_time(self._place)
            if size_and_time[0] > self._most_bytes:
                return self._remove(f"it has {size_and_time[0]} bytes, and {self._most_bytes} are allowed")
            if state.left != size_and_time:
                require_sound(file)
        except UnsoundError as error:
            return self._set_aside(str(error))
        except (FileNotFoundError, IsADirectoryError) as error:
            return self._set_aside(str(error))
        return True

    def _set_aside(self, reason: str) -> bool:
        aside = self._root / f"{_NAME}.damaged"
        _remove(aside)
        self._place.rename(aside)
        self._warn("damaged", f"the cache in {self._place} is set aside ({reason}) as {aside}, and starts empty")
        return False

    def _remove(self, reason: str) -> bool:
        _remove(self._place)
        self._warn("removed", f"the cache in {self._place} is removed ({reason}), and starts empty")
        return False


@contextmanager
def _alone(root: Path, patience: float) -> Iterator[None]:
    lock = FileLock(root / "opening.lock")
    try:
        lock.alone(patience)
        yield
    finally:
        lock.release()


def require_usable(folder: Path | str, *, most_bytes: int) -> Path:
    """Its absolute path. Raises as `open_folder`, before there is anything to keep."""
    require_lmdb()
    if most_bytes < FEWEST_BYTES:
        raise ValueError(f"a cache of at most {most_bytes} bytes holds nothing; allow {FEWEST_BYTES} and more")
    root = Path(folder).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        FileLock(root / "opening.lock").release()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"{root} cannot be the folder of a cache ({error.strerror}); name one that can be written"
        ) from error
    kind = _file_system(root)
    if kind in _REMOTE:
        raise ValueError(
            f"{root} cannot be the folder of a cache, since it lies on a remote file system ({kind}), where processes "
            "do not see each other's locks and pages; name one on a disk of the node"
        )
    return root


def _file_system(path: Path) -> str:
    """The kind of file system that a path lies on; empty where the system does not say."""
    here = os.path.realpath(path)
    kind, longest = "", -1
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, rest = line.partition(" - ")
            where = mount.split()[4].encode().decode("unicode_escape")  # blanks are written \040
            inside = here == where or here.startswith(where.rstrip("/") + "/")
            if inside and len(where) >= longest:
                kind, longest = rest.split()[0], len(where)
    return kind


def _make_lock_file(file: Path) -> None:
    """Make the file with bytes on the disk: LMDB would map one without any, and a full disk would end the process."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.posix_fallocate(handle, 0, _LOCK_FILE_BYTES)
    finally:
        os.close(handle)


def _size_and_time(place: Path) -> list[int]:
    status = (place / "data.mdb").stat()
    return [status.st_size, status.st_mtime_ns]


def _boot() -> str:
    """Which start of the machine this is; the same for all where the system does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "unknown"


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
