"""What is read ahead is there when it is asked for, and never more than allowed."""

import threading
import time

import pytest
import torch

from megatron.elastic.cache.window import Window

KEYS = [bytes([number]) for number in range(100)]


class Source:
    """Values of keys below 50, read when allowed."""

    def __init__(self):
        self.asked, self.go = [], threading.Event()
        self.go.set()

    def __call__(self, keys):
        self.asked += keys
        assert self.go.wait(10.0)
        return {key: torch.tensor(key[0]) for key in keys if key[0] < 50}


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def window(source):
    before = threading.active_count()
    window = Window(source, 10)
    yield window
    source.go.set()
    window.close(10.0)
    assert not window.is_alive and threading.active_count() == before


def settled(window):
    while window._wanted or window._reading:
        time.sleep(0.001)
    return window._held


def test_what_was_read_is_taken_once(window, source):
    window.request([KEYS[1], KEYS[2], KEYS[60]])
    assert set(settled(window)) == {KEYS[1], KEYS[2]}
    assert window.take(KEYS[1]) == 1 and window.take(KEYS[1]) is None
    assert window.take(KEYS[60]) is None
    window.request([KEYS[2]])
    settled(window)
    assert source.asked == [KEYS[1], KEYS[2], KEYS[60]]  # what is held is not read again


def test_never_more_than_allowed(window, source):
    """The first of one request is kept, the last of several."""
    window.request(KEYS[:30])
    assert set(settled(window)) == set(KEYS[:10])
    window.request(KEYS[30:34])
    assert set(settled(window)) == {*KEYS[4:10], *KEYS[30:34]}
    source.go.clear()
    for first in range(0, 50, 5):
        window.request(KEYS[first : first + 5])
        with window._changed:
            assert len(window._held) + len(window._reading) + len(window._wanted) <= 10
    source.go.set()
    assert len(settled(window)) <= 10


def test_who_asks_waits_for_what_is_being_read(window, source):
    """And takes back what is not begun, since reading it is then quicker."""
    source.go.clear()
    window.request(KEYS[:9])  # 8 at once
    while not source.asked:
        time.sleep(0.001)
    assert window.take(KEYS[8]) is None and not window._wanted
    threading.Timer(0.1, source.go.set).start()
    assert window.take(KEYS[3]) == 3


def test_clear(window, source):
    source.go.clear()
    window.request(KEYS[:9])
    while not source.asked:
        time.sleep(0.001)
    threading.Timer(0.1, source.go.set).start()
    window.clear()
    assert not window._held and not window._wanted
    assert all(window.take(key) is None for key in KEYS[:9])


def test_what_reading_raises_is_raised():
    def fail(keys):
        raise KeyError(keys[0])

    window = Window(fail, 10)
    window.request(KEYS[:1])
    settled(window)
    with pytest.raises(KeyError):
        window.take(KEYS[0])
    assert window.take(KEYS[0]) is None
    window.close(10.0)
