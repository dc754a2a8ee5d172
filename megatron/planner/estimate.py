"""What a configuration is expected to take: seconds of an iteration, where they go, and memory."""

from dataclasses import dataclass

from megatron.planner.configuration import Configuration
from megatron.planner.devices import Verdict
from megatron.planner.memory import RankMemory


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of one configuration of one model on one cluster.

    Attributes:
        seconds: of one iteration, a global batch.
        mfu: model operations (nothing recomputed counts) of an iteration over what the GPUs' peak would allow.
        bubble: part of an iteration in which the busiest rank of the pipeline computes nothing, 0 to 1.
        memory: by rank of the pipeline.
        verdict: whether the fullest rank fits.
    """

    configuration: Configuration
    seconds: float
    mfu: float
    bubble: float
    memory: tuple[RankMemory, ...]
    verdict: Verdict

    @property
    def under_pressure(self) -> bool:
        """So near the limit of memory that throughput falls (BPipe, appendix B): the time is that without it."""
        return self.verdict.is_borderline
