"""Units in a row on ranks in a row, and stages of which none is half frozen."""

import math
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.stages import cut_at_frozen, cut_exactly, cut_greedily, cut_that_fits
from tests.draws import draws

WORK = st.lists(st.floats(0, 100), min_size=1, max_size=14)


def all_cuts(num_units, num_ranks):
    for ends in combinations(range(1, num_units), num_ranks - 1):
        borders = [0, *ends, num_units]
        yield tuple(end - begin for begin, end in pairwise(borders))


def busiest(work, counts):
    """The work of the busiest rank."""
    ends = list(accumulate(counts, initial=0))
    assert ends[-1] == len(work), "each unit is somewhere"
    return max(math.fsum(work[begin:end]) for begin, end in pairwise(ends))


@draws(200)
@given(WORK, st.data())
def test_no_cut_is_better(work, data):
    """Brute force over all cuts of up to 14 units, for any number of ranks."""
    num_ranks = data.draw(st.integers(1, len(work)))
    found = cut_exactly(work, num_ranks)
    assert len(found) == num_ranks and sum(found) == len(work) and min(found) >= 1
    best = min(busiest(work, each) for each in all_cuts(len(work), num_ranks))
    assert busiest(work, found) <= best * (1 + 1e-12)
    greedy = cut_greedily(work, num_ranks)
    assert len(greedy) == num_ranks and sum(greedy) == len(work) and min(greedy) >= 1


@draws(100)
@given(WORK, st.data())
def test_no_cut_that_fits_is_better(work, data):
    """Brute force over the cuts in which each rank has as many units as it may have."""
    num_ranks = data.draw(st.integers(1, len(work)))
    most = data.draw(st.lists(st.integers(1, 5), min_size=num_ranks, max_size=num_ranks))
    found = cut_that_fits(work, num_ranks, lambda rank, begin, end: end - begin <= most[rank])
    fitting = [each for each in all_cuts(len(work), num_ranks) if all(a <= b for a, b in zip(each, most, strict=True))]
    if found is None:
        assert not fitting
    else:
        assert found in fitting
        assert busiest(work, found) <= min(busiest(work, each) for each in fitting) * (1 + 1e-12)


def test_cuts():
    work = [5, 1, 1, 1, 4, 3]
    assert cut_exactly(work, 3) == (2, 3, 1) and busiest(work, (2, 3, 1)) == 6
    assert cut_greedily(work, 3) == (1, 4, 1) and busiest(work, (1, 4, 1)) == 7
    assert cut_exactly([1.0] * 12, 4) == cut_greedily([1.0] * 12, 4) == (3, 3, 3, 3)
    assert cut_exactly([0.024] * 12, 8) == (2, 2, 2, 2, 1, 1, 1, 1), "whatever the last bits of sums are"
    frozen = [1.0] * 4 + [3.0] * 8  # forwards only, and with backwards
    assert busiest(frozen, cut_exactly(frozen, 4)) == 9.0


@pytest.mark.parametrize(
    ("work", "num_ranks", "sentence"),
    [
        ([1, 2], 3, "2 units cannot be shared out to 3 ranks"),
        ([1, 2], 0, "2 units cannot be shared out to 0 ranks"),
        ([1, -2], 1, "unit 1 has work -2"),
        ([float("nan")], 1, "unit 0 has work nan"),
    ],
)
def test_sentences(work, num_ranks, sentence):
    for cut in (cut_exactly, cut_greedily):
        with pytest.raises(ValueError, match=sentence):
            cut(work, num_ranks)


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
    stages = cut_at_frozen((2, 2, 2, 2), num_frozen)
    assert (stages.layers, stages.rank_of_stage) == (layers, ranks)
    assert sum(stages.layers[: stages.num_frozen]) == num_frozen


@pytest.mark.parametrize(
    ("layers", "num_frozen", "said"),
    [((3, 0), 0, "have 3, 0 layers"), ((2, 2), 4, "4 of 4 layers cannot be"), ((2, 2), -1, "-1 of 4 layers cannot be")],
)
def test_what_cannot_be(layers, num_frozen, said):
    with pytest.raises(ValueError, match=said):
        cut_at_frozen(layers, num_frozen)
