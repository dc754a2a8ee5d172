"""Fronts and knees of made-up points, where both can be seen."""

from types import SimpleNamespace

import pytest

from megatron.planner.search.outcome import Budget, Sweep, SweepPoint, front, knee


def point(num_gpus: int, seconds: float, *, length: int = 1000, tokens=1e9, price=2.0) -> SweepPoint:
    bill = Budget(num_gpus=num_gpus, sequence_length=length, tokens=tokens, price_per_gpu_hour=price).bill(
        seconds=seconds, sequences=64_000 // length
    )
    best = SimpleNamespace(bill=bill, estimate=SimpleNamespace(seconds=seconds))
    return SweepPoint(num_gpus=num_gpus, sequence_length=length, best=best)


def test_a_curve_that_bends_once_has_its_knee_there():
    """Costs stay as they are up to 128 GPUs, and double with each doubling from there."""
    curve = [point(16, 80.0), point(32, 41.0), point(64, 21.0), point(128, 11.0), point(256, 9.5), point(512, 9.0)]
    sweep = Sweep(points=tuple(curve), tokens=1e9, currency="USD")
    assert [each.num_gpus for each in sweep.fronts[1000]] == [512, 256, 128, 64, 32, 16]
    assert sweep.knees[1000].num_gpus == 128
    assert [sweep.remarks(each) for each in curve] == [("cheapest",), (), (), ("knee",), (), ("fastest",)]


@pytest.mark.parametrize("place", [1, 2, 3])
def test_the_knee_is_farthest_from_the_chord(place):
    """Of a front with one corner it is the corner, in whatever units time and cost are."""
    steps = [(-100.0, 1.0)] * (4 - place) + [(-1.0, 100.0)] * place  # from the cheapest and slowest on
    time, cost, curve = 1000.0, 1000.0, [(1000.0, 1000.0)]
    for faster, dearer in steps:
        time, cost = time + faster, cost + dearer
        curve.append((time, cost))
    for scale in (1.0, 86_400.0):
        ascending = [(scale * time, cost / scale) for time, cost in reversed(curve)]
        assert knee(ascending) == place


def test_a_straight_line_has_none():
    """Nor has one of two points, nor one that bulges away from the origin."""
    assert knee([(1, 8), (2, 7), (4, 5), (8, 1)]) is None
    assert knee([(1, 2), (2, 1)]) is None
    assert knee([(1.0, 8.0), (4.0, 7.0), (8.0, 1.0)]) is None
    assert knee([(1.0, 8.0), (2.0, 2.0), (8.0, 1.0)]) == 1


def test_what_another_beats_is_no_part_of_the_front():
    """Slower and dearer; of equals the fewer GPUs stay."""
    slow, small, large = point(64, 30.0), point(32, 40.0), point(128, 20.0)
    worse = point(256, 25.0)
    assert front([worse, large, small, slow]) == [large, slow, small]
    sweep = Sweep(points=(small, slow, large, worse), tokens=1e9, currency="USD")
    assert sweep.remarks(worse) == ("not on the Pareto front: 128 GPUs are at least as fast and as cheap",)


def test_units():
    """Days and money of all tokens; without tokens of an iteration; without a price in GPU hours."""
    whole = point(64, 30.0)
    assert (whole.time, whole.cost) == (whole.best.bill.days, whole.best.bill.cost)
    one = point(64, 30.0, tokens=None)
    assert (one.time, one.cost) == (30.0, pytest.approx(30 * 64 * 2 / 3600))
    assert point(64, 30.0, tokens=None, price=None).cost == pytest.approx(30 * 64 / 3600)
    assert point(64, 30.0, price=None).cost == whole.best.bill.gpu_hours
    names = [(each.time_name, each.cost_name) for each in (
        Sweep(points=(), tokens=1.0, currency="EUR"), Sweep(points=(), tokens=1.0), Sweep(points=(), currency="EUR"),
        Sweep(points=()),
    )]  # fmt: skip
    assert names == [
        ("days", "EUR"), ("days", "GPU hours"), ("s/iteration", "EUR/iteration"),
        ("s/iteration", "GPU hours/iteration"),
    ]  # fmt: skip


def test_each_sequence_length_is_a_curve():
    """With a front and a knee of its own; what cannot run is on none, and says why."""
    one = [point(16, 80.0), point(32, 41.0), point(64, 38.0)]
    other = [point(16, 90.0, length=2000), SweepPoint(num_gpus=32, sequence_length=2000, best=None, reason="too large")]
    sweep = Sweep(points=(*one, *other), tokens=1e9, currency="USD")
    assert {length: len(points) for length, points in sweep.curves.items()} == {1000: 3, 2000: 1}
    assert set(sweep.knees) == {1000} and sweep.knees[1000].num_gpus == 32
    assert sweep.remarks(other[1]) == ("too large",) and sweep.remarks(other[0]) == ("fastest", "cheapest")
