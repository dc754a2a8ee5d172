"""Boxes: the parts of a tensor with several axes that ranks hold, want and send. No torch.

A box is given in the coordinates of the whole tensor: `start` inclusive, `stop` exclusive, one number an axis. A
scalar has no axes and one box.
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """Elements from `start` up to `stop` along every axis."""

    start: Shape
    stop: Shape

    @classmethod
    def at(cls, start: Shape, shape: Shape) -> "Box":
        return cls(tuple(start), tuple(first + size for first, size in zip(start, shape, strict=True)))

    @property
    def shape(self) -> Shape:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(max(0, extent) for extent in self.shape)

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """The slices of this box in a tensor that holds `outer`."""
        return tuple(
            slice(start - origin, stop - origin)
            for start, stop, origin in zip(self.start, self.stop, outer.start, strict=True)
        )


def is_run(box: Box, outer: Box) -> bool:
    """Whether the elements of `box` follow each other in a contiguous tensor that holds `outer`."""
    extents = list(zip(box.shape, outer.shape, strict=True))
    while extents and extents[-1][0] == extents[-1][1]:
        extents.pop()
    return all(extent == 1 for extent, _ in extents[:-1])


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None where that is nothing."""
    start = tuple(map(max, one.start, other.start))
    stop = tuple(map(min, one.stop, other.stop))
    if any(first >= last for first, last in zip(start, stop, strict=True)):
        return None
    return Box(start, stop)


def without(box: Box, hole: Box) -> Iterator[Box]:
    """What is left of `box` when `hole`, which lies in it, is cut out: at most two boxes an axis."""
    start, stop = list(box.start), list(box.stop)
    for axis, (first, last) in enumerate(zip(hole.start, hole.stop, strict=True)):
        if start[axis] < first:
            yield Box(tuple(start), (*stop[:axis], first, *stop[axis + 1 :]))
        if last < stop[axis]:
            yield Box((*start[:axis], last, *start[axis + 1 :]), tuple(stop))
        start[axis], stop[axis] = first, last


def boxes_of_range(shape: Shape, first: int, last: int) -> Iterator[Box]:
    """The elements `first` to `last` of a flattened tensor of `shape` as boxes in order, at most 2 n - 1 for n axes."""
    if first >= last:
        return
    if not shape:
        yield Box((), ())
        return
    inner = prod(shape[1:])
    row, column = divmod(first, inner)
    if column == 0 and last - first >= inner:
        rows = (last - first) // inner
        yield Box((row, *(0 for _ in shape[1:])), (row + rows, *shape[1:]))
        yield from boxes_of_range(shape, first + rows * inner, last)
        return
    end = min(last, (row + 1) * inner)
    for box in boxes_of_range(shape[1:], column, column + end - first):
        yield Box((row, *box.start), (row + 1, *box.stop))
    yield from boxes_of_range(shape, end, last)


def split(box: Box, most: int) -> Iterator[Box]:
    """`box` in parts of at most `most` elements each, in order, cut along the first axes."""
    if box.size <= most:
        yield box
        return
    axis = next(axis for axis, extent in enumerate(box.shape) if extent > 1)
    row = box.size // box.shape[axis]
    step = max(1, most // row)
    for first in range(box.start[axis], box.stop[axis], step):
        last = min(first + step, box.stop[axis])
        part = Box((*box.start[:axis], first, *box.start[axis + 1 :]), (*box.stop[:axis], last, *box.stop[axis + 1 :]))
        yield from split(part, most)
