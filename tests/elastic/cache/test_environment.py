"""One environment for each folder and process, before and behind a fork."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron.elastic.cache import environment as room
from tests.elastic.cache.children import call, result, start

pytest.importorskip("lmdb")
FILE = Path(room.__file__)


class Lock:
    """What is held with an environment."""

    abandoned = False

    def abandon(self):
        self.abandoned = True


def opened(path):
    return room.share(path, lambda: room.Environment(path, 1 << 30, Lock()))


def given_back(environment):
    room.give_back(environment, lambda each: each.close())


def put(environment, key, value):
    with environment.writing() as transaction:
        transaction.put(key, value)


def get(environment, key):
    with environment.reading() as transaction:
        found = transaction.get(key)
        return None if found is None else bytes(found)


def test_without_lmdb():
    """In an interpreter that sees no installed package."""
    code = f"import runpy; runpy.run_path({str(FILE)!r})['require_lmdb']()"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == (
        "ValueError: the activation cache needs the package lmdb, which is not installed; pip install .[lmdb], or "
        "leave the cache off"
    )
    room.require_lmdb()


def test_one_for_all_in_a_process(tmp_path):
    """The same files under another name too; closed when the last has given it back, and opened anew then."""
    path, link = tmp_path / "a", tmp_path / "link"
    first = opened(path)
    link.symlink_to(path)
    second = opened(link)
    assert second is first
    put(first, b"k", b"v")
    given_back(second)
    assert get(first, b"k") == b"v"
    given_back(first)
    third = opened(path)
    assert third is not first and get(third, b"k") == b"v"
    given_back(third)
    assert not room._open


def in_child(environment, path, folders):
    """A forked process has nothing open, may open all, and others see what it writes."""
    assert not room._open and environment.held.abandoned
    own = opened(path)
    value = get(own, b"k")
    put(own, b"k", b"child's")
    given_back(own)
    return value, len(os.listdir("/proc/self/fd")) <= folders + 1  # its pipe


def test_fork(tmp_path):
    """The parent goes on with what it has."""
    folders = len(os.listdir("/proc/self/fd"))
    environment = opened(tmp_path)
    put(environment, b"k", b"parent's")
    assert call(in_child, environment, tmp_path, folders) == (b"parent's", True)
    assert get(environment, b"k") == b"child's" and not environment.held.abandoned
    put(environment, b"k", b"parent's again")
    assert get(environment, b"k") == b"parent's again"
    given_back(environment)


def test_forks_while_threads_are_at_work(tmp_path):
    """Each child opens the files, and threads go on behind each fork."""
    environment = opened(tmp_path)
    end, counts, errors = threading.Event(), [0, 0], []

    def work(index, act):
        try:
            while not end.is_set():
                act()
                counts[index] += 1
                time.sleep(0.0005)  # else a slow reader would have them fill the disk
        except Exception as error:
            errors.append(error)
            raise

    threads = [
        threading.Thread(target=work, args=(0, lambda: put(environment, b"k", os.urandom(20_000))), daemon=True),
        threading.Thread(target=work, args=(1, lambda: get(environment, b"k")), daemon=True),
    ]
    try:
        for thread in threads:
            thread.start()
        while not all(counts):
            time.sleep(0.001)
        for _ in range(10):
            before = list(counts)
            assert len(call(read_in_child, tmp_path)) == 20_000
            end_of_wait = time.monotonic() + 20
            while any(now <= then for now, then in zip(counts, before, strict=True)):
                assert not errors and time.monotonic() < end_of_wait
                time.sleep(0.001)
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert not errors
    given_back(environment)


def read_in_child(path):
    own = opened(path)
    value = get(own, b"k")
    given_back(own)
    return value


def refused_in_child(path):
    import lmdb

    with pytest.raises(lmdb.Error, match="already open"):
        opened(path)


def test_a_fork_does_not_wait_for_ever(tmp_path, monkeypatch):
    """A thread is inside for longer than it waits: the child cannot have the files, and says so; the parent can."""
    monkeypatch.setattr(room, "FORK_PATIENCE", 0.1)
    environment = opened(tmp_path)
    inside, end = threading.Event(), threading.Event()

    def write():
        with environment.writing():
            inside.set()
            end.wait(20)

    thread = threading.Thread(target=write)
    thread.start()
    inside.wait()
    child = start(refused_in_child, tmp_path)
    end.set()
    result(*child)
    thread.join()
    put(environment, b"k", b"v")
    given_back(environment)
