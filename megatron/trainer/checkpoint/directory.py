"""The directory of checkpoints: a checkpoint appears in it completely or not at all, and damage to it is detected.

Problem: a job can be killed between any two system calls, and the file that names the latest checkpoint must never name
an incomplete one. Moreover, torch's distributed format does not detect a flipped bit in a tensor. It detects a missing
or truncated file only after half of the model is loaded, and its error names no file.

Solution: a checkpoint is written into `.iter_0000010.TOKEN.incomplete`, a name that no other process uses, made
durable, and renamed to `iter_0000010`. Only then is `latest_checkpointed_iteration.txt` replaced, also by a rename. An
existing checkpoint of the same iteration is renamed to `.iter_0000010.replaced` and removed last. If the job is killed
between the two renames, the checkpoint is found under that name, even in a read-only directory, and `recover` renames
it back. Only rank 0 of the job that owns the directory calls functions that change files. The names and the tracker
file are those of Megatron-LM, so each program finds the checkpoints of the other.

The last file that a save writes is `checksums.json`: the size and CRC-32 of every other file, and a CRC-32 of this
list. A load compares them before it reads anything. CRC-32 finds every single flipped bit and every burst of up to 32
bits, and runs at memory speed. Checkpoints of Megatron-LM have no such file. For them, a load compares the lengths that
the format records in its `.metadata`, which finds missing and truncated files.
"""

import json
import os
import re
import shutil
import threading
import uuid
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import torch

from megatron.pipeline.runtime.failure.errors import CheckpointError

# --- completeness of a checkpoint -------------------------------------------------------------------------------------

MANIFEST = "checksums.json"
COMMON_FILE = "common.pt"
_CHUNK_BYTES = 16 * 1024 * 1024


def size_and_checksum(path: Path) -> dict[str, int | str]:
    """The size in bytes and the CRC-32 (eight hexadecimal digits) of a file."""
    value, size = 0, 0
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
            size += len(chunk)
    return {"size": size, "crc32": f"{value:08x}"}


def write_manifest(directory: Path, synced: Mapping[str, dict] = MappingProxyType({})) -> None:
    """Write `checksums.json`, and make all files durable.

    `synced`: name of an already durable file -> the result of `size_and_checksum`.
    """
    files = dict(synced)
    for name in sorted(set(os.listdir(directory)) - synced.keys()):
        sync_file(directory / name)
        files[name] = size_and_checksum(directory / name)
    content = {"files": files, "crc32": _own_checksum(files)}
    write_synced(directory / MANIFEST, json.dumps(content, indent=1, sort_keys=True) + "\n")


def read_manifest(directory: Path) -> dict[str, dict] | None:
    """The manifest of a checkpoint: name of a file -> its size and checksum; None if there is no manifest.

    Raises CheckpointError if the manifest itself is damaged.
    """
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        files, own = content["files"], content["crc32"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint file {path} is damaged: it cannot be parsed ({error})") from error
    if own != _own_checksum(files):
        raise CheckpointError(f"checkpoint file {path} is damaged: its checksum does not match")
    return files


def find_damage(directory: Path, files: dict[str, dict], names: list[str]) -> list[str]:
    """Compare files with their entries in the manifest. Returns a sentence for each file that differs."""
    problems = []
    for name in names:
        path, expected = directory / name, files[name]
        if not path.is_file():
            problems.append(f"checkpoint file {path} is missing")
        elif (size := path.stat().st_size) != expected["size"]:
            state = "truncated" if size < expected["size"] else "longer than it was written"
            problems.append(f"checkpoint file {path} is {state}: {size} of {expected['size']} bytes")
        elif size_and_checksum(path)["crc32"] != expected["crc32"]:
            problems.append(f"checkpoint file {path} is damaged: its checksum does not match")
    return problems


def find_short_files(directory: Path, required_sizes: dict[str, int]) -> list[str]:
    """Sentences about missing and truncated files of a checkpoint without a manifest.

    `required_sizes`: name of a file -> its minimum length in bytes, from the index.
    """
    problems = []
    for name, required in sorted(required_sizes.items()):
        path = directory / name
        if not path.is_file():
            problems.append(f"checkpoint file {path} is missing")
        elif (size := path.stat().st_size) < required:
            problems.append(f"checkpoint file {path} is truncated: {size} of at least {required} bytes")
    return problems


def _own_checksum(files: dict[str, dict]) -> str:
    return f"{zlib.crc32(json.dumps(files, sort_keys=True).encode()):08x}"


# --- locations of checkpoints -----------------------------------------------------------------------------------------

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_MOST_SHOWN = 8
_ITERATION = re.compile(r"iter_(\d{7,})")
_LEFTOVER = re.compile(r"\.iter_\d{7,}(\.[0-9a-f]+)?\.incomplete")
_REPLACED = re.compile(r"\.iter_(\d{7,})\.replaced")


@dataclass(frozen=True)
class CheckpointLocation:
    """A checkpoint on disk.

    Attributes:
        iteration: 0 for a release checkpoint, which has weights without a training position.
        is_named: whether the tracker or the caller named this checkpoint.
    """

    root: Path
    path: Path
    iteration: int
    is_release: bool = False
    is_named: bool = True


def iteration_directory(root: Path | str, iteration: int) -> Path:
    """The directory of the checkpoint of `iteration`."""
    return Path(root) / f"iter_{iteration:07d}"


def _replaced_directory(root: Path | str, iteration: int) -> Path:
    """The directory of the old checkpoint of `iteration` while a new one replaces it."""
    return Path(root) / f".iter_{iteration:07d}.replaced"


def _existing_directory(root: Path, iteration: int) -> Path:
    """The directory of the checkpoint of `iteration`, under its other name if a job was killed between the renames."""
    path, replaced = iteration_directory(root, iteration), _replaced_directory(root, iteration)
    return replaced if replaced.is_dir() and not path.exists() else path


def complete_iterations(root: Path | str) -> list[int]:
    """The iterations with a complete checkpoint in ascending order; a complete checkpoint has a `metadata.json`."""
    root = Path(root)
    if not root.is_dir():
        return []
    names = [entry.name for entry in root.iterdir()]
    iterations = {int(match[1]) for name in names if (match := _ITERATION.fullmatch(name) or _REPLACED.fullmatch(name))}
    return sorted(each for each in iterations if (_existing_directory(root, each) / "metadata.json").is_file())


def iterations_hint(root: Path | str, *, but: int | None = None) -> str:
    """A sentence that names the complete checkpoints, and the flags that load the newest.

    `but`: an iteration whose checkpoint cannot be loaded.
    """
    found = [number for number in complete_iterations(root) if number != but]
    if not found:
        return f"{root} has no complete checkpoint of {'an' if but is None else 'another'} iteration."
    *others, newest = map(str, found[-_MOST_SHOWN:])
    load = f"with --load {root} --ckpt-step {newest}."
    if not others:
        return f"{root} has a complete checkpoint of iteration {newest}; load it {load}"
    rest = f", and {len(found) - _MOST_SHOWN} older" if len(found) > _MOST_SHOWN else ""
    which = f"iterations {', '.join(others)} and {newest}{rest}"
    return f"{root} has complete checkpoints of {which}; load the newest {load}"


def read_tracker(root: Path | str) -> int | str | None:
    """The iteration that the tracker file names, "release", or None if there is no such file.

    Raises CheckpointError for any other content.
    """
    path = Path(root) / TRACKER
    try:
        text = path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    if text == RELEASE:
        return RELEASE
    if not text.isascii() or not text.isdecimal():
        raise CheckpointError(
            f"{path} should hold an iteration or the word 'release', but holds {text[:40]!r}. {iterations_hint(root)}"
        )
    return int(text)


def locate(root: Path | str, *, step: int | None = None) -> CheckpointLocation | None:
    """Find the checkpoint to load: that of iteration `step` if given, otherwise the one that the tracker names.

    Without a tracker, a single checkpoint is taken: the job was killed between its first checkpoint and the tracker.

    Returns None if the directory has no checkpoint. Raises CheckpointError if the requested checkpoint is missing, or
    if there are several checkpoints without a tracker, a state that no job leaves.
    """
    root = Path(root)
    named = step if step is not None else read_tracker(root)
    if named == RELEASE:
        return CheckpointLocation(root, _require(root / RELEASE, root, None), 0, is_release=True)
    if named is None:
        complete = complete_iterations(root)
        if not complete:
            return None
        if len(complete) > 1:
            raise CheckpointError(
                f"{root / TRACKER}, which names the checkpoint to go on from, is missing. {iterations_hint(root)}"
            )
        return CheckpointLocation(root, _existing_directory(root, complete[0]), complete[0], is_named=False)
    path = _existing_directory(root, named)
    return CheckpointLocation(root, _require(path, root, named), named)


def _require(path: Path, root: Path, iteration: int | None) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist. {iterations_hint(root, but=iteration)}")
    if not (path / "metadata.json").is_file():
        legacy = "mp_rank_" in " ".join(entry.name for entry in path.iterdir())
        reason = (
            "it is in Megatron-LM's old 'torch' format; tools/convert_checkpoint.py makes a torch_dist one of it"
            if legacy
            else "its metadata.json is missing, so it was never completed or the file has been lost"
        )
        raise CheckpointError(f"checkpoint {path} cannot be loaded: {reason}. {iterations_hint(root, but=iteration)}")
    return path


def recover(root: Path | str) -> None:
    """Clean up a directory after a killed job. No complete checkpoint is lost."""
    root = Path(root)
    if not root.is_dir():
        return
    for entry in list(root.iterdir()):
        if _LEFTOVER.fullmatch(entry.name):
            discard(entry)  # a process that is taken for lost may still write there; then a later call removes the rest
        elif match := _REPLACED.fullmatch(entry.name):
            path = iteration_directory(root, int(match[1]))
            if path.exists():
                shutil.rmtree(entry)
            else:
                os.rename(entry, path)


def begin(root: Path | str, iteration: int) -> Path:
    """Make an empty directory for the files of the checkpoint of `iteration`; remains of killed saves are removed."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    recover(root)
    staging = root / f".iter_{iteration:07d}.{uuid.uuid4().hex[:12]}.incomplete"
    staging.mkdir()
    return staging


def commit(root: Path | str, staging: Path, iteration: int | None = None) -> Path:
    """Rename a completely written checkpoint to its final name, and make it the latest one.

    The files must be synced. Returns the checkpoint's directory. `iteration`: None for a checkpoint without a training
    position, which must be the first one of `root`.
    """
    root = Path(root)
    final = root / RELEASE if iteration is None else iteration_directory(root, iteration)
    replaced = _replaced_directory(root, iteration or 0)
    sync_directory(staging)
    if iteration is not None and final.exists():
        os.rename(final, replaced)
    os.rename(staging, final)
    sync_directory(root)
    _write_tracker(root, RELEASE if iteration is None else iteration)
    if replaced.exists():
        shutil.rmtree(replaced)
    return final


@dataclass
class BegunSave:
    """A save that has begun: one thread may commit it while another one abandons it.

    Attributes:
        inode: the number of the staging directory in its file system, which a rename preserves.
        is_complete: whether this rank knows that the checkpoint is durable and the latest. It stays as it is once the
            save is abandoned.
        thread, failure: the background thread, and the error with which writing ended.
    """

    iteration: int
    staging: Path
    inode: int
    is_complete: bool = False
    thread: threading.Thread | None = None
    failure: Exception | None = None
    _is_abandoned: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def require(self) -> None:
        """Raise RuntimeError if the save is abandoned."""
        if self._is_abandoned:
            raise RuntimeError(f"the save of iteration {self.iteration} is abandoned")

    def abandon(self) -> None:
        """Let the save be committed no more; wait for a commit that has begun."""
        with self._lock:
            self._is_abandoned = True

    def commit(self, root: Path, check: Callable[[], None]) -> Path:
        """Call `check`, then commit as the function `commit` does. Raises RuntimeError if the save is abandoned."""
        with self._lock:
            self.require()
            check()
            path = commit(root, self.staging, self.iteration)
            self.is_complete = True
            return path

    def note_complete(self) -> None:
        """Note that rank 0 has committed the save."""
        with self._lock:
            self.is_complete |= not self._is_abandoned


def finish_commit(root: Path | str, iteration: int, inode: int) -> bool:
    """Whether the directory that had this inode as staging directory has become the checkpoint of `iteration`.

    If the process that called `commit` was killed behind the rename, the checkpoint is made the latest one now.
    """
    final = iteration_directory(root, iteration)
    if not final.is_dir() or final.stat().st_ino != inode:
        return False
    if read_tracker(root) != iteration:
        sync_directory(Path(root))
        _write_tracker(Path(root), iteration)
    return True


def discard(staging: Path) -> None:
    """Remove the files of a failed save."""
    shutil.rmtree(staging, ignore_errors=True)


def write_synced(path: Path, text: str) -> None:
    """Write a small text file and wait until it is durable."""
    with open(path, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def save_with_torch(value: object, stream: BinaryIO) -> None:
    """torch.save. At a full disk it raises the system's OSError, which torch alone hides behind an error of its own."""
    try:
        torch.save(value, stream)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def sync_file(path: Path) -> None:
    """Wait until a file that other code has written is durable."""
    with open(path, "rb+") as stream:
        os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_tracker(root: Path, iteration: int | str) -> None:
    temporary = root / f".{TRACKER}.incomplete"
    write_synced(temporary, str(iteration))
    os.replace(temporary, root / TRACKER)
    sync_directory(root)
