"""Costs from first principles: what they hold, for whom, and what changes them."""

import math
from dataclasses import replace

import pytest

from megatron.planner import Architecture, Cluster, Configuration
from megatron.planner.job.software import MEGATRON_CORE, MEGATRON_V3
from megatron.planner.planner import Planner
from megatron.planner.time.calibration import START
from megatron.planner.time.first_principles import FirstPrinciples

SHAPE = Architecture.gpt3(
    num_layers=48, hidden_size=6144, num_attention_heads=48, sequence_length=2048, vocabulary_size=51200
)  # fmt: skip
CLUSTER = Cluster(gpu="A100-80", nodes=4, bandwidth={"between_nodes": 100.0})


def configuration(**changes: object) -> Configuration:
    values = {"tensor": 4, "pipeline": 8, "micro_batch_size": 2, "global_batch_size": 64}
    return Configuration(**values | changes)


def costs(asked: Configuration, *, software=MEGATRON_V3, constants=START, cluster=CLUSTER, shape=SHAPE):
    model = FirstPrinciples(shape, cluster, software, constants)
    return model.costs(asked, Planner(shape, cluster).layers(asked))


def test_each_stage_has_its_layers_and_the_ends_have_more():
    even, uneven = costs(configuration()), costs(configuration(layers=(5, 6, 6, 6, 6, 6, 7, 6)))
    assert even.forward[1] == pytest.approx(even.forward[5])
    assert even.forward[0] > even.forward[1] and even.forward[7] > even.forward[0]
    layer = uneven.forward[6] - uneven.forward[5]
    assert layer == pytest.approx(even.forward[1] / 6, rel=0.05) and uneven.forward[1] == pytest.approx(even.forward[1])


def test_recomputation_is_in_the_backward():
    none, attention, layer = (costs(configuration(recompute=scope)) for scope in ("none", "attention", "layer"))
    assert none.forward == attention.forward == layer.forward
    assert none.backward[3] < attention.backward[3] < layer.backward[3]
    assert layer.backward[3] - none.backward[3] == pytest.approx(none.forward[3], rel=0.02)


def test_transfers_are_in_the_times_unless_they_overlap():
    """The one-way transfers of a microbatch are counted once, wherever they are counted."""
    shown = costs(configuration(), software=replace(MEGATRON_V3, overlaps_transfers=True))
    held = costs(configuration())
    assert shown.forward_bytes > 0 and held.forward_bytes == 0
    seconds = sum(shown.forward_bytes / rate for rate in shown.bandwidth)
    assert sum(held.forward) - sum(shown.forward) == pytest.approx(seconds)


def test_updates():
    """Distributed optimizers step a share each, reduce gradients once around the ring and gather weights in the step;
    other replicas reduce twice around; nothing is reduced alone. Weights are as wide as gradients here.
    """
    alone = costs(configuration())
    assert set(alone.reduce_grad) == {0.0} and alone.reduce_embed > 0
    shared = [configuration(pipeline=4, data=2, distributed_optimizer=each) for each in (False, True)]
    whole, split = map(costs, shared)
    gathering = split.reduce_grad[1]
    assert split.step[1] - gathering == pytest.approx(whole.step[1] / 2)
    assert whole.reduce_grad[1] == pytest.approx(2 * split.reduce_grad[1]) and gathering > 0
    seen, hidden = (
        costs(shared[0], software=replace(MEGATRON_CORE, overlaps_gradients=each)).reduce_grad for each in (False, True)
    )
    assert hidden[1:] == seen[1:] and hidden[0] < seen[0]


def test_predictions_are_priced_by_what_they_move():
    """A step on copies of masters and moments in FP32: 66 bytes of an element, where STEP then moves 32. Before it the
    norm of all gradients, but where every stage reads as many. With the distributed optimizer PREDICT gathers, and STEP
    does not.
    """
    asked = {"pipeline": 4, "data": 2, "schedule": "2bw"}
    plain, predicted = (
        costs(configuration(**asked, provisional=mode), software=MEGATRON_CORE) for mode in ("off", "stage")
    )
    assert set(plain.predict) == set(plain.hold) == {0.0}
    for stage in range(4):
        assert predicted.step[stage] == pytest.approx(plain.step[stage] * 32 / 34)
        assert predicted.predict[stage] == pytest.approx(predicted.step[stage] * (66 + 4) / 32)
        assert predicted.hold[stage] == pytest.approx(predicted.step[stage] * 8 / 32)
    assert predicted.forward == plain.forward and predicted.reduce_grad == plain.reduce_grad
    halves = [
        costs(configuration(**asked, provisional=mode, distributed_optimizer=True), software=MEGATRON_CORE)
        for mode in ("off", "stage")
    ]
    gathering = halves[0].step[1] - plain.step[1] / 2
    assert gathering > 0 and halves[1].step[1] == pytest.approx(predicted.step[1] / 2)
    assert halves[1].predict[1] == pytest.approx(predicted.step[1] * (66 / 2 + 4) / 32 + gathering)
    assert halves[1].hold == predicted.hold
    mean = configuration(**asked, provisional="stage", provisional_reduce=True, distributed_optimizer=True)
    found = costs(mean, software=MEGATRON_CORE)  # a replica has the mean of its shards alone
    assert found.predict[1] == pytest.approx(predicted.predict[1] / 2 + gathering)
    narrow = costs(configuration(**asked, provisional="stage"))  # 16-bit gradients, which are widened
    assert narrow.predict[1] == pytest.approx(predicted.step[1] * (72 + 2) / 32)
    uniform = costs(configuration(**asked, provisional="uniform", provisional_microbatches=1), software=MEGATRON_CORE)
    assert uniform.predict[1] == pytest.approx(predicted.step[1] * 66 / 32)
    laptops = Cluster(gpu="cpu", nodes=4, bandwidth={"between_nodes": 1.0})
    on_cpu = costs(configuration(**asked, provisional="stage"), software=MEGATRON_CORE, cluster=laptops)
    assert on_cpu.predict[1] == pytest.approx(on_cpu.step[1] * (18 + 4) / 32)  # one pass


def test_moves_of_balanced_activations():
    near, far = (costs(configuration(schedule="bpipe", rank_mapping=each)) for each in ("pair-adjacent", "standard"))
    assert set(costs(configuration()).evict) == {0.0}
    assert 0 < near.evict[0] < far.evict[0]


def test_optimized_mapping_is_no_worse_for_edges_and_pairs():
    asked = configuration(pipeline=4, data=2, schedule="bpipe")
    by_name = {name: costs(replace(asked, rank_mapping=name)) for name in ("standard", "pair-adjacent", "optimized")}
    slowest = {name: max(each.evict) for name, each in by_name.items()}
    assert slowest["optimized"] <= slowest["standard"]
    assert all(math.isfinite(rate) and rate > 0 for each in by_name.values() for rate in each.bandwidth)


def test_the_slower_of_host_and_device_decides():
    """Tiny layers take as long as their kernels are issued."""
    tiny = Architecture.gpt3(
        num_layers=8, hidden_size=64, num_attention_heads=4, sequence_length=64, vocabulary_size=512
    )  # fmt: skip
    asked = configuration(tensor=1, micro_batch_size=1, data=4)
    slow, fast = (costs(asked, shape=tiny, constants=replace(START, launch=each)) for each in (30e-6, 3e-6))
    assert slow.forward[1] == pytest.approx(10 * fast.forward[1], rel=0.2)


@pytest.mark.parametrize(
    ("name", "value"), [("product_efficiency", 0.4), ("memory_efficiency", 0.3), ("tensor_efficiency", 0.2)]
)
def test_every_constant_matters(name, value):
    assert (
        costs(configuration(), constants=replace(START, **{name: value})).forward[2] > costs(configuration()).forward[2]
    )


@pytest.mark.parametrize("degrees", [{"tensor": 16, "pipeline": 2}, {"pipeline": 4, "data": 2}, {"schedule": "bpipe"}])
def test_a_faster_network_is_never_slower(degrees):
    """Up to the links of a GPU in its node and beyond; what crosses nodes takes those links, too."""
    times = []
    for rate in (50.0, 100.0, 200.0, 290.0, 299.0, 300.0, 800.0):
        cluster = Cluster(gpu="A100-80", nodes=4, bandwidth={"between_nodes": rate})
        found = costs(configuration(**degrees), cluster=cluster)
        times.append((found.forward[0], found.reduce_grad[0], found.evict[0]))
    for kind in zip(*times, strict=True):
        assert list(kind) == sorted(kind, reverse=True)


def test_refuses_another_number_of_gpus():
    with pytest.raises(ValueError, match="takes 64 GPUs, the cluster has 32"):
        costs(configuration(pipeline=16))
