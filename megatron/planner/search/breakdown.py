"""Where an iteration's time goes, and what takes a GPU's memory: parts of one configuration that add up.

The rank of the pipeline that computes most is looked at. What it computes follows from the costs of a microbatch. Of
the rest, reductions and transfers are what the iteration would be shorter without them; what then is left is the
pipeline's filling and draining, and waits for slower ranks.
"""

from dataclasses import fields, replace

from megatron.planner.job.estimate import Estimate
from megatron.planner.memory.activations import RecomputeScope
from megatron.planner.memory.memory import GIB, MemoryParts
from megatron.planner.planner import Planner
from megatron.planner.time.iteration import priced
from megatron.planner.time.stage_times import StageTimes
from megatron.planner.time.steady import without_reductions

FORWARD, BACKWARD, RECOMPUTED, UPDATE = "forward", "backward", "recomputed", "update of weights"
REDUCTIONS, TRANSFERS, WAITS = "reductions that show", "transfers that show", "bubble"
COMPUTED = "computed"
LOST = "no tensor gets it"


def time_parts(estimate: Estimate, planner: Planner) -> dict[str, float]:
    """Seconds of an iteration by what they are for; their sum is its time. Of a configuration without a pipeline of
    this project's, or with weights on the host, only what is computed and what is not.
    """
    configuration = estimate.configuration
    busy = (1 - estimate.bubble) * estimate.seconds
    if configuration.is_hosted or configuration.sharding is not None:
        return {COMPUTED: busy, WAITS: estimate.seconds - busy}
    schedule = configuration.pipeline_schedule(tied_embeddings=planner.model.tied_embeddings)
    layers = planner.layers(configuration)
    costs = planner.costs(configuration, schedule, layers, estimate.verdict)
    stages, m = StageTimes(costs, schedule), configuration.num_microbatches
    work = [
        m * each + update
        for each, update in zip(stages.by_rank(stages.work), stages.by_rank(stages.updates(m)), strict=True)
    ]
    rank = work.index(max(work))
    forward = m * stages.by_rank(stages.forward)[rank]
    update = stages.by_rank(stages.updates(m))[rank]
    recomputed = 0.0
    if configuration.recompute is not RecomputeScope.NONE:
        whole = planner.costs(replace(configuration, recompute=RecomputeScope.NONE), schedule, layers, estimate.verdict)
        plain = StageTimes(whole, schedule)
        recomputed = m * (stages.by_rank(stages.backward)[rank] - plain.by_rank(plain.backward)[rank])
    found = {FORWARD: forward, BACKWARD: busy - forward - update - recomputed, RECOMPUTED: recomputed, UPDATE: update}
    base, idle = priced(costs, configuration, schedule).seconds, estimate.seconds - busy
    for name, faster in (
        (REDUCTIONS, without_reductions(costs)),
        (TRANSFERS, replace(costs, latency=0.0, forward_bytes=0.0, backward_bytes=0.0, evict=0.0, load=0.0)),
    ):
        shown = base - priced(faster, configuration, schedule).seconds
        found[name] = min(max(shown, 0.0), idle)
        idle -= found[name]
    return found | {WAITS: idle}


def memory_parts(estimate: Estimate, memory_gib: float) -> dict[str, float]:
    """GiB of the fullest GPU by what they are for, with what is lost beside tensors and what is left.

    `memory_gib`: of a GPU.
    """
    parts = max(estimate.memory, key=lambda rank: rank.total).parts
    found = {part.name: getattr(parts, part.name) / GIB for part in fields(MemoryParts) if part.name != "step"}
    found["step"] = parts.total / GIB - sum(found.values())  # what of it comes beside the others
    free = memory_gib - parts.total / GIB
    return found | {LOST: min(max(estimate.verdict.free_gib - estimate.verdict.spare_gib, 0.0), max(free, 0.0))}
