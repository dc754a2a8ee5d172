"""The limit, full disks, and what is deleted when, with values of 32 KiB."""

import logging
import os
import signal
import subprocess
import time
from dataclasses import replace

import pytest

from megatron.elastic.cache import store
from tests.elastic.cache.cases import LARGE, open_cache, outputs, same
from tests.elastic.cache.children import call, result, start
from tests.full_disk import largest_file

LIMIT = 2 << 20
ROOM = 63  # one slot stays free, so that older values need not make way before newer ones are there
GENERATIONS = [replace(LARGE, depth=depth, weights=str(depth)) for depth in range(1, 12)]


def put_all(cache, samples):
    for first in range(0, len(samples), 4):
        cache.put(samples[first : first + 4], outputs(samples[first : first + 4], cache.generation))
    cache.flush()


def present(cache, samples):
    """Those that are found, which all are right."""
    found = cache.get(samples)
    here = [sample for sample, tensor in zip(samples, found, strict=True) if tensor is not None]
    assert same([each for each in found if each is not None], outputs(here, cache.generation))
    return here


def file_bytes(folder):
    return sum(path.stat().st_size for path in (folder / "activations").iterdir())


def said(caplog):
    return [record.message for record in caplog.records]


def test_limit(tmp_path, caplog):
    """What fits is written, the rest is not, and is told once; the file stays within."""
    samples = range(80)
    with open_cache(tmp_path, LARGE, LIMIT) as cache:
        put_all(cache, samples)
        here = present(cache, samples)
        assert ROOM - 2 <= len(here) <= ROOM
        assert file_bytes(tmp_path) <= LIMIT
        counts = cache.measured.counts
        assert counts["written"] == len(here) and counts["not_written"] == 80 - len(here)
        assert len(said(caplog)) == 1 and "has come to its limit of 2097152 bytes" in said(caplog)[0]
        put_all(cache, [*range(80, 200)])
        assert present(cache, samples) == here and cache.measured.counts["not_written"] == 200 - len(here)
    with open_cache(tmp_path, LARGE, LIMIT) as cache:
        assert present(cache, samples) == here
    assert len(said(caplog)) == 1


def test_generations_of_nobody_make_way(tmp_path, caplog):
    """Those of jobs that are over do; not before the room is needed."""
    for generation in GENERATIONS[:3]:
        with open_cache(tmp_path, generation, LIMIT) as cache:
            put_all(cache, range(12))
    with open_cache(tmp_path, GENERATIONS[0], LIMIT) as cache:
        assert present(cache, range(12)) == [*range(12)]
        put_all(cache, range(40))
        assert present(cache, range(40)) == [*range(40)]
    for generation in GENERATIONS[1:3]:
        with open_cache(tmp_path, generation, LIMIT) as cache:
            assert present(cache, range(12)) == []
    assert said(caplog) == []
    assert file_bytes(tmp_path) <= LIMIT


def use(folder, generation, go, done):
    """Another job: it writes, waits for a sign, and finds all that it wrote; then writes more."""
    with open_cache(folder, generation, LIMIT) as cache:
        put_all(cache, range(10))
        os.write(done, b"x")
        os.read(go, 1)
        assert present(cache, range(10)) == [*range(10)]
        put_all(cache, range(1000, 1010))
        return len(present(cache, range(1000, 1010)))


def test_two_jobs(tmp_path, caplog):
    """One comes to the limit and takes nothing from the other; room that one gives up the other may use."""
    (waits, go), (done, says) = os.pipe(), os.pipe()
    child = start(use, tmp_path, GENERATIONS[0], waits, says)
    os.read(done, 1)
    with open_cache(tmp_path, GENERATIONS[1], LIMIT) as cache:
        put_all(cache, range(80))
        here = present(cache, range(80))
        assert ROOM - 12 <= len(here) <= ROOM - 10
        cache.deepen(GENERATIONS[2])
        cache.forget_older()
        cache.flush()
        os.write(go, b"x")
        assert result(*child) == 10
        put_all(cache, range(5))
        assert present(cache, range(5)) == [*range(5)]
    assert len(said(caplog)) == 1
    for each in (waits, go, done, says):
        os.close(each)


def deepen(cache, samples, generation, rows=1, *, one_by_one=False):
    """As a training does: read what there is, compute on, write. What was there. `one_by_one`: each is written,
    and what nobody needs is deleted, before the next is read; so the turns of the threads do not decide the size."""
    cache.deepen(generation)
    kept = []
    for first in range(0, len(samples), rows):
        batch = samples[first : first + rows]
        found = cache.get_older(batch)
        here = [sample for sample, tensor in zip(batch, found, strict=True) if tensor is not None]
        assert same([each for each in found if each is not None], outputs(here, cache.older))
        kept += here
        cache.put(batch, outputs(batch, generation))
        if one_by_one:
            cache.flush()
    cache.flush()
    return kept


@pytest.mark.parametrize("rows", [1, 20])
def test_deepening_at_the_limit(rows, tmp_path, caplog):
    """New values take the place of old ones, time and again, though nothing else has room: one by one, and more at
    once than is kept free."""
    samples = range(80)
    with open_cache(tmp_path, GENERATIONS[0], LIMIT) as cache:
        put_all(cache, samples)
        here = present(cache, samples)
        for generation in GENERATIONS[1:6]:
            assert deepen(cache, samples, generation, rows) == here
            assert present(cache, samples) == here
            assert cache.get_older(samples) == [None] * 80
            assert file_bytes(tmp_path) <= LIMIT
    assert len(said(caplog)) == 1


def deepen_until_killed(folder, ready):
    """At the limit, value by value, telling each that is written."""
    with open_cache(folder, GENERATIONS[0], LIMIT, in_background=False) as cache:
        os.write(ready, b"\0\0")
        cache.deepen(GENERATIONS[1])
        for sample in range(80):
            cache.put([sample], outputs([sample], GENERATIONS[1]))
            os.write(ready, bytes([1, sample]))
        time.sleep(60)


@pytest.mark.parametrize("seconds", [0.005, 0.02, 0.05])
def test_a_kill_at_the_limit_loses_nothing(seconds, tmp_path):
    """Each sample that was there is there at the one depth or the other."""
    with open_cache(tmp_path, GENERATIONS[0], LIMIT) as cache:
        put_all(cache, range(80))
        here = present(cache, range(80))
    ready, says = os.pipe()
    child, file = start(deepen_until_killed, tmp_path, says)
    os.close(says)
    os.read(ready, 2)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(file)
    with os.fdopen(ready, "rb") as told:
        assert {*told.read()[1::2]} & {*here} <= {*at_depth(tmp_path, GENERATIONS[1], here)}
    deeper = at_depth(tmp_path, GENERATIONS[1], here)
    assert {*deeper, *at_depth(tmp_path, GENERATIONS[0], here)} == {*here}
    with open_cache(tmp_path, GENERATIONS[1], LIMIT, older=GENERATIONS[0]) as cache:
        put_all(cache, here)
        assert present(cache, here) == here
        assert file_bytes(tmp_path) <= LIMIT


def test_a_value_that_is_there_twice_frees_its_older_slot(tmp_path, monkeypatch):
    """A process that was killed between a value and the deletion of the one before has taken the last slot."""
    with open_cache(tmp_path, GENERATIONS[0], LIMIT) as cache:
        put_all(cache, range(80))
        here = present(cache, range(80))
    append = store.CacheStore._append
    with monkeypatch.context() as patched, open_cache(tmp_path, GENERATIONS[1], LIMIT, older=GENERATIONS[0]) as cache:
        patched.setattr(store.CacheStore, "_append", lambda self, index, entries: append(
            self, index, [each for each in entries if each[1] != store._GONE]
        ))  # fmt: skip
        put_all(cache, here[-1:])
        assert present(cache, here) == here[-1:]
    assert at_depth(tmp_path, GENERATIONS[0], here) == here
    with open_cache(tmp_path, GENERATIONS[1], LIMIT, older=GENERATIONS[0]) as cache:
        put_all(cache, here)
        assert present(cache, here) == here


def at_depth(folder, generation, samples):
    with open_cache(folder, generation, LIMIT) as cache:
        return present(cache, samples)


def test_a_slot_that_is_used_again_is_no_damage(tmp_path):
    """A process that has looked up a value, which then makes way before it is read, misses it and says nothing."""
    with open_cache(tmp_path, GENERATIONS[0], LIMIT) as cache:
        put_all(cache, range(80))
        here = present(cache, range(80))
        assert call(deepen_beside, tmp_path, here) == here
        assert cache.get(here) == [None] * len(here)
        assert cache.measured.counts["damaged"] == 0 and cache._said == {"full"}


def deepen_beside(folder, samples):
    with open_cache(folder, GENERATIONS[0], LIMIT) as cache:
        return deepen(cache, samples, GENERATIONS[1])


def test_space_is_used_again(tmp_path):
    """The file of ten generations is not larger than that of two."""
    samples = range(20)
    with open_cache(tmp_path, GENERATIONS[0], 32 << 20) as cache:
        put_all(cache, samples)
        for generation in GENERATIONS[1:]:
            deepen(cache, samples, generation, one_by_one=True)
        assert present(cache, samples) == [*samples]
        assert file_bytes(tmp_path) < 2.1 * 20 * 32768


def test_older_ones_are_forgotten(tmp_path):
    """Thousands; others stay, and what they leave is used again."""
    small = [replace(each, shape=(4, 4)) for each in GENERATIONS]
    with open_cache(tmp_path, small[0]) as cache:
        put_all(cache, range(1000))
        cache.deepen(small[1])
        put_all(cache, range(3))
        cache.forget_older()
        cache.flush()
        assert cache.older is None and present(cache, range(1000)) == [0, 1, 2]
        num_bytes = file_bytes(tmp_path)
        put_all(cache, range(900))
        assert file_bytes(tmp_path) - num_bytes == 897 * 28  # of the index
    with open_cache(tmp_path, small[0]) as cache:
        assert present(cache, range(1000)) == []


def write_with_file_limit(folder):
    """The system refuses to make a file larger than 1 MiB, as a full disk does."""
    with largest_file(1 << 20), open_cache(folder, LARGE) as cache:
        put_all(cache, range(80))
        here = present(cache, range(80))
        put_all(cache, range(80))
        assert present(cache, range(80)) == here
        return here, cache._said, cache.measured.counts["not_written"]


def test_a_disk_that_takes_no_more(tmp_path):
    """What was written is read, in this process and later; then more is written."""
    here, words, not_written = call(write_with_file_limit, tmp_path)
    assert len(here) == 32 and words == {"disk"} and not_written == 160 - len(here)
    with open_cache(tmp_path, LARGE) as cache:
        assert present(cache, range(80)) == here
        put_all(cache, range(80))
        assert present(cache, range(80)) == [*range(80)]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a tmpfs")
    yield path
    subprocess.run(["umount", str(path)], check=True, timeout=60)


def test_a_full_disk(small_disk, caplog):
    """While writing, when the files are opened again, and where there is nothing yet."""
    with open_cache(small_disk, LARGE) as cache:
        put_all(cache, range(80))
        here = present(cache, range(80))
        assert 60 <= len(here) <= 64
        assert len(said(caplog)) == 1 and "takes no more" in said(caplog)[0]
    with open(small_disk / "filler", "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(512))
    with open_cache(small_disk, LARGE) as cache:
        assert present(cache, range(80)) == here
    caplog.clear()
    with caplog.at_level(logging.WARNING), open_cache(small_disk / "other", LARGE) as cache:
        put_all(cache, range(4))
        assert present(cache, range(4)) == [] and cache.measured.counts["not_written"] == 4
    assert len(said(caplog)) == 1 and "cannot be opened" in said(caplog)[0]
