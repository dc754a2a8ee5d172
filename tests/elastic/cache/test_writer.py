"""Calls are made in order on one thread, of which no more than a few wait."""

import threading
import time

import pytest

from megatron.elastic.cache.writer import Writer


def test_order_and_end():
    """All calls are made before the end, and the thread is gone then."""
    before = threading.active_count()
    writer, made = Writer(3), []
    for number in range(20):
        assert writer.submit(lambda number=number: made.append(number), 10.0)
    writer.close(10.0)
    assert made == list(range(20))
    assert not writer.is_alive and threading.active_count() == before


def test_no_more_than_a_few_wait():
    """One is made, two wait, and the fourth is refused after its patience, and later taken."""
    writer, go = Writer(2), threading.Event()
    writer.submit(go.wait, 10.0)
    while writer._calls:
        time.sleep(0.001)
    assert writer.submit(go.wait, 0.0) and writer.submit(go.wait, 0.0)
    begin = time.monotonic()
    assert not writer.submit(go.wait, 0.1)
    assert time.monotonic() - begin >= 0.1
    assert not writer.flush(0.05)
    go.set()
    assert writer.flush(10.0)
    assert writer.submit(go.wait, 0.0)
    writer.close(10.0)


def test_chores_have_time():
    """Between their pieces calls are made; flush waits for both; at the end they are left."""
    writer, made, go = Writer(4), [], threading.Event()

    def chore():
        made.append("chore")
        go.wait(10.0)
        return len(made) < 6

    writer.do_in_time(chore)
    while not made:
        time.sleep(0.001)
    writer.submit(lambda: made.append("call"), 1.0)
    go.set()
    writer.flush()
    assert made == ["chore", "call", *["chore"] * 4]
    writer.do_in_time(lambda: True)
    writer.close(10.0)
    assert not writer.is_alive


def test_chores_do_not_wait_for_all_calls():
    """However many calls wait, a piece of a chore is done behind each."""
    writer, made, go = Writer(4), [], threading.Event()
    writer.submit(go.wait, 1.0)
    while writer._calls:
        time.sleep(0.001)
    pieces = iter([True, True, False])
    writer.do_in_time(lambda: made.append("chore") or next(pieces))
    for _ in range(4):
        writer.submit(lambda: made.append("call"), 1.0)
    go.set()
    assert writer.flush(10.0)
    writer.close(10.0)
    assert made == ["chore", "call", "chore", "call", "chore", "call", "call"]


def test_what_a_call_raises_is_raised():
    """Once, to who comes next; later calls are made all the same."""
    writer, made, go = Writer(2), [], threading.Event()
    writer.submit(lambda: go.wait() / 0, 1.0)
    writer.submit(lambda: made.append(1), 1.0)
    go.set()
    with pytest.raises(ZeroDivisionError):
        writer.flush()
    writer.flush()
    assert made == [1]
    writer.submit(lambda: 1 / 0, 1.0)
    with pytest.raises(ZeroDivisionError):
        writer.close(10.0)
    assert not writer.is_alive
