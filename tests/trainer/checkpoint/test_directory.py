"""Checkpoints appear at once or not at all, whenever a job is killed, and damage to any file is found and named."""

import json
import os
import threading
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.checkpoint import directory
from megatron.trainer.checkpoint.directory import (
    MANIFEST,
    find_damage,
    find_short_files,
    read_manifest,
    save_with_torch,
    size_and_checksum,
    write_manifest,
)
from tests.full_disk import largest_file


class Killed(BaseException):
    """Stands for SIGKILL: nothing may clean up behind it."""


def written(root, iteration, content):
    staging = directory.begin(root, iteration)
    (staging / "weights").write_text(content)
    directory.write_synced(staging / "metadata.json", "{}")
    return directory.BegunSave(iteration, staging, staging.stat().st_ino)


def save(root, iteration, content):
    directory.commit(root, written(root, iteration, content).staging, iteration)


def loaded(root):
    location = directory.locate(root)
    return location.iteration, (location.path / "weights").read_text()


def killed_at_call(number, action):
    """Run `action`, killed at its `number`-th change of the file system; False if it made fewer and completed."""
    calls = 0

    def counted(original):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number:
                raise Killed
            return original(*args, **kwargs)

        return call

    names = ("rename", "replace", "fsync", "mkdir", "rmdir", "unlink")
    with mock.patch.multiple(os, **{name: counted(getattr(os, name)) for name in names}):
        try:
            action()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("iteration", [20, 10], ids=["another iteration", "the same iteration again"])
def test_a_kill_at_any_moment_of_a_save_loses_nothing(tmp_path, iteration):
    """Killed at each system call in turn, a directory holds the checkpoint before or the new one, whole and latest."""
    outcomes = set()
    for number in range(1, 100):
        root = tmp_path / str(number)
        save(root, 10, "old")
        was_killed = killed_at_call(number, lambda root=root: save(root, iteration, "new"))
        outcomes.add(loaded(root))
        save(root, 30, "later")
        assert loaded(root) == (30, "later")
        assert not [name for name in os.listdir(root) if name.startswith(".")], "leftovers are removed by the next save"
        if not was_killed:
            break
    assert not was_killed and number > 6
    assert outcomes == {(10, "old"), (iteration, "new")}


@pytest.mark.parametrize("iteration", [20, 10], ids=["another iteration", "the same iteration again"])
def test_the_next_owner_finishes_a_commit_or_finds_none(tmp_path, iteration):
    """Killed at each system call of a commit in turn, the checkpoint is the latest behind the rename, and is not there
    before it."""
    outcomes = []
    for number in range(1, 100):
        root = tmp_path / str(number)
        save(root, 10, "old")
        begun = written(root, iteration, "new")
        was_killed = killed_at_call(number, lambda root=root, begun=begun: begun.commit(root, lambda: None))
        outcomes.append(directory.finish_commit(root, iteration, begun.inode))
        assert loaded(root) == ((iteration, "new") if outcomes[-1] else (10, "old"))
        save(root, 30, "later")
        assert not [name for name in os.listdir(root) if name.startswith(".")]
        if not was_killed:
            break
    assert not was_killed and outcomes == sorted(outcomes) and {*outcomes} == {False, True}


def test_a_save_is_committed_before_it_is_abandoned_or_never(tmp_path):
    """A thread in a commit makes the one that abandons wait; behind that, another commit is refused."""
    begun, entered, goes_on = written(tmp_path, 10, "first"), threading.Event(), threading.Event()

    def check():
        entered.set()
        goes_on.wait()

    committing = threading.Thread(target=lambda: begun.commit(tmp_path, check))
    abandoning = threading.Thread(target=begun.abandon)
    committing.start()
    entered.wait()
    abandoning.start()
    abandoning.join(0.2)
    assert abandoning.is_alive()
    goes_on.set()
    abandoning.join()
    committing.join()
    assert begun.is_complete and loaded(tmp_path) == (10, "first")
    late = written(tmp_path, 5, "late")
    late.abandon()
    with pytest.raises(RuntimeError, match="the save of iteration 5 is abandoned"):
        late.commit(tmp_path, lambda: None)
    late.note_complete()
    assert not late.is_complete and loaded(tmp_path) == (10, "first")


def test_checkpoint_between_its_two_names_is_recovered(tmp_path):
    """Killed between the two renames, a checkpoint is found and counted beside its name, and moved back."""
    save(tmp_path, 10, "old")
    (tmp_path / "iter_0000010").rename(tmp_path / ".iter_0000010.replaced")
    (tmp_path / ".iter_0000010.incomplete").mkdir()  # of a version before
    (tmp_path / ".iter_0000010.0a1b2c3d4e5f.incomplete").mkdir()
    assert directory.complete_iterations(tmp_path) == [10]
    assert directory.locate(tmp_path, step=10).path == tmp_path / ".iter_0000010.replaced"
    directory.recover(tmp_path)
    assert loaded(tmp_path) == (10, "old")
    assert sorted(os.listdir(tmp_path)) == ["iter_0000010", directory.TRACKER]


def test_first_save_killed_before_the_tracker_is_found(tmp_path):
    """Where the only checkpoint is whole but its tracker was not written any more, it is the one to load."""
    save(tmp_path, 10, "first")
    (tmp_path / directory.TRACKER).unlink()
    assert loaded(tmp_path) == (10, "first")
    assert not directory.locate(tmp_path).is_named and directory.locate(tmp_path, step=10).is_named


def test_several_checkpoints_without_a_tracker_are_refused(tmp_path):
    """No job leaves these behind, so which one is meant is not guessed: they are listed, with how to load one."""
    save(tmp_path, 10, "a")
    save(tmp_path, 20, "b")
    (tmp_path / directory.TRACKER).unlink()
    with pytest.raises(
        CheckpointError, match=r"is missing.*iterations 10 and 20; load the newest with .*--ckpt-step 20"
    ):
        directory.locate(tmp_path)
    assert directory.locate(tmp_path, step=20).iteration == 20


def test_directory_without_checkpoints_holds_none(tmp_path):
    """A missing or empty directory is not an error: the run starts from its initial weights."""
    assert directory.locate(tmp_path / "absent") is None
    assert directory.locate(tmp_path) is None


def test_missing_checkpoint_names_the_others(tmp_path):
    """Nothing falls back silently: the error says what is missing, which others exist and how to load one."""
    save(tmp_path, 10, "a")
    save(tmp_path, 20, "b")
    with pytest.raises(CheckpointError, match=r"iter_0000015 does not exist.*iterations 10 and 20; .*--ckpt-step 20"):
        directory.locate(tmp_path, step=15)
    (tmp_path / "iter_0000020" / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"iter_0000020 cannot be loaded.*metadata.json.*--ckpt-step 10"):
        directory.locate(tmp_path)
    assert directory.locate(tmp_path, step=10).iteration == 10


def test_a_hint_says_which_checkpoints_there_are(tmp_path):
    """None, one, and more than a sentence holds; without the one that cannot be loaded."""
    assert directory.iterations_hint(tmp_path) == f"{tmp_path} has no complete checkpoint of an iteration."
    save(tmp_path, 1, "a")
    assert directory.iterations_hint(tmp_path, but=1) == f"{tmp_path} has no complete checkpoint of another iteration."
    assert directory.iterations_hint(tmp_path) == (
        f"{tmp_path} has a complete checkpoint of iteration 1; load it with --load {tmp_path} --ckpt-step 1."
    )
    for iteration in range(2, 12):
        save(tmp_path, iteration, "a")
    assert directory.iterations_hint(tmp_path, but=4) == (
        f"{tmp_path} has complete checkpoints of iterations 3, 5, 6, 7, 8, 9, 10 and 11, and 2 older; load the newest "
        f"with --load {tmp_path} --ckpt-step 11."
    )


@pytest.mark.parametrize("text", ["", "iter", "-5", "1e3", "\x00\x01"])
def test_damaged_tracker_is_an_error(tmp_path, text):
    """A tracker file with anything but an iteration or 'release' is named, never guessed at."""
    save(tmp_path, 10, "a")
    (tmp_path / directory.TRACKER).write_text(text)
    with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration.txt should hold.*iteration 10"):
        directory.locate(tmp_path)


def test_release_checkpoint_is_found(tmp_path):
    """'release' in the tracker means weights without a training position."""
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "metadata.json").write_text("{}")
    (tmp_path / directory.TRACKER).write_text("release\n")
    location = directory.locate(tmp_path)
    assert (location.iteration, location.is_release) == (0, True)


def test_old_format_is_refused_by_name(tmp_path):
    """Megatron-LM's checkpoints from before torch_dist are refused with the way out."""
    (tmp_path / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / directory.TRACKER).write_text("10")
    with pytest.raises(CheckpointError, match="old 'torch' format"):
        directory.locate(tmp_path)


@pytest.fixture
def checkpoint(tmp_path):
    for number in range(3):
        (tmp_path / f"file{number}").write_bytes(bytes(range(256)) * (number + 1))
    write_manifest(tmp_path, {"file0": size_and_checksum(tmp_path / "file0")})
    return tmp_path


def damage(directory):
    files = read_manifest(directory)
    return find_damage(directory, files, sorted(files))


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
    path = checkpoint / MANIFEST
    content = json.loads(path.read_text())
    content["files"]["file1"]["size"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"checksums.json is damaged"):
        read_manifest(checkpoint)
    path.write_text(path.read_text()[:20])
    with pytest.raises(CheckpointError, match=r"checksums.json is damaged: it cannot be parsed"):
        read_manifest(checkpoint)


def test_foreign_checkpoint_is_checked_by_its_lengths(checkpoint):
    """Without a manifest, files shorter than the format's index asks for are reported."""
    (checkpoint / MANIFEST).unlink()
    assert read_manifest(checkpoint) is None
    assert find_short_files(checkpoint, {"file0": 256, "file1": 513, "other": 1}) == [
        f"checkpoint file {checkpoint / 'file1'} is truncated: 512 of at least 513 bytes",
        f"checkpoint file {checkpoint / 'other'} is missing",
    ]


@pytest.mark.parametrize("room", [10, 5000, 20000], ids=["nothing fits", "a part fits", "all but the end fits"])
def test_what_torch_saves_on_a_full_disk(tmp_path, room):
    """The system's error says so, wherever it meets the file."""
    with largest_file(room), pytest.raises(OSError, match="File too large"), open(tmp_path / "state", "wb") as stream:
        save_with_torch({"moments": torch.zeros(4990)}, stream)
