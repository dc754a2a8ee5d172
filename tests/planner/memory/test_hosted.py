"""Weights on the host: what the planner counts on device and host, against proved programs and the runtime."""

import operator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron import backend

backend.install()

from megatron.pipeline.program.lane_order import Residency, most_boundaries, places
from megatron.pipeline.schedules import Schedule
from megatron.planner import GIB, Activations, Architecture, Cluster, Configuration, TrainingState
from megatron.planner.job.software import Software
from megatron.planner.memory.hosted import Hosting, gradient_buffers, resident_weights
from megatron.planner.memory.node_memory import Crew, crowds, fewest_sharing, host_bytes, judge_host, largest_model
from megatron.planner.memory.schedule_demand import closed_form_demand, proved_demand
from megatron.planner.planner import Planner
from tests import workers
from tests.draws import draws

CASES = "tests.pipeline.runtime.stages.megatron.megatron_relay_cases"
MODEL = Architecture.gpt3(
    num_layers=12, hidden_size=256, num_attention_heads=4, sequence_length=128, vocabulary_size=1024
)


def planner(model: Architecture = MODEL, *, software: Software | None = None, **cluster: object) -> Planner:
    found = Cluster(**{"gpu": "A100-80", "nodes": 1, "gpus_per_node": 1} | cluster)
    return Planner(model, found, software=software or Software())


def relayed(**changes: object) -> Configuration:
    return Configuration(**{"schedule": "l2l", "virtual": 12, "micro_batch_size": 2, "global_batch_size": 16} | changes)


@draws(40)
@given(p=st.integers(1, 4), v=st.integers(1, 5), m=st.integers(1, 9), tied=st.booleans(), data=st.booleans(),
       stash=st.sampled_from(["device", "host"]), resident=st.integers(1, 3))  # fmt: skip
def test_the_closed_form_is_the_proved_programs(p, v, m, tied, data, stash, resident):
    """All that memory is computed from, at any number of ranks, stages and microbatches."""
    schedule = Schedule.preset(
        "l2l", num_stages=p * v, num_virtual_stages=v, tied_embeddings=tied and p * v > 1, data_parallel=data,
        residency=Residency(resident, stash=stash),
    )  # fmt: skip
    exact, found = proved_demand(schedule, m), closed_form_demand(schedule, m)
    for name in ("live_versions", "boundaries"):
        assert getattr(found, name) == getattr(exact, name), name
    for name in ("saved_microbatches", "saved_on_rank"):
        same = operator.eq if stash == "device" else operator.ge  # inputs that leave have bounds
        assert all(map(same, getattr(found, name), getattr(exact, name))), name
    assert all(a <= b <= a + 1 for a, b in zip(exact.receives_ahead, found.receives_ahead, strict=True))


@pytest.mark.parametrize("resident", [2, *(pytest.param(count, marks=pytest.mark.full) for count in (1, 3))])
def test_weights_and_gradients_are_those_that_the_runtime_allocates(resident):
    """To the byte, for megatron.core's chunks in bfloat16 with FP32 gradients."""
    (outcome,) = workers.run(
        1, f"{CASES}:train", num_stages=4, resident=resident, batches=(1,), dtype="bfloat16", hidden=64
    )
    weights = [weight for weight, _ in outcome.stages]
    state = TrainingState(weight_bytes=2, gradient_bytes=4)
    parameters = [weight // 2 for weight in weights]
    assert resident_weights(state, parameters, resident) == outcome.weight_bytes
    assert gradient_buffers(state, parameters) == outcome.gradient_bytes
    assert len(set(parameters)) == 3  # the ends differ


def test_depth_costs_the_device_its_inputs_alone():
    """m boundaries for each layer more with the stash on the device, nothing with it on the host, whose stash grows by
    as much.
    """
    m, boundary = 8, 2 * MODEL.hidden_size * 2 * MODEL.sequence_length
    found = {}
    for layers in (24, 48):
        for stash in ("device", "host"):
            model = Architecture.gpt3(
                num_layers=layers, hidden_size=256, num_attention_heads=4, sequence_length=128, vocabulary_size=1024
            )
            (found[layers, stash],) = planner(model).memory(relayed(virtual=layers, stash=stash))
    assert found[48, "device"].total - found[24, "device"].total == 24 * m * boundary
    assert found[48, "host"].total == found[24, "host"].total < found[24, "device"].total
    assert found[48, "host"].host.stash - found[24, "host"].host.stash == 24 * m * boundary
    assert found[48, "device"].host.stash == 0
    # N - 2 inputs a microbatch, one in use at the turn, and a batch between two stages
    assert found[24, "device"].parts.activations == ((24 - 2) * m + 1 + m) * boundary
    assert found[24, "host"].parts.activations == (m + 3) * boundary == most_boundaries(m) * boundary


@pytest.mark.parametrize(("element", "per_parameter"), [(4, 16), (2, 18)])
def test_bytes_a_parameter_on_the_host(element, per_parameter):
    """FP32: weight, gradient, two moments. 16 bits: weight 2, gradient 4, master 4, moments 8."""
    (rank,) = planner(software=Software(element_bytes=element)).memory(relayed())
    assert rank.host.total == per_parameter * rank.num_parameters and rank.parts.optimizer == 0


def test_nodes_need_what_all_their_ranks_do():
    """Tensor ranks each have their own part, replicas share it but for the stash; the verdict names the fullest."""
    plan = planner(nodes=2, gpus_per_node=4, bandwidth={"between_nodes": 10.0}, host_memory_gib=1.0)
    configuration = relayed(pipeline=2, data=2, tensor=2, virtual=6, stash="host")
    memory = plan.memory(configuration)
    nodes = crowds(configuration.degrees, range(8), plan.cluster.topology.node_of_slot)
    assert nodes == [{0: Crew(4, 2)}, {1: Crew(4, 2)}]
    needed_bytes = [2 * (rank.host.total + rank.host.stash) for rank in memory]
    assert host_bytes(memory, nodes) == needed_bytes and memory[0].host.stash > 0
    fullest = max(range(2), key=needed_bytes.__getitem__)
    needed = needed_bytes[fullest] / GIB
    verdict = judge_host(memory, nodes, needed)
    assert verdict.node == fullest and verdict.fits and verdict.spare_gib == 0
    assert not judge_host(memory, nodes, needed * 0.999).fits
    assert plan.judge_host(configuration, memory).needed_gib == needed
    assert plan.judge_host(configuration.__class__(
        tensor=2, pipeline=4, micro_batch_size=1, global_batch_size=8), memory) is None  # fmt: skip


def test_replicas_on_one_node_share_a_store_and_others_do_not():
    """Two nodes with a replica each have a store each; the fewest that share one decide about the update."""
    configuration = relayed(data=2, tensor=2, virtual=12)
    together = crowds(configuration.degrees, range(4), (0, 0, 0, 0))
    apart = crowds(configuration.degrees, range(4), (0, 0, 1, 1))
    assert together == [{0: Crew(4, 2)}] and fewest_sharing(together) == 2
    assert apart == [{0: Crew(2, 2)}] * 2 and fewest_sharing(apart) == 1


@draws(25)
@given(p=st.sampled_from([1, 2, 3]), data=st.integers(1, 2), gib=st.floats(0.05, 8.0), stash=st.sampled_from([0, 1]))
def test_the_largest_model_fits_and_a_layer_more_a_rank_does_not(p, data, gib, stash):
    """By the estimate of memory itself."""
    configuration = relayed(pipeline=p, data=data, virtual=12, stash=("device", "host")[stash])
    model = Architecture.gpt3(
        num_layers=12 * p, hidden_size=256, num_attention_heads=4, sequence_length=128, vocabulary_size=1024
    )
    plan = planner(model, gpus_per_node=p * data)
    nodes = crowds(configuration.degrees, range(p * data), (0,) * (p * data))
    setting, state = plan.software.activation_setting(configuration), plan.software.training_state(configuration)
    of_layer = configuration.num_microbatches * Activations(model, setting).boundary * stash
    largest = largest_model(model, state, nodes, gib, tensor=1, num_ranks=p, stash_of_layer=of_layer)

    def needed(layers: int) -> float:
        shape = Architecture.gpt3(
            num_layers=layers, hidden_size=256, num_attention_heads=4, sequence_length=128, vocabulary_size=1024
        )
        deep = relayed(pipeline=p, data=data, virtual=layers // p, stash=configuration.stash)
        memory = planner(shape, gpus_per_node=p * data).memory(deep, proved=False)
        if layers == (largest.num_layers if largest else 0):
            assert sum(rank.num_parameters for rank in memory) == largest.num_parameters
        return host_bytes(memory, nodes)[0]

    if largest is None:
        assert needed(p) > gib * GIB
    else:
        assert needed(largest.num_layers) <= gib * GIB < needed(largest.num_layers + p)


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=9), resident=st.integers(1, 4))
def test_neighbours_lie_apart(sizes, resident):
    starts, length = places(sizes, resident)
    for first in range(len(sizes)):
        spans = sorted((starts[each], starts[each] + sizes[each]) for each in range(first, len(sizes))[:resident])
        spans = [span for span in spans if span[0] < span[1]]
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
        assert all(end <= length for _, end in spans)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recompute": "layer"}, "recompute layer does not go with l2l: it recomputes what is recomputed already"),
        ({"distributed_optimizer": True}, "distributed_optimizer does not go with l2l"),
        ({"balance": True}, "balance does not go with l2l"),
        ({"resident_stages": 0}, "0 resident stages leave none"),
        ({"host_update": "lazy"}, "the host's update is 'lazy'"),
        ({"stash": "disk"}, "the stash of inputs is 'disk'; choose device or host"),
        ({"schedule": "flush", "virtual": 1, "stash": "host"}, "weights on the device; leave them out, or choose l2l"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        relayed(**changes)


def test_the_host_is_said_in_the_cluster():
    """Bandwidth by default that of the GPU's PCIe; the optimizer's by the bytes that it moves."""
    plain = Cluster(gpu="V100-16", nodes=1, gpus_per_node=8)
    assert plain.device.host_bandwidth == pytest.approx(15.75, abs=0.01) and plain.host_memory_gib is None
    assert plain.optimizer_ns(30) == pytest.approx(30 * 8 / 200)
    said = Cluster(gpu="V100-16", nodes=1, host_memory_gib=512, host_bandwidth=12.5, host_optimizer_ns=3.0)
    assert (said.device.host_bandwidth, said.optimizer_ns(30)) == (12.5, 3.0)
    for key in ("host_memory_gib", "host_bandwidth", "host_optimizer_ns"):
        with pytest.raises(ValueError, match=key):
            Cluster(gpu="V100-16", nodes=1, **{key: 0.0})


def test_hosting_goes_with_whole_stages():
    assert relayed().hosting == Hosting(num_microbatches=8) and Configuration(
        micro_batch_size=1, global_batch_size=1
    ).hosting is None  # fmt: skip


def test_gradients_of_tied_embeddings_come_back():
    """Both ends' in FP32, where that is more than a recompute; a rank with neither end has none."""
    wide = replace(MODEL, vocabulary_size=512_000)
    configuration = relayed(pipeline=3, virtual=4, micro_batch_size=1)
    tied, *_, last = planner(wide, gpus_per_node=3).memory(configuration)
    untied, *_, other = planner(replace(wide, tied_embeddings=False), gpus_per_node=3).memory(configuration)
    gradient = 4 * wide.vocabulary_size * wide.hidden_size
    assert tied.parts.workspace == gradient > untied.parts.workspace
    assert last.parts.workspace == max(gradient, other.parts.workspace)
