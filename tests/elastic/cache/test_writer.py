"""Calls are made in order on one thread, of which no more than a few wait."""

import threading
import time

import pytest

from megatron.elastic.cache.background import Writer


def test_order_and_end():
    """All calls are made before the end, and the thread is gone then."""
    before = threading.active_count()
    writer, made = Writer(3), []
    for number in range(20):
        assert writer.submit(lambda number=number: made.append(number), 10.0)
    writer.close()
    assert made == list(range(20))
    assert threading.active_count() == before


def test_no_more_than_a_few_wait():
    """One is made, two wait, and the fourth is refused after its patience, and later taken."""
    writer, go = Writer(2), threading.Event()
    for _ in range(3):
        assert writer.submit(go.wait, 0.0)
    begin = time.monotonic()
    assert not writer.submit(go.wait, 0.1)
    assert time.monotonic() - begin >= 0.1
    threading.Timer(0.1, go.set).start()
    writer.flush()
    assert go.is_set() and writer.submit(go.wait, 1.0)
    writer.close()


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
        writer.close()
    assert not writer._thread._threads or not any(each.is_alive() for each in writer._thread._threads)
