"""`Lanes`: words in the background, each when what it waits for is complete."""

import threading
import time

import pytest
import torch

from megatron.backend.streams import SIDES, CpuStreams
from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.program.lane_order import LaneOrder
from megatron.pipeline.runtime.contract.trace import BatchExtent, Tracer
from megatron.pipeline.runtime.relay.lanes import Lanes


def word(text):
    return Instruction.parse(text)


class Rank:
    """Lanes whose words log that they ran, and wait for a gate where one is given."""

    def __init__(self, *, timeout=20.0, **options):
        self.log, self.gates = [], {}
        self.lanes = Lanes(LaneOrder(4), device=torch.device("cpu"), timeout=timeout, **options)

    def request(self, text, *, gate=False, error=None):
        opened = self.gates[text] = threading.Event()
        if not gate:
            opened.set()

        def call():
            assert opened.wait(20)
            if error is not None:
                raise error
            self.log.append(text)

        self.lanes.request(word(text), call)

    def wait_for(self, text):
        return self.lanes.wait_for(word(text))


def test_a_word_begins_when_what_it_awaits_is_complete():
    """A fetch waits for its update, which waits for its gradients, each in a lane of its own; requests return at once,
    and a computation waits for its fetch.
    """
    rank = Rank()
    rank.request("2STORE_GRAD@1", gate=True)
    rank.request("2UPDATE@1")
    rank.request("2FETCH@1")
    assert rank.log == [] and rank.lanes.num_incomplete == 3
    rank.gates["2STORE_GRAD@1"].set()
    assert rank.wait_for("2F0@1")
    assert rank.log == ["2STORE_GRAD@1", "2UPDATE@1", "2FETCH@1"]
    assert not rank.wait_for("2F1@1")
    rank.lanes.close()


def test_a_lane_does_not_hold_up_another():
    """A fetch of one stage passes an update of another one that is under way; in its own lane nothing passes."""
    rank = Rank()
    rank.request("3STORE_GRAD@1")
    rank.request("3UPDATE@1", gate=True)
    rank.request("0FETCH@0")
    rank.request("3FETCH@1")
    rank.request("1FETCH@0")
    rank.wait_for("0F0@0")
    assert "0FETCH@0" in rank.log and {"3UPDATE@1", "3FETCH@1", "1FETCH@0"}.isdisjoint(rank.log)
    rank.gates["3UPDATE@1"].set()
    rank.wait_for("1F0@0")
    assert rank.log[-3:] == ["3UPDATE@1", "3FETCH@1", "1FETCH@0"]
    rank.lanes.settle()
    assert rank.lanes.num_incomplete == 0
    rank.lanes.close()


def test_lanes_and_reductions_wait_for_each_other():
    """STORE_GRAD waits for the reduction of its gradients, and the tied embeddings' reduction for both STORE_GRADs."""
    rank, calls = Rank(), []
    reduce = rank.lanes.in_chain(word("0REDUCE_GRAD@1"), lambda: calls.append("reduced"))
    rank.request("0STORE_GRAD@1")
    rank.request("3STORE_GRAD@1", gate=True)
    embed = rank.lanes.in_chain(word("0REDUCE_EMBED@1"), lambda: calls.append(list(rank.log)))
    rank.request("0UPDATE@1")
    assert rank.log == []
    chain = threading.Thread(target=lambda: (reduce(), embed()))
    chain.start()
    rank.gates["3STORE_GRAD@1"].set()
    chain.join(20)
    assert calls == ["reduced", ["0STORE_GRAD@1", "3STORE_GRAD@1"]]
    rank.lanes.settle()
    assert rank.log[-1] == "0UPDATE@1"
    rank.lanes.close()


def test_a_backward_that_takes_a_gradient_buffer_waits_for_one():
    """The third stage's first backward waits for the first stage's gradients to have left, and its others do not."""
    rank = Rank()
    for stage in (3, 2):
        rank.wait_for(f"{stage}B0@0")
        rank.request(f"{stage}STORE_GRAD@1", gate=True)
    waiting = threading.Thread(target=lambda: (rank.wait_for("1B0@0"), rank.log.append("1B0@0")))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and rank.lanes.waiting == word("3STORE_GRAD@1")
    rank.gates["3STORE_GRAD@1"].set()
    waiting.join(20)
    assert rank.log == ["3STORE_GRAD@1", "1B0@0"] and not rank.wait_for("1B1@0")
    rank.gates["2STORE_GRAD@1"].set()
    rank.lanes.close()


def test_who_reads_the_hosts_memory_waits_on_the_host(monkeypatch):
    """The optimizer and the sum of tied embeddings do, for the copies that bring their gradients: behind an event of
    the device. A copy to the device is only ordered there.
    """
    finished = set()

    class Side(CpuStreams):
        def finish(self, event):
            finished.add(threading.current_thread().name)

    monkeypatch.setitem(SIDES, "cpu", Side)
    rank = Rank()
    rank.request("0STORE_GRAD@1")
    chain = threading.Thread(target=rank.lanes.in_chain(word("0REDUCE_EMBED@1"), lambda: None), name="chain")
    chain.start()
    rank.request("0UPDATE@1")
    rank.request("0FETCH@1")
    rank.wait_for("0F0@1")
    chain.join(20)
    assert finished == {"chain", "pipeline host optimizer"}
    rank.lanes.close()


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_copy_that_the_device_may_be_at_is_waited_for(monkeypatch, runs_ahead):
    """A trace then ends the wait behind the copy, though its call has returned long ago."""
    monkeypatch.setitem(SIDES, "cpu", type("Side", (CpuStreams,), {"runs_ahead": runs_ahead}))
    rank = Rank()
    rank.request("2FETCH@0")
    rank.lanes.settle()
    assert rank.wait_for("2F0@0") is runs_ahead
    rank.lanes.close()


def test_a_failure_ends_every_wait_at_once_and_is_told_once():
    """An update fails: the fetch behind it and the computation behind that raise what it raised, with its name on it,
    and so does the next request.
    """
    told, annotated = [], []
    rank = Rank(on_error=told.append, annotate=lambda error, instruction: annotated.append(str(instruction)))
    rank.request("2STORE_GRAD@1")
    rank.request("2UPDATE@1", error=MemoryError("the host is full"))
    rank.request("2FETCH@1")
    with pytest.raises(MemoryError, match="the host is full"):
        rank.wait_for("2F0@1")
    with pytest.raises(MemoryError, match="the host is full"):
        rank.request("1FETCH@1")
    rank.lanes.close()
    assert len(told) == 1 and annotated[0] == "2UPDATE@1" and rank.log == ["2STORE_GRAD@1"]


def test_a_failure_wakes_who_waits():
    """At once, and not when the wait has lasted too long: a computation, and a lane that waits for another one."""
    rank, found = Rank(), []
    rank.request("2STORE_GRAD@1", gate=True, error=MemoryError("the host is full"))
    rank.request("2UPDATE@1")
    rank.request("2FETCH@1")

    def compute():
        try:
            rank.wait_for("2F0@1")
        except MemoryError as error:
            found.append(str(error))

    waiting = threading.Thread(target=compute, daemon=True)
    waiting.start()
    while rank.lanes.waiting is None:
        time.sleep(0.001)
    rank.gates["2STORE_GRAD@1"].set()
    waiting.join(10)
    rank.lanes.close(1)
    assert found == ["the host is full"] and not waiting.is_alive() and rank.log == []


def test_a_failing_reduction_ends_waits_of_lanes():
    """The chain's failure is handed to the lanes, so a STORE_GRAD that waits for a reduction does not wait for ever."""
    rank = Rank()
    rank.lanes.in_chain(word("2REDUCE_GRAD@1"), lambda: None)
    rank.request("2STORE_GRAD@1")
    rank.lanes.fail(ConnectionError("a replica is gone"))
    with pytest.raises(ConnectionError, match="a replica is gone"):
        rank.lanes.settle()
    rank.lanes.close()


def test_who_waits_too_long_says_for_what():
    """The message has the computation, the word it waits for with its lane, and what is under way."""
    rank = Rank(timeout=0.1)
    rank.request("2STORE_GRAD@1", gate=True)
    rank.request("2UPDATE@1")
    rank.request("2FETCH@1")
    with pytest.raises(TimeoutError, match=(
        r"2F0@1 waited 0.1 s for 2FETCH@1 \(host to device\); 2STORE_GRAD@1 and 2UPDATE@1 are under way"
    )):  # fmt: skip
        rank.wait_for("2F0@1")
    rank.gates["2STORE_GRAD@1"].set()
    rank.lanes.close()


def test_what_is_kept_of_the_past_is_bounded():
    """After a thousand batches the lanes know as many words as after ten."""
    rank, kept = Rank(), []
    for version in range(1, 1001):
        for stage in range(4):
            rank.wait_for(f"{stage}B{version}@{version - 1}")
            rank.request(f"{stage}STORE_GRAD@{version}")
            rank.request(f"{stage}UPDATE@{version}")
            rank.request(f"{stage}FETCH@{version}")
        kept.append(len(rank.lanes._posted))
    rank.lanes.settle()
    assert max(kept) == max(kept[:40]) < 200
    rank.lanes.close()


def test_what_is_settled_is_in_the_trace():
    """A word is complete before its span is noted, and a timeline may be drawn at once."""

    class Slow(Tracer):
        def record_background(self, *span):
            time.sleep(0.05)
            super().record_background(*span)

    tracer = Slow()
    tracer.begin_batch(BatchExtent(0, 0, 1))
    rank = Rank(tracer=tracer)
    rank.request("2STORE_GRAD@1")
    rank.request("2UPDATE@1")
    rank.lanes.settle()
    assert len(tracer.spans()) == 2 and rank.lanes.num_incomplete == 0
    rank.lanes.close()


def test_a_trace_has_a_track_for_each_lane():
    """A word's span begins when what it waited for was complete, and what is requested untraced has none."""
    tracer = Tracer()
    tracer.begin_batch(BatchExtent(0, 0, 1))
    rank = Rank(tracer=tracer)
    rank.request("2STORE_GRAD@1", gate=True)
    rank.request("2UPDATE@1")
    rank.lanes.traced = False
    rank.request("2FETCH@1")
    rank.gates["2STORE_GRAD@1"].set()
    rank.lanes.settle()
    rank.lanes.close()
    spans = {str(span.instruction): span for span in tracer.spans()}
    assert {text: span.track for text, span in spans.items()} == {
        "2STORE_GRAD@1": "device to host",
        "2UPDATE@1": "host optimizer",
    }
    assert spans["2UPDATE@1"].start >= spans["2STORE_GRAD@1"].end
