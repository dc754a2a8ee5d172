"""What threads took of the cores is told by name."""

import threading
import time

import pytest

from benchmarks.common.thread_times import MAIN, ThreadTimes, thread_times


def test_a_thread_that_computes_is_found():
    """CPU seconds go to the thread that took them, and not to the one that waited for it."""
    if not thread_times().ran:
        pytest.skip("the kernel counts no seconds of threads")
    go, done, end = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        go.wait()
        deadline = time.thread_time() + 0.2
        while time.thread_time() < deadline:
            pass
        done.set()
        end.wait()

    thread = threading.Thread(target=work, name="worker that spins")
    thread.start()
    before = thread_times()
    go.set()
    done.wait()
    times = thread_times().since(before, per=2)
    end.set()
    thread.join()
    assert 0.09 <= times.ran["worker that spins"] <= 0.15
    assert times.ran[MAIN] < 0.09


def test_a_new_thread_counts_from_nothing():
    """A thread that was not there before has all its seconds since."""
    times = ThreadTimes({"a": 3.0, "b": 1.0}, {"a": 0.5}).since(ThreadTimes({"a": 1.0}, {"a": 0.25}), per=2)
    assert times == ThreadTimes({"a": 1.0, "b": 0.5}, {"a": 0.125})
