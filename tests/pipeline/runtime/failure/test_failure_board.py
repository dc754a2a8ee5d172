"""The notice board over stores that fail and stores that fall silent."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import HashStore

from megatron.pipeline.runtime.failure import failure_board
from megatron.pipeline.runtime.failure.failure_board import FailureBoard, silenced, without_frames


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
    monkeypatch.setattr(failure_board, "ANSWER_PATIENCE", 0.2)
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


ERROR = """\
torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed.
Exception raised from recvBytes at /torch/csrc/distributed/c10d/Utils.hpp:784 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f58fa155b in libc10.so)
frame #1: <unknown function> + 0x6748693 (0x7f58ea348693 in libtorch_cpu.so)
<omitting python frames>
frame #19: <unknown function> + 0x891f5 (0x7f58faaa71f5 in libc.so.6)

raised in instruction 1F8@1 on rank 1 (stage 1)
"""


def test_frames_are_cut_out():
    text = without_frames(ERROR)
    first, last = ERROR.splitlines()[0], ERROR.splitlines()[-1]
    assert text == f"{first}\n\n{last}\n"
    assert without_frames("frame #2 of the film is dark") == "frame #2 of the film is dark"


def test_the_threshold_of_warnings_comes_back(monkeypatch):
    """It is torch's own, and stays where its variable says what it is to be."""
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    threshold = failure_board._threshold()
    before = threshold.value
    with silenced():
        assert threshold.value == 2 > before
    assert threshold.value == before
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "WARNING")
    with silenced():
        assert threshold.value == before
