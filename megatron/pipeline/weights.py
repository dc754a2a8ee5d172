"""Which weights a batch uses, and when new ones are made: one table entry for each policy.

A pipeline that does not drain between batches meets a new batch while the one before it is under way, so somebody has
to say which weights each of them uses. Batches and versions are numbered over the whole training run; version 0 is the
initial one, and STEP@v makes version v from the gradients of batch v-1.

    policy   batch j uses                 STEP@v stands before                  live versions    source
    flush    j; drains after each batch   the first forward of batch v          1                PipeDream-2BW, 3.2
    2bw      max(j-1, 0)                  the first forward of batch v+1        2                PipeDream-2BW, 3.1
    stash    the newest at the stage      whatever follows the chain of v       p-s at stage s   PipeDream
"""

from dataclasses import dataclass
from enum import Enum


class WeightPolicy(str, Enum):
    """Which weights a batch uses.

    `flush`: one version. `2bw`: two versions, delay 1. `stash`: PipeDream's, with one update per microbatch.
    """

    FLUSH = "flush"
    TWO_BW = "2bw"
    STASH = "stash"

    @property
    def rule(self) -> "WeightRule":
        return _RULES[self]


@dataclass(frozen=True)
class WeightRule:
    """What a policy means for a program.

    Attributes:
        delay: batch j uses version max(j - delay, 0) at all stages, and the STEP that makes a version waits until the
            first forward that uses it is next. None: each stage uses its newest version, and steps as soon as it can.
        drains: a batch is through the pipeline before the next one begins.
    """

    delay: int | None
    drains: bool

    @property
    def updates_alone(self) -> bool:
        """Whether each stage makes versions at its own time, so that nothing may depend on all stages together."""
        return self.delay is None

    def max_live_versions(self, stage: int, num_stages: int) -> int:
        """The most versions that a stage holds at once."""
        return num_stages - stage if self.delay is None else self.delay + 1

    def version_of(self, batch: int, *, newest: int) -> int:
        """The version that the forward of `batch` uses at a stage whose newest version is `newest`."""
        return newest if self.delay is None else max(batch - self.delay, 0)

    def entry_versions(self, first_batch: int) -> tuple[int, ...]:
        """The versions alive in a drained state before `first_batch`, ascending; all updates so far have been made."""
        return tuple(range(max(first_batch - (self.delay or 0), 0), first_batch + 1))


_RULES = {
    WeightPolicy.FLUSH: WeightRule(delay=0, drains=True),
    WeightPolicy.TWO_BW: WeightRule(delay=1, drains=False),
    WeightPolicy.STASH: WeightRule(delay=None, drains=False),
}
