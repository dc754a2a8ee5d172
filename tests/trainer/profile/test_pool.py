"""The pool of processes that measure: jobs beside each other, and one clear end when a process fails."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megatron.trainer.profile.pool import MeasuringError, MeasuringTask, Pool, working_counts


def together(*, store, start):
    """(rank, world size, seconds of the start, process)."""
    start()
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), time.time(), os.getpid()


def refusing(*, store, start, rank):
    start()
    if int(os.environ["RANK"]) == rank:
        raise ValueError("--hidden-size 3 is odd")
    time.sleep(60)


def loading(*, store, start):
    """What a process of a data loader, as training starts them, brings."""
    import torch

    start()
    return [int(each) for each in torch.utils.data.DataLoader(range(3), num_workers=1)]


def dying(*, store, start):
    start()
    os._exit(7)


@pytest.mark.full
def test_jobs_and_failures():
    """Two jobs of one rank and one of two start together in the same processes; an error ends all at once and is told
    in its own words; so is a death."""
    with Pool(2, threads=1) as pool:
        alone = pool.do(MeasuringTask(num_ranks=1, num_jobs=2, run=together))
        pair = pool.do(MeasuringTask(num_ranks=2, num_jobs=1, run=together))
        assert [each[:2] for each in alone] == [(0, 1), (0, 1)] and [each[:2] for each in pair] == [(0, 2), (1, 2)]
        assert abs(alone[0][2] - alone[1][2]) < 5 and [each[3] for each in alone] == [each[3] for each in pair]
        assert pool.do(MeasuringTask(num_ranks=1, num_jobs=2, run=loading)) == [[0, 1, 2]] * 2
        processes = list(pool._processes)
        with pytest.raises(MeasuringError, match=r"process 1: --hidden-size 3 is odd$"):
            pool.do(MeasuringTask(num_ranks=2, num_jobs=1, run=refusing, arguments={"rank": 1}))
    deadline = time.monotonic() + 20
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(process.is_alive() for process in processes)


@pytest.mark.full
def test_a_death_is_told():
    """At work, or while it waits for something to do."""
    with (
        pytest.raises(MeasuringError, match=r"process 0 ended without an error message \(status 7\)"),
        Pool(2, threads=1) as pool,
    ):
        pool.do(MeasuringTask(num_ranks=1, num_jobs=1, run=dying))
    with (
        pytest.raises(MeasuringError, match=r"process 1 ended without an error message \(status -9\)"),
        Pool(2, threads=1) as pool,
    ):
        pool.do(MeasuringTask(num_ranks=1, num_jobs=2, run=together))
        os.kill(pool._processes[1].pid, signal.SIGKILL)
        pool._processes[1].join()
        pool.do(MeasuringTask(num_ranks=1, num_jobs=2, run=together))


def measuring_for_ever():
    """The program of a process that has a pool, and does not end."""
    with Pool(1, threads=1) as pool:
        print(pool.do(MeasuringTask(num_ranks=1, num_jobs=1, run=together))[0][3], flush=True)
        pool.do(MeasuringTask(num_ranks=1, num_jobs=1, run=refusing, arguments={"rank": 1}))


@pytest.mark.full
def test_processes_end_with_a_parent_that_is_killed():
    """Also in the middle of a task."""
    code = "from tests.trainer.profile.test_pool import measuring_for_ever; measuring_for_ever()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("num_ranks", "processes", "shares", "expected"),
    [
        (1, 1, True, [1]),
        (1, 2, True, [1, 2]),
        (2, 2, True, [2]),
        (1, 6, True, [1, 2, 4, 6]),
        (2, 8, True, [2, 4, 8]),
        (3, 8, True, [3, 6]),
        (2, 8, False, [8]),
        (3, 8, False, [6]),
    ],
)
def test_how_many_work_at_once(num_ranks, processes, shares, expected):
    """One job alone, two, four and as many as there is room for; where nothing is shared, all at once."""
    assert list(working_counts(num_ranks, processes, shares_processor=shares)) == expected
