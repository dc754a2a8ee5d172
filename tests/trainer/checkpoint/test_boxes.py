"""Boxes against plain enumeration of their elements."""

from itertools import product
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from megatron.trainer.checkpoint.boxes import Box, boxes_of_range, is_run, overlap, split, without

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    spans = [sorted(draw(st.tuples(st.integers(0, size - 1), st.integers(1, size)))) for size in shape]
    return Box(tuple(first for first, _ in spans), tuple(max(first + 1, last) for first, last in spans))


def elements(box):
    return set(product(*(range(start, stop) for start, stop in zip(box.start, box.stop, strict=True))))


@given(st.data())
def test_overlap_and_rest(data):
    """What two boxes share, and what is left of one without that: each element once, none lost."""
    shape = data.draw(SHAPES)
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = overlap(one, other)
    assert (elements(common) if common else set()) == elements(one) & elements(other)
    assert one.size == len(elements(one))
    if common:
        rest = list(without(one, common))
        assert len(rest) <= 2 * len(shape)
        assert sum(box.size for box in rest) == one.size - common.size
        assert set().union(*map(elements, rest)) == elements(one) - elements(common)


@given(st.data())
def test_ranges_are_few_boxes(data):
    """A range of a flattened tensor, in order and in at most 2 n - 1 boxes."""
    shape = data.draw(SHAPES)
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    found = list(boxes_of_range(shape, first, last))
    in_order = [element for box in found for element in sorted(elements(box))]
    assert in_order == list(product(*map(range, shape)))[first:last]
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(st.data())
def test_split_parts_fit(data):
    """Cut into parts of a bounded size, in order; no element twice."""
    box = data.draw(boxes(data.draw(SHAPES)))
    most = data.draw(st.integers(1, 20))
    parts = list(split(box, most))
    assert all(part.size <= most for part in parts)
    assert [element for part in parts for element in sorted(elements(part))] == sorted(elements(box))


@given(st.data())
def test_runs(data):
    """A box is a run of another where its elements are neighbours in the other's order."""
    shape = data.draw(SHAPES)
    outer, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    inner = overlap(outer, other) or outer
    places = [sorted(elements(outer)).index(element) for element in sorted(elements(inner))]
    assert is_run(inner, outer) == (places == list(range(places[0], places[0] + len(places))))
