"""EVICT, ACCEPT, RETURN and LOAD between two processes."""

import torch

from tests import workers

CASES = "tests.pipeline.runtime.activations.transfer_cases"


def test_gradients_are_bit_equal_when_microbatches_travel():
    """Two of three microbatches go to the pair and back, over several batches: no bit of a gradient changes.

    Each rank counts what it really has, its buffers do not grow after the first batch, and all of them are free again.
    """
    kept = workers.run(2, f"{CASES}:gradients", moves=False, num_batches=4)
    moved = workers.run(2, f"{CASES}:gradients", moves=True, num_batches=4)
    for one, other in zip(kept, moved, strict=True):
        assert len(one["gradients"]) == len(other["gradients"]) > 0
        assert all(torch.equal(a, b) for a, b in zip(one["gradients"], other["gradients"], strict=True))
    evictor, acceptor = moved
    assert kept[0]["peak_saved"] == 3 and kept[0]["peak_bytes"] is None
    assert evictor["peak_saved"] == 2 and 2 <= acceptor["peak_saved"] <= 3
    layout = evictor["layout"]
    assert evictor["peak_bytes"] == layout.saved_bytes + layout.buffer_bytes
    assert evictor["buffers"] == [1] * 4 and acceptor["buffers"] == [2] * 4
    assert evictor["at_end"] == acceptor["at_end"] == [0] * 4


def test_a_load_that_never_comes_says_who_waits_for_whom():
    """The backward of an evicted microbatch waits for its load, and after the time-out names instruction and ranks."""
    message = workers.run(2, f"{CASES}:missing_load", timeout=60)[0]
    assert message == "rank 0 (stage 0) waited 1 s in 0B0@0 for 0LOAD0 from rank 1 (stage 1)"


def test_moves_without_the_move_before_them_are_errors():
    """An eviction before the second forward, a second one, a backward without its load and a RETURN without its ACCEPT
    are refused by name.
    """
    evictor, acceptor = workers.run(2, f"{CASES}:unposted", timeout=60)
    assert evictor == [
        "microbatch 0 at stage 0 cannot be evicted before the stage's second forward: what microbatches share is not "
        "known yet",
        "microbatch 0 at stage 0 cannot be evicted: it is evicted already",
        "the backward of microbatch 0 at stage 0 reads a saved tensor that was evicted and not loaded again",
    ]
    assert acceptor == ["1RETURN0 needs 1ACCEPT0, which the program has not posted before it", "ran"]
