"""What all ranks of a job have to agree on: a refusal on one of them is a refusal on all.

Problem: a user's mistake is often seen by one rank alone, and the others would wait for it in the next collective.

Solution: whatever may be refused is done between collectives, and each rank tells all others how it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron.pipeline.library.ranks import Ranks


class Agreement:
    """Collective over the job, in `group`; None: there is one rank.

    Attributes:
        refusal: the last error that all ranks of the job have raised alike, if any.
    """

    def __init__(self, ranks: Ranks, group: Any) -> None:
        self._ranks, self._group = ranks, group
        self.refusal: Exception | None = None

    def gathered(self, value: Any) -> list[Any]:
        """What every rank of the job has, in the order of their global ranks."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * len(self._ranks.job)
        dist.all_gather_object(found, value, group=self._group)
        return found

    def on(self, function: Callable[[], Any]) -> Any:
        """What a function without collectives returns.

        Raises:
            ValueError: on all ranks, where it raises on one. That one raises its own error.
        """
        result, problem = None, None
        try:
            result = function()
        except Exception as error:
            problem = error
        problems = self.gathered(None if problem is None else f"{problem}")
        for rank, text in zip(self._ranks.job, problems, strict=True):
            if text is not None:
                self.refusal = problem or ValueError(f"rank {rank}: {text}")
                raise self.refusal
        return result

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """A block whose ValueErrors all ranks of the pipeline raise."""
        try:
            yield
        except ValueError as error:
            if len(self._ranks.pipelines) == 1:
                self.refusal = error
            raise
