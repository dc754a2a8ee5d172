"""The planner: memory and time of one configuration."""

import pytest

from megatron.planner import Architecture, Cluster, Configuration
from megatron.planner.job.software import Software
from megatron.planner.planner import Planner
from megatron.planner.time import iteration
from megatron.planner.time.event_graph import EventGraph, event_graph
from megatron.planner.time.first_principles import FirstPrinciples

MODEL = Architecture.gpt3(
    num_layers=80, hidden_size=9984, num_attention_heads=104, sequence_length=2048, vocabulary_size=51200
)
CLUSTER = Cluster(gpu="A100-80", nodes=4, bandwidth={"between_nodes": 100.0})


def planner(**software: object) -> Planner:
    chosen = Software(**software)
    return Planner(MODEL, CLUSTER, FirstPrinciples(MODEL, CLUSTER, chosen), chosen)


def configuration(**changes: object) -> Configuration:
    values = {"tensor": 4, "pipeline": 8, "micro_batch_size": 2, "global_batch_size": 128, "sequence_parallel": True}
    return Configuration(**values | changes)


def test_operations_are_the_papers():
    """Korthikanti et al. 2022, appendix A: 72 B L s h^2 (1 + s / 6h + V / 12 h L)."""
    b, layers, s, h, v = 128, 80, 2048, 9984, 51200
    paper = 72 * b * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))
    assert MODEL.operations(b) == pytest.approx(paper, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"virtual": 11, "schedule": "interleaved"}, "80 layers are fewer than 88 stages"), ({"tensor": 16}, "divide")],
)
def test_refuses_what_megatron_refuses(changes, reason):
    with pytest.raises(ValueError, match=reason):
        planner().estimate(configuration(**changes))


def test_uneven_layers_are_taken_as_configured():
    layers = (9, 10, 10, 10, 10, 10, 11, 10)
    found = planner().estimate(configuration(layers=layers))
    assert tuple(rank.layers[0] for rank in found.memory) == layers
    assert found.seconds > planner().estimate(configuration()).seconds
    with pytest.raises(ValueError, match="are 81, not the model's 80"):
        planner().estimate(configuration(layers=(11, *layers[1:-1], 9)))
    with pytest.raises(ValueError, match="not a number for each of 8 stages"):
        configuration(layers=(40, 40))


def test_mfu_is_model_operations_over_the_peak():
    found = planner().estimate(configuration())
    assert found.mfu == pytest.approx(MODEL.operations(128) / (found.seconds * 32 * 312e12))


def test_2bw_has_no_bubble_and_more_memory():
    flush, two = (planner().estimate(configuration(schedule=name)) for name in ("flush", "2bw"))
    assert two.seconds < flush.seconds and two.bubble < 0.02 < flush.bubble
    assert two.memory[0].total > flush.memory[0].total


@pytest.mark.full
def test_thousands_of_configurations_look_at_few_programs(monkeypatch):
    """Of up to 128 stages and 3,072 microbatches: a price is a closed form, or of a few short batches that all alike
    share. How long that takes, benchmarks/search_scale.py measures.
    """
    looked_at = []
    graph = EventGraph.of
    monkeypatch.setattr(EventGraph, "of", staticmethod(lambda *asked: looked_at.append(graph(*asked)) or looked_at[-1]))
    event_graph.cache_clear()
    monkeypatch.setattr(iteration, "_simulate", None)  # is not asked at all
    model = Architecture.gpt3(
        num_layers=128, hidden_size=25600, num_attention_heads=160, sequence_length=2048, vocabulary_size=51200
    )  # fmt: skip
    cluster = Cluster(gpu="A100-80", nodes=384, bandwidth={"between_nodes": 200.0})
    asked = [
        Configuration(
            tensor=t, pipeline=p, data=3072 // (t * p), virtual=v, micro_batch_size=size, global_batch_size=3072,
            recompute=scope, schedule=schedule, sequence_parallel=True, distributed_optimizer=split,
        )
        for t in (4, 8)
        for p in (16, 32, 64)
        for schedule, v in (("flush", 1), ("2bw", 1), ("bpipe", 1), ("interleaved", 2))
        for size in (1, 2)
        for scope in ("none", "attention", "layer")
        for split in (False, True)
    ]  # fmt: skip
    large = Planner(model, cluster, FirstPrinciples(model, cluster))
    refused = 0
    for each in asked:
        try:
            large.estimate(each)
        except ValueError:
            refused += 1  # an interleaved batch that does not fill its groups
    assert refused < len(asked) / 4
    computations = sum(len(each.events[0]) for each in looked_at)
    assert len(looked_at) < len(asked) / 15 and computations < 1_500 * len(asked), (len(looked_at), computations)
