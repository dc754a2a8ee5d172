"""What ranks take to reduce gradients and to send to each other, for decisions about degrees.

Measured by an all-reduce over all ranks of the job, of nothing much and of a layer's gradients: a group that exists, in
which the slowest link of all decides. Replicas and stages that lie nearer to each other may be faster.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron import backend

_REPEATS = 5
_MOST_BYTES = 32 << 20
"""The size of the all-reduce that is measured; a larger one takes longer in proportion."""


@dataclass(frozen=True)
class LinkTimes:
    """Seconds of a message, and of each byte that a rank sends in a ring."""

    message: float = 0.0
    byte: float = 0.0

    def of_message(self, num_ranks: int) -> float:
        """The time of an all-reduce of next to nothing over so many ranks."""
        return 2 * (num_ranks - 1) * self.message

    def of_reduction(self, num_bytes: float) -> float:
        """The time of an all-reduce, whatever the number of its members: a ring sends all bytes up to twice."""
        return 2 * num_bytes * self.byte

    def of_transfer(self, num_bytes: float) -> float:
        """The time for which a transfer holds its link."""
        return num_bytes * self.byte


def measure_links(num_bytes: float) -> LinkTimes:
    """Times taken by an all-reduce of up to so many bytes. Collective, drained."""
    num_ranks = dist.get_world_size()
    if num_ranks == 1:
        return LinkTimes()
    size = max(4, int(min(num_bytes, _MOST_BYTES)))
    least, most = _seconds(4), _seconds(size)
    steps = 2 * (num_ranks - 1)
    return LinkTimes(least / steps, max(0.0, most - least) / (steps / num_ranks * size))


def _seconds(num_bytes: int) -> float:
    """The median; the first one is not counted."""
    values, found = torch.zeros(num_bytes // 4, dtype=torch.float32, device=backend.device()), []
    for _ in range(1 + _REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(values)
        values[0].item()  # on a device: when it has been done
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])
