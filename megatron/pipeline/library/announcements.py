"""What the rank of the first stage says of each batch before it begins: its samples, and whether its shapes are known.

Problem: ranks post receives before they have seen anything of a batch, and its last one may be smaller. Solution: a few
numbers go ahead of each batch, one way. Nobody waits for it longer than for the batch's first activation: what a rank
does first with a batch depends on the first stage, which has announced it by then.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.pipeline.library.batches import BatchData


@dataclass(frozen=True)
class Announcement:
    """`number`: of the shapes, counted as they come up. `num_samples`: of this pipeline."""

    number: int
    num_samples: int


class Announcements:
    """`source`: the global rank that has the first stage. `group`: of the pipeline's ranks; None for a single one."""

    def __init__(self, source: int, group: Any) -> None:
        self._source, self._group = source, group
        self._is_source = group is None or dist.get_rank() == source
        self._numbers: dict[Hashable, int] = {}
        self._new: Hashable = None

    def exchange(self, data: BatchData | None, problem: ValueError | None, *, evaluates: bool) -> Announcement:
        """What is to be known of the batch; `data` and `problem` count on the source alone.

        Raises:
            ValueError: on all ranks, where the source has a problem.
        """
        number = num_samples = 0
        if self._is_source and problem is None:
            key = evaluates, data.signature
            number, num_samples = self._numbers.get(key, len(self._numbers)), data.num_samples
            self._new = key
        if self._group is not None:
            head = torch.tensor([number, num_samples, problem is not None])
            dist.broadcast(head, self._source, group=self._group)
            number, num_samples, has_problem = head.tolist()
            if has_problem:
                box = [str(problem)]
                dist.broadcast_object_list(box, self._source, group=self._group)
                if not self._is_source:
                    raise ValueError(box[0])
        if self._is_source and problem is not None:
            raise problem
        return Announcement(number, num_samples)

    def confirm(self) -> None:
        """The shapes announced last are known from now on."""
        if self._is_source:
            self._numbers[self._new] = len(self._numbers)
