"""The items that a stage draws from its data iterator for each microbatch.

Problem: an iterator yields microbatches in order, but a program may have a stage compute them in another order. Then
stages would use different samples for the same microbatch. In addition, a recompute needs the items of its forward.

Solution: `DrawnData` draws the items of skipped microbatches ahead, one item per microbatch, and stores them until
their forward. `Recorder` stores the items of a forward.
"""

from collections.abc import Iterator
from typing import Any


class DrawnData:
    """The training data of one stage. Each microbatch may be requested once."""

    def __init__(self) -> None:
        self._next: int | None = None  # the microbatch that the iterator yields next
        self._ahead: dict[int, Any] = {}  # microbatch -> its item

    def of(self, microbatch: int, source: Iterator | None, *, first: int) -> Iterator | None:
        """An iterator over the items of a microbatch.

        Args:
            microbatch: its index over the whole run.
            source: the data iterator; None if the stage reads no data.
            first: the first microbatch of the batch. At the first call the iterator must be at this microbatch.
        """
        if source is None:
            return None
        if microbatch in self._ahead:
            return iter([self._ahead.pop(microbatch)])
        for passed_over in range(first if self._next is None else self._next, microbatch):
            self._ahead[passed_over] = next(source)
        self._next = microbatch + 1
        return source


class Recorder:
    """An iterator over `source` that appends each item to `drawn`, so that a recompute can use the same data."""

    def __init__(self, source: Iterator, drawn: list[Any]) -> None:
        self._source = source
        self._drawn = drawn

    def __iter__(self) -> "Recorder":
        return self

    def __next__(self) -> Any:
        item = next(self._source)
        self._drawn.append(item)
        return item
