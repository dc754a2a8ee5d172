"""What is read ahead is there when it is asked for, and never more than allowed; a writer tells what went wrong."""

import threading
import time
from concurrent.futures import wait

import pytest
import torch

from megatron.elastic.cache.background import Window, Writer
from tests.elastic.cache.cases import DEEPER, GENERATION

KEYS = [bytes([number]) for number in range(100)]


class Source:
    """Values of keys below 50, read when allowed; of key 40 and more at the other depth."""

    def __init__(self):
        self.asked, self.go = [], threading.Event()
        self.go.set()

    def __call__(self, keys):
        self.asked += keys
        assert self.go.wait(10.0)
        return {key: (DEEPER if key[0] >= 40 else GENERATION, torch.tensor(key[0])) for key in keys if key[0] < 50}


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def window(source):
    before = threading.active_count()
    window = Window(source, 10)
    yield window
    source.go.set()
    window.close()
    assert threading.active_count() == before


def settled(window):
    """The keys of which values are held."""
    wait(window._readings.values())
    return {key for reading in window._readings.values() for key in reading.result()}


def take(window, number, generation=GENERATION):
    return window.take(generation, KEYS[number])


def test_what_was_read_is_taken_once(window, source):
    window.request([KEYS[1], KEYS[2], KEYS[60]])
    assert settled(window) == {KEYS[1], KEYS[2]}
    assert take(window, 1) == 1 and take(window, 1) is None
    assert take(window, 60) is None
    window.request([KEYS[2]])
    settled(window)
    assert source.asked == [KEYS[1], KEYS[2], KEYS[60]]  # what is held is not read again


def test_each_depth_has_its_values(window):
    """A value stays until its own generation is asked for."""
    window.request([KEYS[3], KEYS[45]])
    assert take(window, 45) is None and take(window, 3, DEEPER) is None
    assert take(window, 45, DEEPER) == 45 and take(window, 3) == 3
    assert settled(window) == set()


def test_never_more_than_allowed(window, source):
    """The first of one request is kept, the last of several."""
    window.request(KEYS[:30])
    assert settled(window) == set(KEYS[:10])
    window.request(KEYS[30:34])
    assert settled(window) == {*KEYS[4:10], *KEYS[30:34]}
    source.go.clear()
    for first in range(0, 50, 5):
        window.request(KEYS[first : first + 5])
        assert len(window._readings) <= 10
    source.go.set()
    assert len(settled(window)) <= 10


def test_who_asks_waits_for_what_is_being_read(window, source):
    """And takes back what is not begun, since reading it is then quicker."""
    source.go.clear()
    window.request(KEYS[:9])  # 8 at once
    while not source.asked:
        time.sleep(0.001)
    assert take(window, 8) is None and KEYS[8] not in window._readings
    threading.Timer(0.1, source.go.set).start()
    assert take(window, 3) == 3


def test_clear(window, source):
    source.go.clear()
    window.request(KEYS[:9])
    while not source.asked:
        time.sleep(0.001)
    threading.Timer(0.1, source.go.set).start()
    window.clear()
    assert source.go.is_set() and not window._readings
    assert all(take(window, number) is None for number in range(9))


def test_what_reading_raises_is_raised():
    def fail(keys):
        raise KeyError(keys[0])

    window = Window(fail, 10)
    window.request(KEYS[:1])
    with pytest.raises(KeyError):
        take(window, 0)
    window.close()


def test_what_a_writers_call_raises_is_raised():
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
