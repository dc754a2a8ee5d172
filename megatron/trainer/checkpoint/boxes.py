"""Boxes: parts of a tensor in the coordinates of the whole tensor. Imports no torch.

`start` is inclusive and `stop` exclusive, with one number for each axis. A scalar has no axes and one box.
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A box of elements: from `start` up to `stop`, exclusive, along every axis."""

    start: Shape
    stop: Shape

    @classmethod
    def at(cls, start: Shape, shape: Shape) -> "Box":
        return cls(tuple(start), tuple(first + size for first, size in zip(start, shape, strict=True)))

    @classmethod
    def whole(cls, shape: Shape) -> "Box":
        """The box of a whole tensor."""
        return cls.at((0,) * len(shape), shape)

    @property
    def shape(self) -> Shape:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """The number of elements in the box."""
        return prod(max(0, extent) for extent in self.shape)

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """The slices of this box in a tensor that holds `outer`."""
        return tuple(
            slice(start - origin, stop - origin)
            for start, stop, origin in zip(self.start, self.stop, outer.start, strict=True)
        )


def is_run(box: Box, outer: Box) -> bool:
    """Whether the elements of `box` are contiguous in a contiguous tensor that holds `outer`."""
    extents = list(zip(box.shape, outer.shape, strict=True))
    while extents and extents[-1][0] == extents[-1][1]:
        extents.pop()
    return all(extent == 1 for extent, _ in extents[:-1])


def overlap(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes, or None if it is empty."""
    start = tuple(map(max, one.start, other.start))
    stop = tuple(map(min, one.stop, other.stop))
    if any(first >= last for first, last in zip(start, stop, strict=True)):
        return None
    return Box(start, stop)


def without(box: Box, hole: Box) -> Iterator[Box]:
    """Yield the parts of `box` outside `hole`, which lies inside `box`, as at most two boxes for each axis."""
    start, stop = list(box.start), list(box.stop)
    for axis, (first, last) in enumerate(zip(hole.start, hole.stop, strict=True)):
        if start[axis] < first:
            yield Box(tuple(start), (*stop[:axis], first, *stop[axis + 1 :]))
        if last < stop[axis]:
            yield Box((*start[:axis], last, *start[axis + 1 :]), tuple(stop))
        start[axis], stop[axis] = first, last


def boxes_of_range(shape: Shape, first: int, last: int) -> Iterator[Box]:
    """Yield the elements `first` to `last` of a flattened tensor as boxes in order, at most 2 n - 1 for n axes."""
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
    """Yield parts of a box with at most `most` elements each, in order, split along the first axes."""
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
