"""The planner: memory and time of one configuration."""

import pytest

from megatron.planner import Architecture, Cluster, Configuration
from megatron.planner.planner import Planner
from megatron.planner.software import Software
from megatron.planner.timing.first_principles import FirstPrinciples

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


@pytest.mark.parametrize("changes", [{"virtual": 3, "schedule": "interleaved"}, {"tensor": 16}, {"pipeline": 7}])
def test_refuses_what_megatron_refuses(changes):
    with pytest.raises(ValueError, match="divide"):
        planner().estimate(configuration(**changes))
