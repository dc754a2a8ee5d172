"""Is a checkpoint on disk the one that was written?

Problem: torch's distributed format notices neither a flipped bit in a tensor nor, before it has loaded half of the
model, a missing or shortened file; and then it says so in words that name no file.

Solution: the last file that a save writes is `checksums.json`: size and CRC-32 of every other file, and of that list
itself. A load compares before anything is read. CRC-32 finds every single flipped bit and every burst of up to 32,
and runs at memory speed. Checkpoints of Megatron-LM have no such file; for them the lengths that the format records in
its `.metadata` are compared, which finds missing and shortened files.
"""

import json
import zlib
from pathlib import Path

from megatron.pipeline.runtime.failure.errors import CheckpointError

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
