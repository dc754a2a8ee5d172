"""From a configuration to the seconds of its tasks: bytes, links, and what software does besides."""

from dataclasses import replace

import pytest

from megatron.planner import Architecture, Cluster, Configuration, Planner
from megatron.planner.job.configuration import STAGES, Sharding
from megatron.planner.job.software import DEEPSPEED, MEGATRON_2021, MEGATRON_CORE, MEGATRON_FSDP, TORCHTITAN, Software
from megatron.planner.memory.parameters import FP8_COPY_BYTES, layer_parameters, matrix_parameters
from megatron.planner.sharded import ShardedCosts, sharded_costs, sharded_time
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.planner.time.profiled import ProfiledCosts
from tests.planner.profiles import MODEL as PROFILED
from tests.planner.profiles import profile
from tests.planner.search.helper import gpt3

MODEL = gpt3(8, 4096, 32)
LAYER = layer_parameters(MODEL, 1)


def cluster(nodes: int, network: float = 200.0) -> Cluster:
    return Cluster(gpu="A100-80", nodes=nodes, bandwidth={"between_nodes": network} if nodes > 1 else {})


def configuration(
    data: int = 8, *, shards: int | None = None, stage: int = 3, size: int = 1, **choices
) -> Configuration:
    batch = choices.pop("global_batch_size", data * size * choices.get("microbatches", 1))
    choices.pop("microbatches", None)
    sharding = Sharding(stage=stage, shards=shards or data)
    return Configuration(
        data=data, micro_batch_size=size, global_batch_size=batch, sharding=sharding, **choices
    )  # fmt: skip


def costs(software: Software = MEGATRON_CORE, nodes: int = 1, network: float = 200.0, **choices) -> ShardedCosts:
    given = cluster(nodes, network)
    chosen = configuration(given.num_gpus // choices.get("tensor", 1), **choices)
    return sharded_costs(FirstPrinciples(MODEL, given, software), chosen)


def test_bytes_over_links():
    """A gather moves 7 of 8 parts of a layer in 16 bits at what NVLink reaches, a reduction as much in FP32."""
    found, rate = costs(), 0.75 * 300e9
    assert found.gather == pytest.approx(7 / 8 * 2 * LAYER / rate, rel=0.05)
    assert found.reduce == pytest.approx(7 / 8 * 4 * LAYER / rate, rel=0.05)
    assert costs(Software(gradient_bytes=2)).reduce == pytest.approx(found.gather)


def test_a_node_shares_its_network():
    """Replicas of 8 GPUs a node go round one ring over all of its adapters; with 8 tensor ranks there are 8 rings, of
    an eighth of the weights each at an eighth of the rate."""
    assert costs(nodes=4).gather == pytest.approx(31 / 32 * 2 * LAYER / (0.8 * 200e9), rel=0.1)
    wide = costs(nodes=4, tensor=8)
    assert wide.gather == pytest.approx(3 / 4 * 2 * LAYER / (0.8 * 200e9), rel=0.1)


def test_groups_that_fill_a_node_gather_within_it():
    """And sum their shards over the nodes, once there and once back."""
    groups, all_of_them = costs(nodes=4, shards=8, network=25.0), costs(nodes=4, network=25.0)
    assert groups.gather == pytest.approx(costs().gather)
    assert groups.gather < all_of_them.gather / 5
    over_nodes = 2 * 3 / 4 * 4 * LAYER / 8 / (0.8 * 25e9 / 8)
    assert groups.reduce == pytest.approx(costs().reduce + over_nodes, rel=0.01)


def test_more_replicas_take_longer_steps():
    """The bytes of a gather hardly grow, and its steps do: with 2,048 replicas they are more than half of it."""
    few, many = costs(nodes=2).gather, costs(nodes=256).gather
    assert 1.5 * few < many
    bytes_alone = 2 * LAYER / (0.8 * 200e9)
    assert many > 2 * bytes_alone


def test_deepspeed_of_2021_waits_for_its_host():
    """Each of four matrices is gathered by itself, and the host cuts it into as many parts as there are replicas."""
    zero = replace(MEGATRON_2021, sharding=DEEPSPEED)
    found = costs(zero, nodes=4, recompute="layer")
    launch = FirstPrinciples(MODEL, cluster(4)).constants.launch
    assert found.host == pytest.approx(4 * 32 * launch)
    assert found.times_again == 2 and costs(zero, nodes=4).times_again == 1
    assert found.gather > costs(MEGATRON_2021, nodes=4).gather and costs(MEGATRON_2021, nodes=4).host == 0


def test_fsdp2_copies_weights_out_of_a_buffer():
    """Read and written once, in each forward and each backward."""
    plain = replace(TORCHTITAN, sharding=replace(TORCHTITAN.sharding, copies=False))
    given = FirstPrinciples(MODEL, cluster(1), TORCHTITAN)
    copy = 2 * 2 * LAYER / (given.constants.memory_efficiency * 2039e9)
    for way in ("forward", "backward"):
        seconds = [getattr(costs(software).layer, way) for software in (TORCHTITAN, plain)]
        assert seconds[0] - seconds[1] == pytest.approx(copy)


def test_fp8_casts_what_is_gathered():
    """Each layer in each forward and backward of stage 3; all layers once a batch of stage 2, and for each forward
    where software gathers for each microbatch."""
    hopper, chosen = Cluster(gpu="H100", nodes=1), [configuration(8, stage=stage) for stage in STAGES]
    cast = FirstPrinciples(MODEL, hopper).moved((2 + FP8_COPY_BYTES) * matrix_parameters(MODEL, 1, 1))
    renews = replace(MEGATRON_FSDP, keeps_batch=False)
    for runtime, (stage_2, stage_3) in (
        (MEGATRON_FSDP, ((0, 0, MODEL.num_layers), (1, 1, 0))), (renews, ((1, 0, 0), (1, 1, 0)))
    ):  # fmt: skip
        half = replace(MEGATRON_CORE, sharding=runtime)
        eighth = FirstPrinciples(MODEL, hopper, replace(half, fp8=True))
        for each, (forward, backward, step) in zip(chosen, (stage_2, stage_3), strict=True):
            found, (_, alone, _) = sharded_costs(eighth, each), eighth.pieces(each)
            assert found.layer.forward - alone[0] == pytest.approx(forward * cast)
            assert found.layer.backward - alone[1] == pytest.approx(backward * cast)
            other = sharded_costs(FirstPrinciples(MODEL, hopper, half), each).step
            assert found.step - other == pytest.approx(step * cast)


def test_weights_in_fp8_alone_are_gathered_so():
    """A byte less of each element of a matrix; each rank casts its shard once a batch, and a backward transposes."""
    hopper, matrices = Cluster(gpu="H100", nodes=1), matrix_parameters(MODEL, 1, 1)
    kept = FirstPrinciples(MODEL, hopper, replace(MEGATRON_CORE, fp8=True))
    alone = FirstPrinciples(MODEL, hopper, replace(MEGATRON_CORE, fp8=True, fp8_weights=True))
    (both, own), (_, layer, _) = (
        (sharded_costs(each, configuration(8)) for each in (kept, alone)),
        kept.pieces(configuration(8)),
    )
    assert both.gather - own.gather == pytest.approx(7 / 8 * matrices / (0.75 * 450e9), rel=0.05)
    assert own.layer.forward == pytest.approx(layer[0])
    assert own.layer.backward - layer[1] == pytest.approx(kept.moved(FP8_COPY_BYTES * matrices))
    cast = kept.moved((2 + FP8_COPY_BYTES) * matrices)
    assert own.step - both.step == pytest.approx(MODEL.num_layers * cast / 8)


def test_the_planner_takes_it():
    """An estimate has the time of the tasks, one rank's memory, and as bubble what the network shows."""
    given = cluster(2, network=10.0)
    planner = Planner(MODEL, given, FirstPrinciples(MODEL, given))
    chosen = configuration(16, microbatches=3)
    estimate = planner.estimate(chosen)
    time = sharded_time(planner.cost_model, chosen)
    assert estimate.seconds == time.seconds and 0.5 < estimate.bubble == time.bubble < 1
    assert len(estimate.memory) == 1
    assert (
        planner.estimate(replace(chosen, sharding=None)).seconds < estimate.seconds
    )  # a slow network, gathered thrice


def test_a_profile_has_no_gathers():
    """A cost model of measured blocks says so."""
    measured = ProfiledCosts(profile(), PROFILED)
    with pytest.raises(ValueError, match="a profile holds no gathers of weights"):
        sharded_time(measured, configuration(8))


def test_faster_networks_are_never_slower():
    """Nor do more bytes on them take less time."""

    def seconds(network: float, **choices) -> float:
        given = cluster(4, network)
        return sharded_time(FirstPrinciples(MODEL, given), configuration(32, **choices)).seconds

    times = [seconds(network) for network in (5.0, 25.0, 100.0, 400.0)]
    assert times == sorted(times, reverse=True) and times[0] > 2 * times[-1]
    assert seconds(25.0, stage=2, microbatches=8) < seconds(25.0, microbatches=8)


def test_pipelines_are_refused():
    with pytest.raises(ValueError, match="and p is 2, of which the time of both together is not modelled; give p 1"):
        configuration(8, pipeline=2)


def test_shapes_are_checked_as_elsewhere():
    model = Architecture.gpt3(
        num_layers=2, hidden_size=96, num_attention_heads=3, sequence_length=16, vocabulary_size=128
    )
    planner = Planner(model, cluster(1))
    with pytest.raises(ValueError, match="3 attention heads do not divide by tensor 2"):
        planner.memory(configuration(4, tensor=2))
