"""Stages of a pipeline whose first layers are frozen."""

import pytest

from megatron.elastic.stages import stages_of


@pytest.mark.parametrize(
    ("num_frozen", "layers", "ranks"),
    [
        (0, (2, 2, 2, 2), (0, 1, 2, 3)),
        (2, (2, 2, 2, 2), (0, 1, 2, 3)),
        (3, (2, 1, 1, 2, 2), (0, 1, 1, 2, 3)),
        (7, (2, 2, 2, 1, 1), (0, 1, 2, 3, 3)),
    ],
)
def test_no_stage_is_half_frozen(num_frozen, layers, ranks):
    stages = stages_of((2, 2, 2, 2), num_frozen)
    assert (stages.layers, stages.rank_of_stage) == (layers, ranks)
    assert sum(stages.layers[: stages.num_frozen]) == num_frozen


@pytest.mark.parametrize(
    ("layers", "num_frozen", "said"),
    [((3, 0), 0, "have 3, 0 layers"), ((2, 2), 4, "4 of 4 layers cannot be"), ((2, 2), -1, "-1 of 4 layers cannot be")],
)
def test_what_cannot_be(layers, num_frozen, said):
    with pytest.raises(ValueError, match=said):
        stages_of(layers, num_frozen)
