"""The worker pools themselves: results, tracebacks, death, hangs, and that no process is left."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests import workers


def add_ranks(*, offset):
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.getpid(), torch.get_num_threads()


def draw():
    return torch.rand(2)


def set_variable():
    before, os.environ["SET_BY_A_CASE"] = os.environ.get("SET_BY_A_CASE"), "1"
    return before


def raise_on(*, rank):
    if dist.get_rank() == rank:
        raise LookupError(f"no such thing on {rank}")
    dist.barrier()


def die_on(*, rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(*, rank, pid_directory):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    for pid in (os.getpid(), child.pid):
        open(os.path.join(pid_directory, str(pid)), "w").close()
    if dist.get_rank() == rank:
        sleep_forever()
    dist.barrier()


def sleep_forever():
    time.sleep(600)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_every_rank_answers_and_the_pool_is_kept():
    """Results come in rank order from ranks of one group, one thread each; a second case meets the same processes."""
    first = workers.run(2, "tests.test_workers:add_ranks", offset=1)
    second = workers.run(2, "tests.test_workers:add_ranks", offset=2)
    assert [result[:2] for result in first] == [(0, 3.0), (1, 3.0)]
    assert [result[:2] for result in second] == [(0, 5.0), (1, 5.0)]
    assert [result[2] for result in first] == [result[2] for result in second]
    assert all(result[3] == 1 for result in first)


def test_every_case_starts_with_the_same_seed():
    """A case draws the same numbers whatever ran before it, and tensors come back by value."""
    first = workers.run(2, "tests.test_workers:draw")
    second = workers.run(2, "tests.test_workers:draw")
    assert torch.equal(first[0], second[1])


def test_every_case_has_an_environment_of_its_own():
    assert [workers.run(1, "tests.test_workers:set_variable") for _ in range(2)] == [[None], [None]]


def test_a_raising_rank_is_named_and_the_next_test_works():
    """The traceback of the failing rank reaches the test while the others wait in a collective."""
    with pytest.raises(workers.WorkerError, match=r"rank 1: (?s:.*)LookupError: no such thing on 1"):
        workers.run(2, "tests.test_workers:raise_on", rank=1)
    assert workers.run(2, "tests.test_workers:add_ranks", offset=1)[0][1] == 3.0


def test_a_dead_rank_fails_the_test_at_once():
    """A killed worker is reported with its signal within seconds, not after the timeout."""
    start = time.monotonic()
    with pytest.raises(workers.WorkerError, match="rank 0: died with exit code -9"):
        workers.run(2, "tests.test_workers:die_on", rank=0)
    assert time.monotonic() - start < 60


def test_a_hanging_rank_is_shown_and_removed(tmp_path):
    """After the timeout the message shows where the rank hangs, and neither workers nor their children are left."""
    with pytest.raises(workers.WorkerError, match=r"rank 0: hung(?s:.*)sleep_forever"):
        workers.run(2, "tests.test_workers:hang_on", timeout=2, rank=0, pid_directory=str(tmp_path))
    pids = [int(name) for name in os.listdir(tmp_path)]
    assert len(pids) == 4
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def test_the_number_of_workers_is_bounded(monkeypatch):
    """A world size that would exceed the bound (8, here 3) closes the pool that was used longest ago."""
    workers.close_all()
    with pytest.raises(ValueError, match="1 to 8 processes"):
        workers.run(9, "tests.test_workers:add_ranks", offset=0)
    monkeypatch.setattr(workers, "MAX_PROCESSES", 3)
    old = [result[2] for result in workers.run(2, "tests.test_workers:add_ranks", offset=0)]
    workers.run(3, "tests.test_workers:add_ranks", offset=0)
    assert not any(map(is_running, old))


def test_workers_leave_with_the_process_that_started_them(tmp_path):
    """A pytest that is killed leaves no worker behind."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal\n"
        "from tests import workers\n"
        "if __name__ == '__main__':\n"
        "    print(*[r[2] for r in workers.run(2, 'tests.test_workers:add_ranks', offset=0)], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    output = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    pids = [int(word) for word in output.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))
