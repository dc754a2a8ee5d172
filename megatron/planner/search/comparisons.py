"""Comparisons of a search's best configuration with training without a pipeline and with training on fewer nodes.

Without a pipeline, weights are split over replicas (FSDP, ZeRO-2 and 3). Each tensor parallel size, microbatch and
number of shards of the space is tried with the first recompute scope that fits, as in the search itself.

A search uses all GPUs. With a fixed batch, each of more GPUs computes less and waits longer. On half of the nodes each
GPU computes twice as much, so half of the nodes can only be faster if more than half of the GPUs' rate of matrix
products is unused (`_can_gain`). In that case the search is repeated on half of the nodes, and halved again as long as
that is faster.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from megatron.planner.job.cluster import Cluster, make_cluster
from megatron.planner.job.configuration import STAGES, Configuration, Sharding
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.planner import Planner
from megatron.planner.search import rules
from megatron.planner.search.outcome import Choice, Kept, Outcome, WithoutPipeline
from megatron.planner.search.rules import Training
from megatron.planner.search.space import SCOPES, Space, divisors
from megatron.planner.time.first_principles import FirstPrinciples


def fastest_without_pipeline(
    space: Space, planner_of: Callable[[int], Planner], training: Training
) -> WithoutPipeline | None:
    """Find the fastest training without a pipeline that fits.

    Returns None if no comparison is possible: on one GPU, on a CPU, for a model with experts, or with a profile in
    place of the time model, since a profile does not time gathers of weights.
    """
    planner = planner_of(1)
    if planner.cluster.is_cpu or space.num_gpus == 1 or not isinstance(planner.cost_model, FirstPrinciples):
        return None
    if planner.model.experts is not None or planner.model.further is not None:  # the model of split weights has none
        return None
    scopes = [each for each in space.scopes if training.saves_scores or each is not SCOPES[1]]
    if not scopes:
        return None
    best, nearest = None, None
    for configuration in _configurations(space, planner_of, training):
        planner = planner_of(configuration.tensor)
        chosen, spare = _least_recomputed(configuration, planner, scopes, avoids_pressure=space.avoids_pressure)
        if chosen is None:
            nearest = spare if nearest is None else max(nearest, spare)
            continue
        found = WithoutPipeline(estimate=planner.estimate(chosen), software=planner.software.of(chosen))
        if best is None or found.sequences_per_second > best.sequences_per_second:
            best = found
    if best is None and nearest is not None:
        return WithoutPipeline(missing_gib=-nearest) if nearest < 0 else WithoutPipeline(is_slowed=True)
    return best


def _least_recomputed(
    configuration: Configuration, planner: Planner, scopes: list[RecomputeScope], *, avoids_pressure: bool
) -> tuple[Configuration | None, float]:
    """The configuration with the first scope that fits, and the most GiB that any tried scope leaves free.

    The configuration is None if no scope fits (the free GiB are negative), or if every scope that fits would be slowed
    and pressure is avoided.
    """
    spare = -math.inf
    for scope in scopes:
        trial = replace(configuration, recompute=scope)
        verdict = planner.judge(trial, planner.memory(trial))
        spare = max(spare, verdict.spare_gib)
        if verdict.fits and not (avoids_pressure and verdict.under_pressure):
            return trial, spare
    return None, spare


def _configurations(space: Space, planner_of: Callable[[int], Planner], training: Training) -> Iterator[Configuration]:
    for t in divisors(space.num_gpus):
        data = space.num_gpus // t
        if data == 1 or (space.tensor is not None and t not in space.tensor):
            continue
        if rules.refuse_tensor(planner_of(1).model, space, t):
            continue
        model = planner_of(t).model
        for size in space.microbatches(data):
            batch = space.largest_batch_size // (size * data) * size * data
            slow = rules.slow_softmax(model, training, Choice(tensor=t, micro_batch_size=size))
            if not space.global_batch_size <= batch or not batch or (slow and space.needs_fused_softmax):
                continue
            for shards in _shards(data, t, space.gpus_per_node):
                for stage in STAGES:
                    yield Configuration(
                        tensor=t, data=data, micro_batch_size=size, global_batch_size=batch,
                        sequence_parallel=t > 1 and model.sequence_length % t == 0,
                        sharding=Sharding(stage=stage, shards=shards),
                    )  # fmt: skip


def _shards(data: int, tensor: int, gpus_per_node: int) -> list[int]:
    """Numbers of shards to try: one copy of the weights over all replicas, or one in each group that fills 1, 4, 16,
    ... nodes."""
    found, group = [data], max(2, gpus_per_node // tensor)
    while group < data:
        if data % group == 0:
            found.append(group)
        group *= 4
    return found


_WORTH_SAYING = 0.01
"""The least relative gain that is reported."""


def note_on_fewer_nodes(outcome: Outcome, cluster: Cluster, best_on: Callable[[Cluster], Kept | None]) -> str | None:
    """A note that fewer nodes would be faster; None: they would not be, or the objective is not time.

    Args:
        outcome: the result of the search on all nodes.
        cluster: the cluster with all nodes.
        best_on: returns the best configuration of the same search on another cluster, or None if nothing fits there.
    """
    whole = outcome.best
    if whole is None or outcome.objective != "time" or cluster.is_cpu:
        return None
    best, nodes = whole, cluster.nodes
    while isinstance(nodes, int) and nodes % 2 == 0 and _can_gain(best, cluster):
        half = make_cluster(cluster.model_dump(exclude_none=True) | {"nodes": nodes // 2}, "half of the nodes")
        try:
            found = best_on(half)
        except ValueError:  # the user's choices, such as degrees, need more GPUs
            found = None
        if found is None or found.sequences_per_second <= best.sequences_per_second:
            break
        best, nodes = found, nodes // 2
    gain = best.sequences_per_second / whole.sequences_per_second - 1
    if gain < _WORTH_SAYING:
        return None
    return (
        f"{nodes} of the {cluster.nodes} nodes would be {100 * gain:.3g}% faster ({best.estimate.seconds:.3g} s an "
        f"iteration, {best.choice.schedule}, t={best.choice.tensor}, p={best.choice.pipeline}, d={best.choice.data}), "
        f"as more of them wait for one another; search with --nodes {nodes}, or give a larger batch"
    )


def _can_gain(best: Kept, cluster: Cluster) -> bool:
    return 2 * best.estimate.mfu < cluster.device.product_part
