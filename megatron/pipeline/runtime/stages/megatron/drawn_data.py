"""The items that a stage draws from its data iterator for each microbatch.

Problem: an iterator yields microbatches in order, and a program may have a stage compute them in another order: stages
would take different samples for the same microbatch. A recompute needs the items of its forward, too.

Solution: items of skipped microbatches are drawn ahead, one for each microbatch, and kept until their forward comes.
"""

from collections.abc import Iterator
from typing import Any


class DrawnData:
    """The training data of one stage. Each of its microbatches is requested once."""

    def __init__(self) -> None:
        self._next: int | None = None  # the microbatch that the iterator yields next
        self._ahead: dict[int, Any] = {}  # by microbatch

    def of(self, microbatch: int, source: Iterator | None, *, first: int) -> Iterator | None:
        """An iterator over the items of a microbatch.

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
