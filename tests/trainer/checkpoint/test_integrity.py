"""Damage to any file of a checkpoint is found, and the file is named."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.checkpoint import integrity


@pytest.fixture
def checkpoint(tmp_path):
    for number in range(3):
        (tmp_path / f"file{number}").write_bytes(bytes(range(256)) * (number + 1))
    files = {f"file{number}": integrity.checksum(tmp_path / f"file{number}") for number in range(3)}
    (tmp_path / integrity.MANIFEST).write_text(integrity.manifest_text(files))
    return tmp_path


def damage(directory):
    files = integrity.read_manifest(directory)
    return integrity.find_damage(directory, files, sorted(files))


def test_whole_checkpoint_has_no_damage(checkpoint):
    """What was written is accepted."""
    assert damage(checkpoint) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 255), bit=st.integers(0, 7))
def test_every_flipped_bit_is_found(checkpoint, position, bit):
    """Whichever bit of a file is flipped, the file is reported, and only that one."""
    path = checkpoint / "file0"
    original = path.read_bytes()
    content = bytearray(original)
    content[position] ^= 1 << bit
    path.write_bytes(content)
    assert damage(checkpoint) == [f"checkpoint file {path} is damaged: its checksum does not match"]
    path.write_bytes(original)


def test_truncated_extended_and_missing_files_are_told_apart(checkpoint):
    """The sentence says what happened to the file."""
    (checkpoint / "file0").write_bytes(b"x")
    (checkpoint / "file1").unlink()
    (checkpoint / "file2").write_bytes(bytes(1000))
    assert damage(checkpoint) == [
        f"checkpoint file {checkpoint / 'file0'} is truncated: 1 of 256 bytes",
        f"checkpoint file {checkpoint / 'file1'} is missing",
        f"checkpoint file {checkpoint / 'file2'} is longer than it was written: 1000 of 768 bytes",
    ]


def test_damaged_manifest_is_named_itself(checkpoint):
    """A flipped digit in the list of checksums does not cast doubt on a good file."""
    path = checkpoint / integrity.MANIFEST
    content = json.loads(path.read_text())
    content["files"]["file1"]["size"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"checksums.json is damaged"):
        integrity.read_manifest(checkpoint)
    path.write_text(path.read_text()[:20])
    with pytest.raises(CheckpointError, match=r"checksums.json is damaged: it cannot be parsed"):
        integrity.read_manifest(checkpoint)


def test_foreign_checkpoint_is_checked_by_its_lengths(checkpoint):
    """Without a manifest, files shorter than the format's index asks for are reported."""
    (checkpoint / integrity.MANIFEST).unlink()
    assert integrity.read_manifest(checkpoint) is None
    assert integrity.find_short_files(checkpoint, {"file0": 256, "file1": 513, "other": 1}) == [
        f"checkpoint file {checkpoint / 'file1'} is truncated: 512 of at least 513 bytes",
        f"checkpoint file {checkpoint / 'other'} is missing",
    ]
