"""The notice board over stores that fail and stores that fall silent."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import HashStore

from megatron.pipeline.runtime.failure import failure_board
from megatron.pipeline.runtime.failure.failure_board import FailureBoard


class CutOff:
    """A store whose answers can be held back, as by a network that is down, or replaced by an error."""

    def __init__(self):
        self.store, self.connected, self.error = HashStore(), threading.Event(), None
        self.connected.set()

    def __getattr__(self, name):
        if name == "clone":
            raise AttributeError(name)

        def ask(*arguments):
            self.connected.wait()
            if self.error is not None:
                raise self.error
            return getattr(self.store, name)(*arguments)

        return ask


@pytest.fixture
def store():
    return CutOff()


@pytest.fixture
def board(store, monkeypatch):
    monkeypatch.setattr(failure_board, "PATIENCE", 0.2)
    board = FailureBoard(store, scope="test", host="here")
    yield board
    store.connected.set()
    board.close()


@pytest.mark.alone
def test_nobody_waits_for_a_silent_store(store, board):
    """The first question waits for its patience, those after it not at all; the answers are what is known without."""
    store.connected.clear()
    start = time.monotonic()
    assert board.tell("the disk is on fire") == "the disk is on fire"
    assert board.silent_seconds >= 0.2
    asked = time.monotonic()
    assert asked - start < 5
    assert board.story() is None and board.count("read", 1) == 0 and board.doing(3) == ("rank 3", "", None)
    assert time.monotonic() - asked < 0.2
    assert not board.is_lost, "it may answer again"


def test_a_store_that_answers_again_is_asked_again(store, board):
    """What was told meanwhile arrives, and the silence is over."""
    store.connected.clear()
    board.tell("first")
    store.connected.set()
    deadline = time.monotonic() + 10
    while board.silent_seconds and time.monotonic() < deadline:
        time.sleep(0.01)
    assert board.silent_seconds == 0
    assert board.tell("second") == "first" and board.story() == "first"


def test_a_store_that_fails_is_lost(store, board):
    """An error is final: the host of the store is gone, and nothing is asked again."""
    store.error = RuntimeError("connection reset by peer")
    assert board.story() is None and board.is_lost
    store.error = None
    assert board.count("read", 1) == 0


def test_ranks_that_fall_silent_are_named_by_host(store, board):
    """One of three ranks goes on telling, one has stopped, and one has never told anything."""
    talking, quiet = (FailureBoard(store, scope="test", host=host) for host in ("host0", "host1"))
    talking.set_doing(0, "rank 0", "0F0", None)
    quiet.set_doing(1, "rank 1", "1F0", 0)
    stop = threading.Event()

    def talk():
        while not stop.wait(0.02):
            talking.set_doing(0, "rank 0", "0F0", None)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        assert board.unheard(range(3), 0.5) == {"host1": [1]}
    finally:
        stop.set()
        thread.join()
        talking.close()
        quiet.close()
