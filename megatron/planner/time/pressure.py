"""What a short memory costs: ranks whose allocator gives its blocks back in every backward compute slower, and 2bw in
one gradient buffer waits for its reductions.
"""

from collections.abc import Collection
from dataclasses import replace

from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs, spread
from megatron.planner.time.microbatch_flow import round_trips
from megatron.planner.time.stage_times import StageTimes


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


def in_one_gradient_buffer(costs: Costs, schedule: Schedule) -> Costs:
    """2bw's costs without a second gradient buffer.

    Between two batches' backwards a stage has one forward, and waits for the rate of the pipeline; beside both the
    first one's gradients are reduced. What is longer, the next backward waits for: as a step that takes so much more,
    and a reduction so much less. Tied embeddings are summed behind that, so the last stage waits for the first one's
    last backward, too. The step comes before some backwards of the batch that was reduced, so this is an upper bound.
    """
    num_stages = len(costs.forward)
    step, reduce = spread("step", costs.step, num_stages), list(spread("reduce_grad", costs.reduce_grad, num_stages))
    alone = list(reduce)
    if costs.reduce_embed:
        until_first = sum(costs.backward[:-1]) + reduce[0]
        reduce[-1] = max(reduce[-1], until_first) + costs.reduce_embed
        reduce[0] += costs.reduce_embed
    rate = round_trips(StageTimes(costs, schedule))
    waits = [max(0.0, each - (rate - own)) for each, own in zip(reduce, costs.backward, strict=True)]
    left = [max(0.0, each - wait) for each, wait in zip(alone, waits, strict=True)]
    return replace(costs, step=list(map(sum, zip(step, waits, strict=True))), reduce_grad=left, reduce_embed=0.0)
