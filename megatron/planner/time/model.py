"""The seam between what predicts times (first principles, or a profile) and what uses them."""

from collections.abc import Sequence
from typing import Protocol

from megatron.pipeline.simulate.costs import Costs
from megatron.planner.job.configuration import Configuration


class CostModel(Protocol):
    """Predicts what the instructions of a configuration cost, for one model on one cluster.

    Attributes:
        pressed_efficiency: as in `Constants`.
    """

    @property
    def pressed_efficiency(self) -> float: ...

    def costs(self, configuration: Configuration, layers: Sequence[int]) -> Costs:
        """Seconds and bytes with one number for each stage (or edge).

        Tensor-parallel communication is in `forward` and `backward`, and so is recomputation: as `add_recompute` is not
        used for the scopes of a configuration, `backward` holds the forward that is run again. Transfers that do not
        overlap with computation are in both as well; those that do are in `bandwidth` and the bytes.

        Args:
            configuration: degrees, microbatch, recompute scope, schedule, mapping.
            layers: how many layers each of the p * v stages has.

        Raises:
            ValueError: the model cannot say, with the reason.
        """
        ...
