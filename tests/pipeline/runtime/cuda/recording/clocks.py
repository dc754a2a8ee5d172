"""Vector clocks: what is known to have happened before what.

A timeline is a stream or a host thread. Its clock says of every timeline how many of its steps have happened before
the timeline's next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Clock = dict[int, int]
Step = tuple[int, int]
"""(timeline, number of the step on it)"""


def joined(clock: Clock, other: Clock) -> None:
    """Let `clock` know all that `other` knows."""
    for timeline, steps in other.items():
        if steps > clock.get(timeline, 0):
            clock[timeline] = steps


def knows(clock: Clock, step: Step) -> bool:
    """Whether `step` has happened before whatever has this clock."""
    timeline, number = step
    return clock.get(timeline, 0) >= number


@dataclass
class Timeline:
    """A stream or a host thread."""

    number: int
    name: str
    clock: Clock = field(default_factory=dict)

    def step(self) -> Step:
        """Go on by one; the new step."""
        number = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = number
        return self.number, number
