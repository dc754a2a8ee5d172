"""How many layers are frozen."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.freezing import RULES, ByGradients, ByHand, FreezeSettings, LayerNorms

GROWING = tuple(float(layer + 1) for layer in reversed(range(12)))  # the last layer learns least: the bound decides


def test_the_bound_alone_is_the_papers_closed_form():
    """And it goes on to 11 of 12 layers, where a bound that is rounded each time stops at 10."""
    rule = ByGradients(12, 1 / 3)
    found = [rule.decide(GROWING) for _ in range(12)]
    assert found == [math.floor(min(12 * (1 - (2 / 3) ** interval), 11)) for interval in range(1, 13)]
    assert found[:6] == [4, 6, 8, 9, 10, 10] and found[-1] == 11
    rounded = 0
    for _ in range(50):
        rounded = math.floor(rounded + (12 - rounded) / 3)
    assert rounded == 10


def test_freezing_stops_at_the_layer_that_learns_least():
    """Frozen layers have no gradient, and are not asked."""
    rule = ByGradients(8, 0.5)
    assert rule.decide([5, 4, 1, 4, 5, 6, 7, 8]) == 2  # the bound is 4
    assert rule.decide([0, 0, 3, 2, 5, 6, 7, 8]) == 3
    assert rule.decide([0, 0, 0, 1, 5, 6, 7, 8]) == 3
    assert rule.decide([0, 0, 0, 9, 9, 9, 9, 1]) == 5  # half of what is left: 5.5
    assert rule.bound == 5.5


@given(st.integers(1, 20), st.floats(0.01, 0.99), st.data())
def test_frozen_layers_stay_and_one_is_trained(num_layers, alpha, data):
    rule, before = ByGradients(num_layers, alpha), 0
    norms = st.lists(
        st.floats(0, 1e3) | st.just(math.inf) | st.just(math.nan), min_size=num_layers, max_size=num_layers
    )
    for interval in range(1, 8):
        found = rule.decide(data.draw(norms))
        assert before <= found < num_layers
        assert found <= num_layers * (1 - (1 - alpha) ** interval) + 1e-9
        resumed = ByGradients(num_layers, alpha)
        resumed.load_state_dict(rule.state_dict())
        again = data.draw(norms)
        assert resumed.decide(again) == ByGradients(num_layers, alpha, rule.bound).decide(again)
        before = found


def test_by_hand():
    rule = ByHand(12, (0, 4, 6))
    assert [rule.decide(GROWING) for _ in range(5)] == [0, 4, 6, 6, 6]
    resumed = ByHand(12, (0, 4, 6))
    resumed.load_state_dict({"num_intervals": 1})
    assert resumed.decide(GROWING) == 4
    made = {name: type(make(FreezeSettings(12, 0.5, (0, 4)))) for name, make in RULES.items()}
    assert made == {"gradients": ByGradients, "schedule": ByHand}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ByGradients(4, 1.0), "alpha 1 is not a share of the layers"),
        (lambda: ByGradients(4, 0.0), "give a number between 0 and 1"),
        (lambda: ByHand(4, ()), "a schedule of frozen layers needs a number"),
        (lambda: ByHand(4, (0, 4)), "4 of 4 layers cannot be frozen after 0: .* give 0 to 3"),
        (lambda: ByHand(4, (2, 1)), "1 of 4 layers cannot be frozen after 2"),
        (lambda: ByGradients(4, 0.5).decide([1.0]), "1 norms are given for 4 layers"),
    ],
)
def test_sentences(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_norms_are_means_of_an_interval():
    """A batch that overflowed counts in none of them; an interval without a batch decides nothing."""
    norms = LayerNorms(2)
    norms.add([1.0, 4.0])
    norms.add([3.0, 0.0])
    norms.add([math.inf, 1.0])
    assert norms.take() == (2.0, 2.0)
    assert norms.take() == (math.inf, math.inf)
    assert ByGradients(2, 0.5).decide((math.inf, math.inf)) == 0
