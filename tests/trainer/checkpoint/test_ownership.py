"""One job owns a `--save` directory; a live one keeps it, a dead one's is taken over, and only by one."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.checkpoint import ownership, writer
from megatron.trainer.checkpoint.ownership import Owner, OwnerMark, _Sight
from megatron.trainer.checkpoint.writer import CheckpointWriter

# Takes the directory, says so and holds it; gives its signs of life as often as it is told.
HOLDER = """
import ctypes, sys, time
from megatron.trainer.checkpoint import ownership
ownership.PERIOD, ownership.PATIENCE = float(sys.argv[2]), float(sys.argv[3])
if len(sys.argv) > 4:
    ownership._machine = lambda: sys.argv[4]
mark = ownership.OwnerMark(sys.argv[1])
while time.time() < float(sys.argv[5] if len(sys.argv) > 5 else 0):
    time.sleep(0.0005)
try:
    while not mark.try_to_take():
        time.sleep(0.02)
except ValueError as error:
    print("refused", error, flush=True)
else:
    print("taken", flush=True)
    ctypes.PyDLL(None).sleep(int(float(sys.argv[6])) if len(sys.argv) > 6 else 0)  # holds Python's lock
    sys.stdin.read()
"""


@contextmanager
def holder(directory, *words, period=10.0, patience=45.0):
    """A process that wants the directory; its first word is `taken` or `refused`."""
    command = [sys.executable, "-c", HOLDER, str(directory), str(period), str(patience), *map(str, words)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def marks(directory):
    return sorted(path.name for path in directory.iterdir())


def take(directory):
    mark = OwnerMark(directory)
    assert mark.try_to_take()
    return mark


def test_a_rank_waits_for_the_end_of_the_lost_owner(tmp_path):
    """Rank 0 was lost, and its process is stopped: it lives until the launcher ends it."""
    with holder(tmp_path) as owner:
        assert owner.stdout.readline() == "taken\n"
        owner.send_signal(signal.SIGSTOP)
        end = threading.Timer(0.5, owner.kill)
        end.start()
        writer = CheckpointWriter(tmp_path)
        writer.own()
        assert not end.is_alive() and marks(tmp_path) == [".owner_2"]
        writer.close()
    assert marks(tmp_path) == []


def test_a_live_owner_keeps_its_directory(tmp_path):
    """The refusal says who it is, since when, and what to do; once the owner has gone in order nothing is left."""
    with holder(tmp_path) as owner:
        assert owner.stdout.readline() == "taken\n"
        with pytest.raises(CheckpointError) as refusal:
            OwnerMark(tmp_path).try_to_take()
        for words in (f"--save {tmp_path} is in use", f"process {owner.pid} on ", "since 20", "wait for that to end"):
            assert words in str(refusal.value)
        owner.stdin.close()
        assert owner.wait() == 0 and marks(tmp_path) == []
    take(tmp_path).release()
    assert marks(tmp_path) == []


def test_a_killed_owner_of_this_machine_is_followed_at_once(tmp_path):
    """Also while its parent has not yet noticed, and where its process id belongs to another process by now."""
    with holder(tmp_path) as owner:
        assert owner.stdout.readline() == "taken\n"
        owner.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        mark = take(tmp_path)  # of a zombie
        assert marks(tmp_path) == [".owner_2"]
        mark.release()
    with holder(tmp_path) as owner:
        assert owner.stdout.readline() == "taken\n"
        path = tmp_path / ".owner_1"
        path.write_text(json.dumps({**json.loads(path.read_text()), "started": 1}))
        take(tmp_path).release()


def test_only_one_of_many_takes_over(tmp_path):
    """Processes that find the same dead owner at the same moment: one gets the directory, the others learn whose it
    is."""
    for _ in range(2):
        with holder(tmp_path) as owner:
            assert owner.stdout.readline() == "taken\n"
            owner.kill()
        moment = time.time() + 1.5
        machine = ownership._machine()
        takers = [holder(tmp_path, machine, moment) for _ in range(6)]
        processes = [taker.__enter__() for taker in takers]
        words = [process.stdout.readline().split() for process in processes]
        winners = [process for process, (verdict, *_) in zip(processes, words, strict=True) if verdict == "taken"]
        assert len(winners) == 1, words
        assert all(str(winners[0].pid) in text for text in words if text[0] == "refused")
        assert len(marks(tmp_path)) == 1
        for taker in takers:
            taker.__exit__(None, None, None)


def test_another_rank_takes_over_from_one_that_is_taken_for_lost(tmp_path, monkeypatch):
    """Where rank 0 is lost, it may be a stopped process that the launcher ends a moment later: the next rank 0 waits
    for that. What it owns stays its own, until it closes its writer. One that lives on is not robbed."""
    monkeypatch.setattr(writer, "OWNER_PATIENCE", 1.0)
    with holder(tmp_path) as owner:
        assert owner.stdout.readline() == "taken\n"
        with pytest.raises(CheckpointError, match=f"is in use by another job .process {owner.pid} on"):
            writer.CheckpointWriter(tmp_path).own()
        monkeypatch.setattr(writer, "OWNER_PATIENCE", 60.0)
        owner.send_signal(signal.SIGSTOP)
        launcher = threading.Timer(1.0, owner.kill)
        launcher.start()
        saves = writer.CheckpointWriter(tmp_path)
        saves.own()
        launcher.join()
    assert marks(tmp_path) == [".owner_2"]
    saves.own()
    assert marks(tmp_path) == [".owner_2"]
    saves.close()
    assert marks(tmp_path) == []


def test_a_live_owner_elsewhere_is_seen_by_its_signs(tmp_path):
    """Its process cannot be looked up; the mark in which it counts tells."""
    with holder(tmp_path, "elsewhere", period=0.2) as owner, mock.patch.object(ownership, "PATIENCE", 30.0):
        assert owner.stdout.readline() == "taken\n"
        mark, deadline = OwnerMark(tmp_path), time.monotonic() + 20
        with pytest.raises(CheckpointError, match=f"is in use by another job .process {owner.pid} on"):
            while time.monotonic() < deadline:
                assert not mark.try_to_take()
                time.sleep(0.05)


def test_an_owner_whose_threads_are_held_up_is_alive(tmp_path):
    """C code that holds Python's lock for longer than the patience silences all threads of the process."""
    with holder(tmp_path, "elsewhere", 0, 8, period=0.2) as owner, mock.patch.object(ownership, "PATIENCE", 3.0):
        assert owner.stdout.readline() == "taken\n"
        mark = OwnerMark(tmp_path)
        with pytest.raises(CheckpointError, match="is in use by another job"):
            while not mark.try_to_take():
                time.sleep(0.05)


def test_a_sign_of_life_needs_no_time_of_a_file(tmp_path):
    """Some file systems keep none; the count in the mark tells, and so does the time where nobody may read."""
    mark, owner = OwnerMark(tmp_path), replace(Owner.this_process(), machine="elsewhere")
    for after in ((5, "1"), (6, "0")):
        mark._watched = None
        assert not mark._is_dead(_Sight(1, owner, (5, "0")))
        assert not mark._is_dead(_Sight(1, owner, (5, "0")))
        with pytest.raises(CheckpointError, match="in use"):
            mark._is_dead(_Sight(1, owner, after))


def test_a_mark_that_may_not_be_read_has_an_unknown_owner(tmp_path):
    """Another user's: it is watched by its time. Own marks are readable for all, whatever the umask."""
    before = os.umask(0o077)
    try:
        mark = take(tmp_path)
    finally:
        os.umask(before)
    path = tmp_path / ".owner_1"
    assert path.stat().st_mode & 0o777 == 0o644
    other = OwnerMark(tmp_path)
    with mock.patch.object(ownership, "open", create=True, side_effect=PermissionError(13, "Permission denied")):
        assert not other.try_to_take()
        os.utime(path, ns=(1, 1))
        with pytest.raises(CheckpointError, match=r"in use by another job \(which does not say its name\)"):
            other.try_to_take()
    mark.release()
    with (
        mock.patch.object(os, "fsync", side_effect=PermissionError(13, "Permission denied")),
        pytest.raises(CheckpointError, match="Permission denied; name a directory where files can be made and removed"),
    ):
        other.try_to_take()


@pytest.mark.parametrize("text", [None, "", '{"host": 3}'], ids=["whole", "empty", "of another kind"])
def test_a_dead_owner_elsewhere_is_followed_after_a_while(tmp_path, text):
    """Also one whose mark cannot be read, and whatever the file's time is by this host's clock."""
    with holder(tmp_path, "elsewhere") as owner:
        assert owner.stdout.readline() == "taken\n"
        owner.kill()
    path = tmp_path / ".owner_1"
    if text is not None:
        path.write_text(text)
    os.utime(path, (time.time() + 1e5, time.time() + 1e5))
    with mock.patch.object(ownership, "PATIENCE", 0.5):
        mark, start = OwnerMark(tmp_path), time.monotonic()
        while not mark.try_to_take():
            assert time.monotonic() < start + 20
            time.sleep(0.05)
    assert time.monotonic() - start >= 0.5
    assert marks(tmp_path) == [".owner_2"]
    mark.release()


def test_an_owner_that_was_taken_for_dead_learns_it(tmp_path):
    """It was stopped for longer than the patience; its mark counts no more, and releasing it takes nothing away."""
    first = take(tmp_path)
    first.require()
    elsewhere = {"process": 7, "machine": "elsewhere", "host": "other", "token": "0"}
    said = {**json.loads((tmp_path / ".owner_1").read_text()), **elsewhere}
    (tmp_path / ".owner_2").write_text(json.dumps(said))
    with (
        mock.patch.object(ownership, "BETWEEN_LOOKS", 0.0),
        pytest.raises(CheckpointError, match=r"another job .process 7 on other, since .* has taken the directory over"),
    ):
        first.require()
    (tmp_path / ".owner_1").unlink()
    first.release()
    assert marks(tmp_path) == [".owner_2"]


def test_a_mark_that_appears_meanwhile_is_judged_too(tmp_path):
    """Between a taker's look and its own mark another job may come, under a lower number."""
    with holder(tmp_path) as owner:
        assert owner.stdout.readline() == "taken\n"
        late = OwnerMark(tmp_path)
        with mock.patch.object(late, "_is_dead", lambda mark: True):  # it saw the mark of somebody who died
            seen = late._marks
            answers = [[_Sight(4, None, ())]]
            with mock.patch.object(late, "_marks", lambda: answers.pop() if answers else seen()):
                assert not late.try_to_take()
        assert marks(tmp_path) == [".owner_1"]
        with pytest.raises(CheckpointError, match="in use"):
            late.try_to_take()


def test_the_mark_on_a_full_disk_is_not_half_written(tmp_path):
    full = mock.patch.object(os, "fsync", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(CheckpointError, match="takes no mark of its owner: No space left on device; free some"):
        OwnerMark(tmp_path).try_to_take()
    assert marks(tmp_path) == []


def test_a_job_whose_mark_was_removed_makes_another(tmp_path, caplog):
    """Somebody tidied hidden files; a healthy job goes on, with a warning, and keeps the next one out."""
    mark = take(tmp_path)
    (tmp_path / ".owner_1").unlink()
    mark.require()
    assert "somebody removed the mark of this job" in caplog.text and marks(tmp_path) == [".owner_1"]
    mark.require()
    assert len(caplog.records) == 1
    with holder(tmp_path) as other:
        assert other.stdout.readline().startswith("refused")
    mark.release()
    assert marks(tmp_path) == []


def test_a_taker_that_gives_up_ends_nobody(tmp_path):
    """It came too late, and its mark lies beside the one that counts for a moment: a save looks again."""
    mark = take(tmp_path)
    seen, late = mark._marks, _Sight(2, replace(Owner.this_process(), machine="elsewhere"), ())
    answers = [[late], [*mark._marks(), late]]
    with (
        mock.patch.object(ownership, "BETWEEN_LOOKS", 0.0),
        mock.patch.object(mark, "_marks", lambda: answers.pop() if answers else seen()),
    ):
        mark.require()
    assert answers == []
    mark.release()


def test_what_this_process_left_is_not_in_its_way(tmp_path):
    """It takes the directory again; what it releases is its own mark, not one that another made under that number."""
    first, second = take(tmp_path), take(tmp_path)
    assert marks(tmp_path) == [".owner_2"]
    second.require()
    first.release()
    assert marks(tmp_path) == [".owner_2"]
    path = tmp_path / ".owner_2"
    path.write_text(json.dumps({**json.loads(path.read_text()), "token": "another"}))
    second.release()
    assert marks(tmp_path) == [".owner_2"]


def test_a_fork_releases_nothing(tmp_path):
    """Such as a worker that reads data and ends."""
    mark = take(tmp_path)
    process = os.fork()
    if process == 0:
        ownership.release_all()
        os._exit(0)
    os.waitpid(process, 0)
    assert marks(tmp_path) == [".owner_1"]
    mark.require()
    mark.release()
    assert marks(tmp_path) == []
