"""What a configuration is expected to take: seconds of an iteration, where they go, and memory."""

from dataclasses import dataclass

from megatron.planner.job.configuration import Configuration
from megatron.planner.job.verdict import Verdict
from megatron.planner.memory.memory import RankMemory
from megatron.planner.memory.node_memory import HostVerdict


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of one configuration of one model on one cluster.

    Attributes:
        seconds: of one iteration, a global batch.
        mfu: model operations (nothing recomputed counts) of an iteration over what the GPUs' peak would allow.
        bubble: part of an iteration in which the busiest rank of the pipeline computes nothing, 0 to 1.
        memory: by rank of the pipeline.
        verdict: whether the fullest rank fits.
        host: whether the fullest node has the memory, where weights live on the host and the cluster says what nodes
            have.
    """

    configuration: Configuration
    seconds: float
    mfu: float
    bubble: float
    memory: tuple[RankMemory, ...]
    verdict: Verdict
    host: HostVerdict | None = None

    @property
    def fits(self) -> bool:
        """GPUs and hosts have the memory."""
        return self.verdict.fits and (self.host is None or self.host.fits)

    @property
    def under_pressure(self) -> bool:
        """It is borderline, or ranks are slowed for want of memory, which `seconds` then counts."""
        return self.verdict.under_pressure
