"""Where checkpoints lie, how one appears there all at once or not at all, and whether it is the one that was written.

Problem: a job can be killed between any two system calls, and the file that names the latest checkpoint must never name
one that is not whole. And torch's distributed format notices neither a flipped bit in a tensor nor, before it has
loaded half of the model, a missing or shortened file; and then it says so in words that name no file.

Solution: a checkpoint is written into `.iter_0000010.TOKEN.incomplete`, a name that no other process has, made
durable, and renamed to `iter_0000010`; only then is `latest_checkpointed_iteration.txt` replaced, by a rename as well.
A checkpoint of the same iteration that is already there is moved aside to `.iter_0000010.replaced` and removed last.
Where a kill came between the two renames it is found under that name, also in a directory that may only be read, and
`recover` moves it back. Only rank 0 of the job that owns the directory calls the functions that change anything. Names
and tracker are those of Megatron-LM, so each program finds the checkpoints of the other.

The last file that a save writes is `checksums.json`: size and CRC-32 of every other file, and of that list itself. A
load compares before anything is read. CRC-32 finds every single flipped bit and every burst of up to 32, and runs at
memory speed. Checkpoints of Megatron-LM have no such file; for them the lengths that the format records in its
`.metadata` are compared, which finds missing and shortened files.
"""

import json
import os
import re
import shutil
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path

from megatron.pipeline.runtime.failure.errors import CheckpointError

# --- whether a checkpoint is whole ------------------------------------------------------------------------------------

MANIFEST = "checksums.json"
_CHUNK_BYTES = 16 * 1024 * 1024


def checksum(path: Path) -> dict[str, int | str]:
    """Size in bytes and CRC-32 (eight hexadecimal digits) of a file."""
    value, size = 0, 0
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
            size += len(chunk)
    return {"size": size, "crc32": f"{value:08x}"}


def manifest_text(files: dict[str, dict]) -> str:
    """Content of `checksums.json` for files given by name, each with what `checksum` returns."""
    return json.dumps({"files": files, "crc32": _own_checksum(files)}, indent=1, sort_keys=True) + "\n"


def read_manifest(directory: Path) -> dict[str, dict] | None:
    """The files that a checkpoint must consist of, by name; None where it has no manifest.

    Raises CheckpointError where the manifest itself is damaged.
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
    """Compare the named files with the manifest's entries; returns one sentence for each that differs."""
    problems = []
    for name in names:
        path, expected = directory / name, files[name]
        if not path.is_file():
            problems.append(f"checkpoint file {path} is missing")
        elif (size := path.stat().st_size) != expected["size"]:
            state = "truncated" if size < expected["size"] else "longer than it was written"
            problems.append(f"checkpoint file {path} is {state}: {size} of {expected['size']} bytes")
        elif checksum(path)["crc32"] != expected["crc32"]:
            problems.append(f"checkpoint file {path} is damaged: its checksum does not match")
    return problems


def find_short_files(directory: Path, required_sizes: dict[str, int]) -> list[str]:
    """Short files of a checkpoint without a manifest; `required_sizes`: the least lengths that its index asks for."""
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


# --- where checkpoints lie --------------------------------------------------------------------------------------------

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_MOST_SHOWN = 8
_ITERATION = re.compile(r"iter_(\d{7,})")
_LEFTOVER = re.compile(r"\.iter_\d{7,}(\.[0-9a-f]+)?\.incomplete")
_REPLACED = re.compile(r"\.iter_(\d{7,})\.replaced")


@dataclass(frozen=True)
class CheckpointLocation:
    """One checkpoint on disk. `iteration` is 0 for a release checkpoint (weights without a training position).
    `is_named`: by the tracker, or by whoever asked for it."""

    root: Path
    path: Path
    iteration: int
    is_release: bool = False
    is_named: bool = True


def iteration_directory(root: Path | str, iteration: int) -> Path:
    """Directory of the checkpoint of `iteration`."""
    return Path(root) / f"iter_{iteration:07d}"


def _replaced_directory(root: Path | str, iteration: int) -> Path:
    """Where the checkpoint of `iteration` lies while a new one takes its place."""
    return Path(root) / f".iter_{iteration:07d}.replaced"


def _existing_directory(root: Path, iteration: int) -> Path:
    """Directory of the checkpoint of `iteration`, or its other name where a kill came between the renames."""
    path, replaced = iteration_directory(root, iteration), _replaced_directory(root, iteration)
    return replaced if replaced.is_dir() and not path.exists() else path


def complete_iterations(root: Path | str) -> list[int]:
    """Iterations with a whole checkpoint, ascending: `metadata.json` is the last file that a save writes."""
    root = Path(root)
    if not root.is_dir():
        return []
    names = [entry.name for entry in root.iterdir()]
    iterations = {int(match[1]) for name in names if (match := _ITERATION.fullmatch(name) or _REPLACED.fullmatch(name))}
    return sorted(each for each in iterations if (_existing_directory(root, each) / "metadata.json").is_file())


def iterations_hint(root: Path | str, *, but: int | None = None) -> str:
    """A sentence that says which checkpoints can be tried, and how to load the newest. `but`: an iteration whose
    checkpoint cannot."""
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
    """Iteration that the tracker file names, "release", or None where there is no such file.

    Raises CheckpointError where the file holds anything else.
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
    """Find the checkpoint to load: `step` where given, else the one that the tracker names. Without a tracker, the only
    one there: the job was killed between its very first checkpoint and the tracker.

    Returns None where the directory holds no checkpoint. Raises CheckpointError where the one asked for is missing, and
    where there are several and no tracker, which no job leaves behind.
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
            "it is in Megatron-LM's old 'torch' format; convert it with Megatron-LM to torch_dist"
            if legacy
            else "its metadata.json is missing, so it was never completed or the file has been lost"
        )
        raise CheckpointError(f"checkpoint {path} cannot be loaded: {reason}. {iterations_hint(root, but=iteration)}")
    return path


def recover(root: Path | str) -> None:
    """Bring a directory that a killed job left behind back into order. Nothing that was completed is removed."""
    root = Path(root)
    if not root.is_dir():
        return
    for entry in list(root.iterdir()):
        if _LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry)
        elif match := _REPLACED.fullmatch(entry.name):
            path = iteration_directory(root, int(match[1]))
            if path.exists():
                shutil.rmtree(entry)
            else:
                os.rename(entry, path)


def begin(root: Path | str, iteration: int) -> Path:
    """Make an empty directory to write the checkpoint of `iteration` into; leftovers of killed saves are removed."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    recover(root)
    staging = root / f".iter_{iteration:07d}.{uuid.uuid4().hex[:12]}.incomplete"
    staging.mkdir()
    return staging


def commit(root: Path | str, staging: Path, iteration: int) -> Path:
    """Make a completely written checkpoint visible, and then the latest one. Its files must have been synced."""
    root, final = Path(root), iteration_directory(root, iteration)
    sync_directory(staging)
    replaced = _replaced_directory(root, iteration)
    if final.exists():
        os.rename(final, replaced)
    os.rename(staging, final)
    sync_directory(root)
    _write_tracker(root, iteration)
    if replaced.exists():
        shutil.rmtree(replaced)
    return final


def discard(staging: Path) -> None:
    """Remove what a failed save has written."""
    shutil.rmtree(staging, ignore_errors=True)


def write_synced(path: Path, text: str) -> None:
    """Write a small text file and wait until it is durable."""
    with open(path, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync_file(path: Path) -> None:
    """Wait until a file that somebody else has written is durable."""
    with open(path, "rb+") as stream:
        os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_tracker(root: Path, iteration: int) -> None:
    temporary = root / f".{TRACKER}.incomplete"
    write_synced(temporary, str(iteration))
    os.replace(temporary, root / TRACKER)
    sync_directory(root)
