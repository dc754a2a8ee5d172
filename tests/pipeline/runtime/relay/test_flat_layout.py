"""Tensors of a stage in flat memory, one for each dtype."""

import torch

from megatron.pipeline.runtime.contract.tensors import ALIGNMENT
from megatron.pipeline.runtime.relay.host_store import FlatLayout

TENSORS = {
    "a": torch.randn(3, 5),
    "b": torch.randn(7).bfloat16(),
    "c": torch.randn(()),
    "d": torch.randn(4, 4, 4),
}


def test_views_have_the_shapes_and_lie_apart():
    """Each name has its own part, filled through the view and found in the flat tensor; nothing overlaps."""
    layout = FlatLayout(TENSORS)
    flat = layout.allocate(lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    views = layout.views(flat)
    for name, tensor in TENSORS.items():
        views[name].copy_(tensor)
    assert all(torch.equal(views[name], tensor) for name, tensor in TENSORS.items())
    assert {dtype: int(each.count_nonzero()) for dtype, each in flat.items()} == {
        torch.float32: 15 + 1 + 64,
        torch.bfloat16: 7,
    }


def test_a_layout_can_be_cut_into_equal_aligned_parts():
    """Padded to that, and no further; views lie where they do without."""
    one, three = FlatLayout(TENSORS), FlatLayout(TENSORS, parts=3)
    for dtype, length in three.num_elements.items():
        part, remainder = divmod(length, 3)
        assert remainder == 0 and part * dtype.itemsize % ALIGNMENT == 0
        assert 0 <= length - one.num_elements[dtype] < 3 * ALIGNMENT // dtype.itemsize
    whole = {dtype: torch.arange(length) for dtype, length in three.num_elements.items()}
    assert all(torch.equal(view, one.views(whole)[name]) for name, view in three.views(whole).items())


def test_views_are_aligned_as_memory_of_their_own_is():
    """Every view begins at a multiple of 64 bytes, so that kernels add as they do without a copy."""
    layout = FlatLayout(TENSORS)
    views = layout.views(layout.allocate(lambda shape, dtype: torch.zeros(shape, dtype=dtype)))
    assert all(view.data_ptr() % ALIGNMENT == 0 for view in views.values())
    assert layout.num_bytes == (64 + 64 + 256) + 64
