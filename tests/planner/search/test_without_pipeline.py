"""What others reach without a pipeline on the same GPUs, and what a search says of it."""

from dataclasses import replace

import pytest

from megatron.planner import Cluster
from megatron.planner.job.configuration import Sharding
from megatron.planner.job.software import MEGATRON_CORE
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.planner import Planner
from megatron.planner.search import Space
from megatron.planner.search.comparisons import fastest_without_pipeline
from megatron.planner.search.outcome import WithoutPipeline
from megatron.planner.time.profiled import ProfiledCosts
from tests.planner.profiles import MODEL as PROFILED
from tests.planner.profiles import profile
from tests.planner.search.helper import TRAINING, a100, gpt3, planner, run

SMALL, LARGE = gpt3(24, 2048, 16), gpt3(96, 12288, 96)


def found(model, cluster: Cluster, **space) -> WithoutPipeline | None:
    chosen = Space(num_gpus=cluster.num_gpus, gpus_per_node=cluster.gpus_per_node, **space)
    return fastest_without_pipeline(chosen, lambda _: planner(model, cluster, MEGATRON_CORE), TRAINING)


def test_nothing_that_is_tried_is_faster():
    """Of all microbatches, scopes, stages and numbers of shards that fit, none trains more sequences a second."""
    cluster = a100(2)
    fastest = found(SMALL, cluster, global_batch_size=64)
    best, configuration = fastest.sequences_per_second, fastest.estimate.configuration
    each, tried = planner(SMALL, cluster, MEGATRON_CORE), 0
    for shards, stage in ((16, 2), (16, 3), (8, 2), (8, 3)):
        for size in (1, 2, 4):
            for scope in RecomputeScope:
                other = replace(
                    configuration, tensor=1, data=16, micro_batch_size=size, recompute=scope, sequence_parallel=False,
                    sharding=Sharding(stage=stage, shards=shards),
                )  # fmt: skip
                estimate = each.estimate(other)
                tried += estimate.fits
                assert not estimate.fits or 64 / estimate.seconds <= best * (1 + 1e-9)
    assert tried > 20


def test_a_space_restricts_it():
    """Tensor parallel sizes, microbatches and scopes are those of the search; pipelines and schedules are not asked."""
    cluster = a100(2)
    space = {"global_batch_size": 64, "tensor": (2,), "micro_batch_sizes": (4,), "scopes": (RecomputeScope.LAYER,)}
    configuration = found(SMALL, cluster, **space).estimate.configuration
    assert (configuration.tensor, configuration.data, configuration.micro_batch_size) == (2, 8, 4)
    assert configuration.recompute is RecomputeScope.LAYER and configuration.sequence_parallel
    assert found(SMALL, cluster, **space, pipeline=(4,), schedules=("gpipe",)).estimate.configuration == configuration


def test_a_batch_that_may_grow_is_the_largest():
    grown = found(SMALL, a100(1), global_batch_size=8, safe_batch_size=100).estimate.configuration
    assert grown.global_batch_size > 8 and grown.global_batch_size <= 100


def test_a_slow_network_is_crossed_by_few_bytes():
    """Over 1 GB/s a node, shards stay within nodes, or everything is gathered once a batch."""
    cluster = Cluster(gpu="A100-80", nodes=4, bandwidth={"between_nodes": 1.0})
    sharding = found(SMALL, cluster, global_batch_size=256).estimate.configuration.sharding
    assert sharding.shards <= 8 or sharding.stage == 2


def test_nothing_fits():
    """175 billion parameters on 8 GPUs; the nearest of all that were tried is said."""
    none = found(LARGE, a100(1), global_batch_size=8)
    assert none.estimate is None and none.missing_gib > 100


def test_pressure_is_avoided_where_that_is_asked_for():
    free = found(LARGE, a100(16), global_batch_size=128)
    calm = found(LARGE, a100(16), global_batch_size=128, avoids_pressure=True)
    assert not calm.estimate.under_pressure and calm.sequences_per_second <= free.sequences_per_second


def test_a_slowed_fit_that_is_left_out_misses_no_memory():
    """Microbatches of 17 on 8 tensor ranks fit, and the operands that wait have no room."""
    space = {"tensor": (8,), "micro_batch_sizes": (17,), "scopes": (RecomputeScope.LAYER,)}
    free = found(LARGE, a100(16), global_batch_size=16 * 17, **space)
    assert free.estimate.verdict.word == "slowed"
    calm = found(LARGE, a100(16), global_batch_size=16 * 17, avoids_pressure=True, **space)
    assert calm == WithoutPipeline(is_slowed=True)


def test_what_is_not_compared():
    """One GPU has no replicas, a CPU's processes no such systems, and a profile no gathers of weights; nor are scopes
    compared that layers do not have."""
    alone = Cluster(gpu="A100-80", nodes=1, gpus_per_node=1)
    assert found(SMALL, alone, global_batch_size=8) is None
    assert found(SMALL, Cluster(gpu="cpu", nodes=1, gpus_per_node=2), global_batch_size=8) is None
    profiled = Planner(PROFILED, a100(1), ProfiledCosts(profile(), PROFILED))
    space = Space(num_gpus=8, gpus_per_node=8, global_batch_size=8)
    assert fastest_without_pipeline(space, lambda _: profiled, TRAINING) is None
    attention = replace(space, scopes=(RecomputeScope.ATTENTION,))
    small = planner(SMALL, a100(1), MEGATRON_CORE)
    assert fastest_without_pipeline(attention, lambda _: small, replace(TRAINING, saves_scores=False)) is None


def test_the_search_has_it():
    """Beside what this project trains, and not among it."""
    outcome = run(SMALL, a100(1), global_batch_size=16, num_simulated=1)
    assert outcome.without_pipeline.estimate.fits
    assert all(each.estimate.configuration.sharding is None for each in outcome.kept)


@pytest.mark.parametrize("network", [25.0, 800.0])
def test_a_faster_network_is_never_slower(network):
    slow, fast = (
        found(SMALL, Cluster(gpu="A100-80", nodes=4, bandwidth={"between_nodes": rate}), global_batch_size=128)
        for rate in (network, 2 * network)
    )
    assert fast.sequences_per_second >= slow.sequences_per_second
