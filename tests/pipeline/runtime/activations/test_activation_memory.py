"""`BufferPool` and `ActivationMemory`: buffers are used again, never too early, and what is in use is counted."""

import torch

from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory, BufferPool

CPU = torch.device("cpu")


def test_buffers_are_used_again():
    """A hundred moves of two at a time need two buffers; another size gets its own."""
    pool = BufferPool(CPU)
    for _ in range(100):
        first, second = pool.take(64), pool.take(64)
        assert first.data_ptr() != second.data_ptr()
        del first, second
    assert pool.num_buffers == 2 and pool.used_bytes == 0
    assert len(pool.take(32)) == 32
    assert pool.num_buffers == 3


def test_a_buffer_that_any_view_refers_to_is_not_free():
    """A gradient that is a view of a loaded activation keeps the buffer from being written."""
    pool = BufferPool(CPU)
    buffer = pool.take(64)
    view = buffer[8:16].view(torch.float32)
    address = buffer.data_ptr()
    del buffer
    assert pool.used_bytes == 64
    assert pool.take(64).data_ptr() != address
    del view
    assert pool.used_bytes == 0 and pool.take(64).data_ptr() == address


def test_the_peak_counts_graphs_and_buffers():
    """Bytes in graphs and in buffers add up; what was moved counts once; the peak stays."""
    memory = ActivationMemory()
    memory.hold(0, 0, 100)
    memory.hold(0, 1, 100)
    memory.drop(0, 0)
    buffer = memory.take_buffer(150)
    assert memory.current_bytes == memory.peak_bytes == 250
    del buffer
    memory.drop(0, 1)
    assert memory.current_bytes == 0 and memory.peak_bytes == 250
    assert memory.pool.num_buffers == 1


def test_the_recent_peak_starts_again_from_what_is_held():
    """Each reading tells the most since the one before, and what was saved then and is still saved counts. A batch that
    had ended before that reading has its peak there."""
    memory = ActivationMemory()
    memory.hold(0, 0, 100)
    memory.hold(0, 1, 50)
    memory.drop(0, 0)
    assert [memory.take_recent_peak(), memory.take_recent_peak()] == [150, 50]
    memory.hold(0, 2, 25)
    assert [memory.take_recent_peak(), memory.peak_bytes] == [75, 150]
    memory.drop(0, 1)
    memory.drop(0, 2)
    assert [memory.take_recent_peak(), memory.take_recent_peak()] == [75, 75]
