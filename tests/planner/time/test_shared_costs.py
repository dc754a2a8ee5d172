"""What ranks pay that share sequences or experts."""

from dataclasses import replace

import pytest

from megatron.planner import Architecture, Cluster, Configuration
from megatron.planner.job.software import MEGATRON_CORE
from megatron.planner.memory.architecture import Experts
from megatron.planner.memory.parameters import stage_expert_parameters, stage_parameters
from megatron.planner.planner import Planner
from megatron.planner.time.calibration import START
from megatron.planner.time.first_principles import FirstPrinciples

FLASH = replace(MEGATRON_CORE, flash_attention=True)
LONG = Architecture(
    num_layers=8, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8, kv_channels=128,
    sequence_length=65536, vocabulary_size=32768, tied_embeddings=False, gated=True, linear_biases=False,
    norm_vectors=1, hidden_dropout=False, attention_dropout=False,
)  # fmt: skip
EXPERTS = replace(LONG, sequence_length=4096, experts=Experts(count=16, topk=2, ffn_hidden_size=4096))
MIXED = replace(EXPERTS, experts=replace(EXPERTS.experts, layers=(0, 0, 1, 1, 1, 1, 1, 1)))


def cluster(network: float = 400.0) -> Cluster:
    return Cluster(gpu="H100", nodes=8, bandwidth={"between_nodes": network})


def configuration(**changes: object) -> Configuration:
    given = {"tensor": 2, "pipeline": 4, "data": 8, "micro_batch_size": 1, "global_batch_size": 64,
             "sequence_parallel": True}  # fmt: skip
    return Configuration(**given | changes)


def costs(asked: Configuration, *, shape=LONG, software=FLASH, network: float = 400.0, constants=START):
    layers = Planner(shape, cluster(network), software=software).layers(asked)
    return FirstPrinciples(shape, cluster(network), software, constants).costs(asked, layers)


def test_a_ring_hides_behind_the_core_until_it_does_not():
    """Between nodes of a fast network nothing but contention is left of it; over a slow one each step waits for its
    transfer, so that a forward grows by what the transfers take more.
    """
    asked = configuration(tensor=8, pipeline=2, data=1, context=4, global_batch_size=8)
    nothing = replace(START, contention=0.0)
    forward = {rate: costs(asked, network=rate, constants=nothing).forward[0] for rate in (3200.0, 1600.0, 4.0, 2.0)}
    assert forward[3200.0] == forward[1600.0] < forward[4.0] < forward[2.0]
    passed = 3 * 2 * (8 * 128 / 8) * 2 * 65536 / 4  # K and V of a quarter of the tokens on 1 of 8 tensor ranks
    seconds = {rate: passed / (rate / 8 * 1e9 * 0.8) for rate in (4.0, 2.0)}  # 8 rings share a node's network
    assert forward[2.0] - forward[4.0] == pytest.approx(4 * (seconds[2.0] - seconds[4.0]))  # 4 layers
    assert costs(asked, network=3200.0).forward[0] > forward[3200.0]


def test_gathered_keys_are_never_hidden():
    """Over a network on which a ring hides more than its steps cost by themselves."""
    asked = configuration(tensor=8, pipeline=2, data=1, context=4, global_batch_size=8)
    ring, gathered = (costs(asked, software=replace(FLASH, gathers_keys=each)) for each in (False, True))
    assert gathered.forward[1] > ring.forward[1] and gathered.backward[1] > ring.backward[1]
    whole = costs(configuration(tensor=8, pipeline=2, data=4, global_batch_size=32))
    sent = 3 * 2 * (8 * 128 / 8) * 2 * 65536 / 4 / (400e9 / 8 * 0.8)
    assert gathered.forward[0] == pytest.approx(whole.forward[0] / 4 + 4 * sent, rel=1e-2)


def test_a_part_of_a_sequence_takes_a_part_of_the_time():
    """With 4 ranks for each sequence a little more than a quarter; the optimizer steps and reduces as before, as there
    are as many ranks with the same weights."""
    one, four = costs(configuration(data=8)), costs(configuration(data=2, context=4))
    for part in ("forward", "backward"):
        ratio = getattr(four, part)[1] / getattr(one, part)[1]
        assert 0.25 < ratio < 0.27
    assert four.step == one.step and four.reduce_grad == one.reduce_grad
    assert four.forward_bytes == one.forward_bytes / 4


def test_experts_are_reduced_over_fewer_ranks():
    """The rest over 8 replicas and experts over 2, of which each has 4 of 16; the distributed optimizer steps a part
    of each accordingly."""
    apart = configuration(expert=4, expert_tensor=2, distributed_optimizer=True)
    together = replace(apart, expert=1)
    assert (apart.expert_replicas, together.expert_replicas) == (2, 8)
    layers = (2,) * 4
    few, all_ = (stage_expert_parameters(EXPERTS, layers, each.expert_degrees)[1] for each in (apart, together))
    assert all_ == 4 * few
    rest = stage_parameters(EXPERTS, 2, layers, apart.expert_degrees)[1] - few
    found = {each.expert: costs(each, shape=EXPERTS) for each in (apart, together)}
    within, rate = 450e9 * 0.75, 4 * (7 / 8)
    # Stages fill nodes of 2 x 4 ranks twice: 8 replicas lie on 2 nodes, and 2 rings share these.
    across = min(within, 400e9 * 4 / 8 * 0.8)
    assert found[1].reduce_grad[1] == pytest.approx(rate * (rest + all_) / across)
    assert found[4].reduce_grad[1] == pytest.approx(rate * rest / across + 4 * (1 / 2) * few / (400e9 / 8 * 0.8))
    gather = [each.reduce_grad[1] / 2 for each in found.values()]  # of 2 bytes, where gradients have 4
    memory = 3350e9 * START.memory_efficiency / (6 * 4 + 2 * 4 + 2)
    steps = [(each.step[1] - seconds) * memory for each, seconds in zip(found.values(), gather, strict=True)]
    assert steps == pytest.approx([rest / 8 + few / 2, rest / 8 + all_ / 8])


def test_stages_have_their_own_layers_with_experts():
    """The first of 4 stages has none of them, the others have only such."""
    mixed, all_, none = (costs(configuration(), shape=each) for each in (MIXED, EXPERTS, replace(MIXED, experts=None)))
    assert mixed.forward[0] == pytest.approx(none.forward[0]) and mixed.forward[1] == pytest.approx(all_.forward[1])
    assert mixed.backward[0] == pytest.approx(none.backward[0]) and mixed.backward[3] == pytest.approx(all_.backward[3])
    assert mixed.step[0] == pytest.approx(none.step[0]) and mixed.reduce_grad[2] == pytest.approx(all_.reduce_grad[2])


def test_copies_that_cross_nodes_are_slower():
    """8 experts apart on two nodes wait for the network, 4 on one do not."""
    times = {
        (ep, rate): costs(configuration(expert=ep, expert_tensor=1), shape=EXPERTS, network=rate).forward[1]
        for ep in (8, 16)
        for rate in (100.0, 400.0)
    }
    assert times[8, 100.0] == times[8, 400.0] < times[16, 400.0] < times[16, 100.0]


def test_halves_of_backwards_with_experts():
    """I and W take what the whole does, and what it hides."""
    software = replace(FLASH, overlaps_tensor=False)
    asked = configuration(schedule="zb-h1", expert=4, expert_tensor=1)
    found = costs(asked, shape=EXPERTS, software=software, constants=replace(START, launch=0.0))
    for stage in range(4):
        both = found.backward_input[stage] + found.backward_weight[stage]
        assert both == pytest.approx(found.backward[stage], rel=0.02)


@pytest.mark.parametrize(("shape", "degrees"), [
    (LONG, {"data": 2, "context": 4}), (LONG, {"data": 1, "context": 8}), (EXPERTS, {"expert": 8, "expert_tensor": 1}),
    (EXPERTS, {"expert": 8, "expert_tensor": 2}), (MIXED, {"expert": 4, "context": 2, "data": 4}),
])  # fmt: skip
def test_a_faster_network_is_never_slower(shape, degrees):
    times = []
    for rate in (50.0, 200.0, 400.0, 450.0, 3600.0):
        found = costs(configuration(**degrees), shape=shape, network=rate)
        times.append((found.forward[1], found.backward[1], found.reduce_grad[1]))
    for kind in zip(*times, strict=True):
        assert list(kind) == sorted(kind, reverse=True)
