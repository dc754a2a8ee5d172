"""What a stage draws from its data iterator, for each of its microbatches.

Problem: an iterator yields microbatches in order, and a program may have a stage compute them in another one: stages
would take different samples for the same microbatch. A recompute, too, needs what its forward has drawn.

Solution: what is passed over is drawn ahead, an item for each microbatch, and kept until its forward comes.
"""

from collections.abc import Iterator
from typing import Any


class DrawnData:
    """The training data of one stage. Every one of its microbatches is asked for once."""

    def __init__(self) -> None:
        self._next: int | None = None  # the microbatch that the iterator yields next
        self._ahead: dict[int, Any] = {}  # by microbatch

    def of(self, microbatch: int, source: Iterator | None, *, first: int) -> Iterator | None:
        """What `source` has for a microbatch.

        Args:
            microbatch: its index over the whole run.
            source: None where the stage reads none.
            first: the first microbatch of its batch, with which the iterator begins if nothing was drawn before.
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
    """An iterator that remembers what was drawn from it, so that a recomputed forward sees the same data."""

    def __init__(self, source: Iterator, drawn: list[Any]) -> None:
        self._source = source
        self._drawn = drawn

    def __iter__(self) -> "Recorder":
        return self

    def __next__(self) -> Any:
        item = next(self._source)
        self._drawn.append(item)
        return item
