"""A cache's folder: its lock, its limit on bytes, and the handling of files that an earlier process has left.

    FOLDER/cache.lock            locked while files are written, opened or deleted
    FOLDER/activations/          locked, shared, by each process that has it open
        state.json               format, version, and the limit of the processes that have it open
        65536.values             slots of 65,536 bytes each
        65536-DIGEST.index       one generation: its description, and the slots of its values; locked, shared, by each
                                 process that needs the generation
    FOLDER/activations.damaged   the last files that were found and could not be used

The kernel releases a lock (flock) when its process ends, however it ends. Locks do not work across a remote file
system, so a folder on one is refused.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FEWEST_BYTES = 1 << 20
PATIENCE = 60.0
"""Seconds to wait for the folder's lock when the folder is opened."""
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "ceph", "glusterfs", "beegfs", "fuse.sshfs"}
_NAME = "activations"
_STATE, _NEW = "state.json", "new"
_FORMAT = {"format": "activation cache", "version": 2}
_BETWEEN_TRIES = 0.02

Warn = Callable[[str, str], None]
"""(kind, sentence): logs a warning, once for each kind."""


class CacheFolder:
    """An open folder of a cache. Names refer to the directory that was opened, even if it has been moved since.

    Args:
        folder: a folder on a disk of this node, which is made if it is missing.
        most_bytes: the limit on the bytes of all files together. If other processes have the folder open, their limit
            stays.
        warn: logs warnings.

    Raises:
        ValueError: as `require_usable`.
        OSError: the disk is full, or has another fault.
    """

    def __init__(self, folder: Path | str, most_bytes: int, warn: Warn) -> None:
        root = require_usable(folder, most_bytes=most_bytes)
        self.path, self._aside, self._warn = root / _NAME, root / f"{_NAME}.damaged", warn
        self._lock, self._directory = _open_lock(root), -1
        try:
            with self.locked(PATIENCE):
                self.most_bytes = self._open(most_bytes)
        except BaseException:
            self.close()
            raise
        if self.most_bytes != most_bytes:
            warn("limit", f"the cache in {root} is in use with a limit of {self.most_bytes} bytes, which is kept")

    @contextmanager
    def locked(self, patience: float) -> Iterator[None]:
        """A block that holds the folder's lock exclusively.

        Raises TimeoutError if the lock is not free within `patience` seconds.
        """
        end = time.monotonic() + patience
        while not try_lock(self._lock, fcntl.LOCK_EX):
            if time.monotonic() > end:
                raise TimeoutError(f"other processes have held a lock for {patience:g} s")
            time.sleep(_BETWEEN_TRIES)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def open(self, name: str, flags: int) -> int:
        """Open a file of the folder. Returns its descriptor."""
        return os.open(name, flags | os.O_CLOEXEC, 0o666, dir_fd=self._directory)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """The inode and the size in bytes of each file of the folder, by name."""
        with os.scandir(self._directory) as files:
            return {each.name: (each.inode(), each.stat(follow_symlinks=False).st_size) for each in files}

    def write_whole(self, name: str, content: bytes) -> None:
        """Write a file atomically. Precondition: the folder's lock is held."""
        with os.fdopen(self.open(_NEW, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(content)
        os.replace(_NEW, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self._directory)

    def set_aside(self, name: str, reason: str) -> None:
        """Move a file that cannot be used out of the folder."""
        _remove(self._aside)
        os.replace(name, self._aside, src_dir_fd=self._directory)
        self._say_set_aside(self.path / name, reason)

    def close(self) -> None:
        for file in (self._directory, self._lock):
            if file >= 0:
                unlock_and_close(file)

    def abandon(self) -> None:
        """Close the descriptors of a forked process, whose parent keeps the locks."""
        for file in (self._directory, self._lock):
            os.close(file)

    def _open(self, most_bytes: int) -> int:
        """Open the directory, which is replaced by an empty one if it cannot be used. Returns the limit in bytes."""
        if os.path.lexists(self.path) and not self.path.is_dir():
            self._set_all_aside("it is no folder")
        self.path.mkdir(exist_ok=True)
        self._directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        limit = self._limit()
        if not try_lock(self._directory, fcntl.LOCK_EX):  # others have it open
            fcntl.flock(self._directory, fcntl.LOCK_SH)
            return most_bytes if limit is None else limit
        sizes = self.sizes()
        num_bytes = sum(size for _, size in sizes.values())
        if limit is None and sizes.keys() - {_NEW}:
            self._set_all_aside("it has no state that a cache left there")
        elif num_bytes > most_bytes:
            _remove(self.path)
            reason = f"it has {num_bytes} bytes, and {most_bytes} are allowed"
            self._warn("removed", f"the cache in {self.path} is removed ({reason}), and starts empty")
        else:
            with suppress(*() if limit is None else (OSError,)):  # on a full disk the existing files can still be read
                self.write_whole(_STATE, json.dumps({**_FORMAT, "most_bytes": most_bytes}).encode())
            fcntl.flock(self._directory, fcntl.LOCK_SH)
            return most_bytes
        os.close(self._directory)
        return self._open(most_bytes)

    def _limit(self) -> int | None:
        """The limit in the folder's state; None if there is no state of a cache of this version."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            state = json.loads((self.path / _STATE).read_text())
            if state == {**_FORMAT, "most_bytes": int(state["most_bytes"])}:
                return state["most_bytes"]
        return None

    def _set_all_aside(self, reason: str) -> None:
        _remove(self._aside)
        self.path.rename(self._aside)
        self._say_set_aside(self.path, reason)

    def _say_set_aside(self, path: Path, reason: str) -> None:
        self._warn("damaged", f"the cache in {path} is set aside ({reason}) as {self._aside}, and starts empty")


def require_usable(folder: Path | str, *, most_bytes: int) -> Path:
    """Check that a folder can hold a cache, and return its absolute path. The folder and its lock are made if missing.

    Raises:
        ValueError: the limit is too small, or the folder cannot be written or lies on a remote file system.
        OSError: the disk is full.
    """
    if most_bytes < FEWEST_BYTES:
        raise ValueError(f"a cache of at most {most_bytes} bytes holds nothing; allow {FEWEST_BYTES} and more")
    root = Path(folder).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        os.close(_open_lock(root))
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


def try_lock(file: int, kind: int) -> bool:
    """Take the lock of an open file, `fcntl.LOCK_EX` or `LOCK_SH`. Returns False if another lock prevents this."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock_and_close(file: int) -> None:
    """Release the lock of a file and close it. Closing alone would not do, since a forked process shares the lock."""
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def write_all(file: int, content: memoryview, begin: int | None = None) -> None:
    """Write all of `content` at byte `begin`, or at the file's position if it is None.

    Raises OSError if the disk cannot take all of the content.
    """
    while content:
        written = os.write(file, content) if begin is None else os.pwrite(file, content, begin)
        content, begin = content[written:], None if begin is None else begin + written


def _open_lock(root: Path) -> int:
    return os.open(root / "cache.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _file_system(path: Path) -> str:
    """The type of the file system that contains `path`; empty if it is unknown."""
    here = os.path.realpath(path)
    kind, longest = "", -1
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, rest = line.partition(" - ")
            where = mount.split()[4].encode().decode("unicode_escape")  # spaces are written \040
            inside = here == where or here.startswith(where.rstrip("/") + "/")
            if inside and len(where) >= longest:
                kind, longest = rest.split()[0], len(where)
    return kind


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
