"""Two lanes of a GPU, each in order: one computes, the other one gathers and reduces.

A task starts when its lane has done the one before it and when all that it waits for is done. So the order in which
tasks are listed is the order in which the software issues them, and what overlaps can be read off the list.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Lane(Enum):
    COMPUTE = "compute"
    NETWORK = "network"


@dataclass(frozen=True)
class Task:
    """`after`: places in the list of what it waits for, all of them before it."""

    lane: Lane
    name: str
    seconds: float
    after: tuple[int, ...] = ()


def ends(tasks: Sequence[Task]) -> list[float]:
    """When each task ends, from 0 on."""
    found: list[float] = []
    free = dict.fromkeys(Lane, 0.0)
    for task in tasks:
        start = free[task.lane]
        for other in task.after:
            start = max(start, found[other])
        free[task.lane] = start + task.seconds
        found.append(free[task.lane])
    return found
