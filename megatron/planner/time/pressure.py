"""What a short memory costs: ranks whose allocator gives its blocks back in every backward compute slower."""

from collections.abc import Collection
from dataclasses import replace

from megatron.pipeline.simulate.costs import Costs


def slowed(costs: Costs, stages: Collection[int], efficiency: float) -> Costs:
    """The costs where these stages keep this part of their speed. Forward and backward have a number for each stage."""
    if not stages:
        return costs
    factor = [1 / efficiency if stage in stages else 1.0 for stage in range(len(costs.forward))]
    names = [name for name in ("forward", "backward", "backward_input", "backward_weight") if getattr(costs, name)]
    return replace(
        costs,
        **{name: [each * by for each, by in zip(getattr(costs, name), factor, strict=True)] for name in names},
    )
