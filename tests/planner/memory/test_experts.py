"""Layers with experts: which they are, and how many parameters they have."""

from dataclasses import replace

import pytest

from megatron.planner import Architecture
from megatron.planner.memory.architecture import ExpertDegrees, Experts
from megatron.planner.memory.parameters import head_parameters, stage_expert_parameters, stage_parameters
from tests import workers
from tests.planner.memory.expert_layers import shape_of

SHAPES = [
    shape_of(), shape_of(gated=False), shape_of(count=8, topk=1, ffn_hidden_size=64, shared_ffn_hidden_size=96),
    shape_of(num_layers=5, layers=2), shape_of(num_layers=3, layers=(0, 1, 1)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tensor", "expert", "expert_tensor", "ranks"),
    [(1, 1, 1, 1), (2, 1, 2, 2), (1, 2, 1, 2), (2, 2, 1, 2), (2, 2, 2, 4)],
)
def test_parameters_are_those_of_megatron_core(tensor, expert, expert_tensor, ranks):
    """Every rank has as many as counted, of experts and in all, however experts lie on ranks."""
    degrees = ExpertDegrees(parallel=expert, tensor=expert_tensor)
    results = workers.run(
        ranks, "tests.planner.memory.expert_layers:parameters_case", tensor=tensor, expert=expert,
        expert_tensor=expert_tensor, shapes=SHAPES,
    )  # fmt: skip
    for counts in results:
        for shape, (of_all, of_experts) in zip(SHAPES, counts, strict=True):
            layers = (0, shape.num_layers, 0)  # the ends have embedding and head
            assert stage_parameters(shape, tensor, layers, degrees)[1] == of_all, shape.experts
            assert stage_expert_parameters(shape, layers, degrees)[1] == of_experts, shape.experts


MIXTRAL = Architecture(
    num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8,
    kv_channels=128, sequence_length=4096, vocabulary_size=32000, tied_embeddings=False, gated=True,
    linear_biases=False, norm_vectors=1, hidden_dropout=False, attention_dropout=False,
    experts=Experts(count=8, topk=2, ffn_hidden_size=14336),
)  # fmt: skip


def test_mixtral():
    """Jiang et al. 2024: 47 billion parameters, of which a token uses 13 (46.7 and 12.9 in the announcement)."""
    of_all, experts = (count(MIXTRAL) for count in (_parameters, _expert_parameters))
    assert of_all == pytest.approx(46.7e9, rel=2e-3)
    assert of_all - experts * 6 / 8 == pytest.approx(12.9e9, rel=2e-3)


def test_active_operations():
    """6 operations a token and active matrix element, without scores: the layers' of Mixtral and its output layer."""
    scores = 6 * 4096 * 32 * 2 * 4096 * 4096
    active = _parameters(MIXTRAL) - _expert_parameters(MIXTRAL) * 6 / 8 - 32000 * 4096  # a lookup takes no product
    norms = 32 * 2 * 4096 + 4096
    assert MIXTRAL.operations(1) - scores == pytest.approx(6 * 4096 * (active - norms))
    mixed = replace(MIXTRAL, experts=replace(MIXTRAL.experts, layers=2))
    dense = replace(MIXTRAL, experts=None)
    assert mixed.operations(1) == pytest.approx((MIXTRAL.operations(1) + dense.operations(1)) / 2)


def _parameters(shape: Architecture) -> int:
    return sum(stage_parameters(shape, 1, (shape.num_layers,)))


def _expert_parameters(shape: Architecture) -> int:
    return sum(stage_expert_parameters(shape, (shape.num_layers,), ExpertDegrees()))


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (1, (2, 3), (2, 3)),
        (2, (2, 3, 1), (1, 2, 0)),  # layers 0, 2 and 4
        (3, (1, 1, 1, 3), (1, 0, 0, 1)),
        ((0, 1, 1, 0), (2, 2), (1, 1)),
        (2, (1.5, 1.5), (1, 1)),
        (2, (2.5, 2.5), (1.5, 1.5)),  # half of layer 2 each
    ],
)
def test_layers_of_stages(layers, stages, expected):
    experts = Experts(count=4, topk=1, ffn_hidden_size=8, layers=layers)
    assert experts.of_stages(stages) == expected


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"count": 0}, "count of experts is 0"), ({"topk": 5}, "a token goes to 5 of 4 experts"),
        ({"layers": 0}, "every 0th layer"), ({"layers": (1, 2)}, "the pattern of layers"),
        ({"layers": (1, 0, 1)}, "has 3 entries, and the model 2 layers"), ({"capacity_factor": 0.0}, "capacity factor"),
        ({"shared_ffn_hidden_size": -1}, "the shared expert is -1 columns"),
    ],
)  # fmt: skip
def test_refusals(wrong, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        shape_of(**wrong)
    assert "; " in str(refused.value)


def test_the_head_is_none_of_a_layer():
    assert stage_parameters(MIXTRAL, 1, (31, 1))[1] == (
        stage_parameters(MIXTRAL, 1, (1, 31))[0] - 32000 * 4096 + head_parameters(MIXTRAL, 1, holds_embedding=False)
    )
