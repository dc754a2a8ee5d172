"""Items that several processes compute: the same results in the same order, and nobody waits for one that is gone."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from megatron.processes import map_forked, num_processors

TABLE = {}  # what a new process would not have


def look_up(key: int) -> tuple[int, int]:
    return os.getpid(), TABLE[key]


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setitem(globals(), "TABLE", {key: 10 * key for key in range(40)})
    return TABLE


def test_results_stand_in_the_order_of_the_items(table):
    for num_processes in (1, 2, 3):
        found = map_forked(look_up, list(table), num_processes)
        assert [value for _, value in found] == list(table.values())


def test_a_copy_takes_what_this_process_has_no_time_for(table):
    """This one is held up at its first item until the other has taken one."""
    reads, writes = os.pipe()
    here = os.getpid()

    def function(key: int) -> tuple[int, int]:
        if os.getpid() == here:
            assert os.read(reads, 1)
            os.write(writes, b"1")  # for the next one
        else:
            os.write(writes, b"1")
        return look_up(key)

    taken = []
    found = map_forked(function, list(table), 2, taken=taken.append)
    assert {pid for pid, _ in found} - {here}
    assert [value for _, value in found] == list(table.values())
    assert len(taken) == [pid for pid, _ in found].count(here)
    os.close(reads)
    os.close(writes)


def test_one_process_or_one_item_forks_nothing(table):
    assert {pid for pid, _ in map_forked(look_up, list(table), 1)} == {os.getpid()}
    assert map_forked(look_up, [3], 8) == [(os.getpid(), 30)]
    assert map_forked(look_up, [], 8) == []


@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_error_is_raised_here(num_processes):
    def refuse(item: int) -> int:
        raise ValueError(f"{item} is refused")

    with pytest.raises(ValueError, match="is refused"):
        map_forked(refuse, [1, 2, 3], num_processes)


def test_a_copy_that_is_killed_is_noticed():
    here = os.getpid()
    reads, writes = os.pipe()

    def die(item: int) -> int:
        if os.getpid() == here:
            os.read(reads, 1)
            return item
        os.write(writes, b"11")
        os.kill(os.getpid(), signal.SIGKILL)
        return item

    with pytest.raises(ValueError, match="ended with status -9, maybe for want of main memory; free some"):
        map_forked(die, [1, 2], 2)
    os.close(reads)
    os.close(writes)


def test_processors_are_those_of_this_process():
    assert num_processors() == len(os.sched_getaffinity(0)) >= 1


def test_a_copy_ends_with_the_process_that_made_it():
    """Killed, it can end nobody."""
    program = (
        "import os, time\n"
        "from megatron.processes import map_forked\n"
        "here = os.getpid()\n"
        "def wait(_):\n"
        "    if os.getpid() != here:\n"
        "        print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "map_forked(wait, [1, 2], 2)\n"
    )
    first = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    copy = psutil.Process(int(first.stdout.readline()))
    first.kill()
    first.wait()
    deadline = time.monotonic() + 20
    while copy.is_running() and copy.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not copy.is_running() or copy.status() == psutil.STATUS_ZOMBIE
    first.stdout.close()


def test_where_copies_cannot_work_this_process_computes_all(table, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert {pid for pid, _ in map_forked(look_up, list(table), 2)} == {os.getpid()}


def test_a_process_of_a_pool_computes_all(table):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        found = pool.apply(map_forked, (look_up, list(table), 2))
    assert [value for _, value in found] == list(table.values())
    assert len({pid for pid, _ in found}) == 1


def test_what_no_process_can_be_made_for_is_computed_here(table, monkeypatch):
    starts, given = [], multiprocessing.context.ForkProcess.start

    def start(self):
        starts.append(self)
        if len(starts) > 1:
            raise BlockingIOError("no process is left")
        given(self)

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", start)
    found = map_forked(look_up, list(table), 4)
    assert len(starts) == 2
    assert [value for _, value in found] == list(table.values())


def test_results_from_a_thread(table):
    found = []
    thread = threading.Thread(target=lambda: found.extend(map_forked(look_up, list(table), 3)))
    thread.start()
    thread.join()
    assert [value for _, value in found] == list(table.values())


def test_an_error_of_a_copy_says_where_it_was():
    here = os.getpid()
    reads, writes = os.pipe()

    def refuse(item: int) -> int:
        if os.getpid() == here:
            os.read(reads, 1)
            return item
        os.write(writes, b"11")
        raise KeyError(item)

    with pytest.raises(KeyError) as caught:
        map_forked(refuse, [1, 2], 2)
    assert "in refuse" in str(caught.value.__cause__)
    os.close(reads)
    os.close(writes)
