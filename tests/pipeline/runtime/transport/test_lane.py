"""`MoveQueue`: one move after another in the background, and `SavedMicrobatches`, which counts them."""

import threading

import pytest
import torch

from megatron.backend.streams import SIDES, CpuStreams
from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.runtime.activations.transfers import SavedMicrobatches
from megatron.pipeline.runtime.transport.lane import MoveQueue

CPU = torch.device("cpu")
MOVES = [Instruction.parse(text) for text in ("0EVICT1", "0LOAD1", "0EVICT3")]


def test_a_move_is_posted_when_the_one_before_it_is_complete():
    """Requests return at once; the second call begins when the first has returned; whoever waits for the first does not
    wait for the second, and learns in time which one is late.
    """
    queue, posted, gates = MoveQueue(device=CPU), [], [threading.Event() for _ in MOVES]

    def move(number):
        posted.append(number)
        assert gates[number].wait(20)

    for number, instruction in enumerate(MOVES):
        queue.request(instruction, lambda number=number: move(number))
    assert not queue.wait(1, 0.05)
    assert posted == [0] and queue.num_incomplete == 3
    assert (queue.current, queue.incomplete_move(1), queue.incomplete_move(3)) == (MOVES[0], MOVES[0], MOVES[2])
    gates[0].set()
    assert queue.wait(1, 20) and not queue.wait(3, 0.05)
    assert posted == [0, 1] and queue.incomplete_move(1) is None and queue.current == MOVES[1]
    gates[1].set()
    gates[2].set()
    assert queue.wait(3, 20) and queue.num_complete == 3 and queue.current is None
    queue.close(20)


def test_a_move_lets_go_of_its_memory_before_it_is_complete():
    """What a call holds is gone when the wait for it ends, so a buffer can be taken again at once."""
    queue = MoveQueue(device=CPU)

    class Buffer:
        def __del__(self):
            freed.append(queue.num_complete)

    freed = []
    buffer = Buffer()
    queue.request(MOVES[0], lambda buffer=buffer: None)
    del buffer
    assert queue.wait(1, 20)
    assert freed == [0]
    queue.close(20)


def test_a_failing_move_is_told_at_once_and_raised_by_the_next_wait():
    """The error names its move; nothing after it is carried out, and what is complete stays complete."""
    told, annotated, ran = [], [], []
    queue = MoveQueue(device=CPU, on_error=told.append, annotate=lambda error, move: annotated.append(move))
    queue.request(MOVES[0], lambda: None)
    assert queue.wait(1, 20)

    def fail():
        raise ValueError("the wire is cut")

    queue.request(MOVES[1], fail)
    with pytest.raises(ValueError, match="the wire is cut"):
        queue.wait(2, 20)
    with pytest.raises(ValueError, match="the wire is cut"):
        queue.request(MOVES[2], lambda: ran.append(2))
    assert queue.wait(1, 20)
    queue.close(20)
    assert (len(told), annotated, ran) == (1, [MOVES[1]], [])


def test_saved_microbatches_are_counted_by_stage_and_together():
    """Stages of a rank reach their peaks at different times; the rank's peak is of the sum."""
    saved = SavedMicrobatches([0, 4])
    for stage in (0, 0, 4):
        saved.add(stage)
    saved.remove(0)
    saved.add(4)
    assert saved.peaks == {0: 2, 4: 2} and saved.peak_on_rank == 3


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_who_follows_a_move_learns_whether_the_device_may_be_at_it(monkeypatch, runs_ahead):
    """Though its call has returned; once followed, it is not waited for again."""
    monkeypatch.setitem(SIDES, "cpu", type("Side", (CpuStreams,), {"runs_ahead": runs_ahead}))
    queue = MoveQueue(device=CPU)
    queue.request(MOVES[0], lambda: None)
    assert queue.wait(1, 20)
    assert queue.follow(1) is runs_ahead and queue.follow(1) is False
    queue.close(20)
