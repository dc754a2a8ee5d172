"""`ActivationLayout`: each saved byte once, aligned as it was."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.runtime.activations.layout import ALIGNMENT, ActivationLayout, merged

RANGES = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(1, 500)).map(lambda pair: (pair[0], sum(pair))), max_size=12
)


@given(RANGES)
def test_merged_ranges_cover_the_same_bytes_once(ranges):
    """The union has exactly the bytes of the ranges, in ascending pieces with gaps between them."""
    union = merged(ranges)
    assert [byte for start, end in union for byte in range(start, end)] == sorted(
        {byte for start, end in ranges for byte in range(start, end)}
    )
    assert all(first[1] < second[0] for first, second in itertools.pairwise(union))


@given(RANGES)
def test_spans_do_not_overlap_and_keep_their_alignment(ranges):
    """Spans lie one after another with less than two alignments between them, at their storage's remainder."""
    layout = ActivationLayout.of(ranges)
    end = 0
    for (position, length), (start, stop) in zip(layout.spans, ranges, strict=True):
        assert length == stop - start
        assert end <= position < end + 2 * ALIGNMENT
        assert position % ALIGNMENT == start % ALIGNMENT
        end = position + length
    assert layout.buffer_bytes == end
    assert layout.saved_bytes == sum(stop - start for start, stop in ranges)


def test_a_microbatch_of_another_shape_is_refused():
    """The error names the microbatch, both sizes and the first piece that differs."""
    layout = ActivationLayout.of([(0, 8), (0, 16)])
    layout.require_equal(ActivationLayout.of([(0, 8), (0, 16)]), "microbatch 1 at stage 0")
    message = (
        "microbatch 2 at stage 0 saves 28 bytes in 2 pieces, "
        "the stage's first evicted microbatch 24 bytes in 2 (piece 1"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        layout.require_equal(ActivationLayout.of([(0, 8), (0, 20)]), "microbatch 2 at stage 0")
    with pytest.raises(ValueError, match="piece 2 differs first"):
        layout.require_equal(ActivationLayout.of([(0, 8), (0, 16), (0, 4)]), "microbatch 3 at stage 0")
