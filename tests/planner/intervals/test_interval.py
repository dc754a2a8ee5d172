"""Intervals of made-up residuals, where each number can be counted; and the refusals."""

import random
from dataclasses import replace

import pytest

from megatron.planner.intervals import Interval, Kind, NotValidated, Residual, interval_of
from megatron.planner.intervals.coverage import without_run, without_source
from megatron.planner.intervals.interval import FEWEST, quantiles

FLUSH = Kind(device="A100", attention="unfused attention", precision="16 bits", strategy="flush", several_nodes=True)
ONE_NODE = replace(FLUSH, several_nodes=False)
BPIPE = replace(FLUSH, strategy="bpipe")
V100 = replace(FLUSH, device="V100")
PRESSED = replace(FLUSH, under_pressure=True)


def runs(kind: Kind, *ratios: float, source: str = "a") -> list[Residual]:
    return [Residual(id=f"{kind} {source} {ratio}", source=source, ratio=ratio, kind=kind) for ratio in ratios]


NINE = (0.9, 0.95, 0.97, 0.98, 1.0, 1.01, 1.02, 1.05, 1.3)


def test_an_interval_takes_nine():
    """Of nine it is from the least to the largest, of nineteen from the second on either side."""
    assert FEWEST == 9
    assert quantiles(NINE) == (0.9, 1.3)
    assert quantiles([*range(1, 20)][::-1]) == (2, 18)
    found = interval_of(FLUSH, runs(FLUSH, *NINE))
    assert found == Interval(low=0.9, high=1.3, num_runs=9, group="flush, unfused attention, A100, several nodes")
    assert found.seconds(10.0) == (9.0, 13.0)
    assert interval_of(FLUSH, runs(FLUSH, *NINE[:8])) == NotValidated(
        "an interval takes 9 published runs, and of any schedule, overlap and GPU, unfused attention, one node or "
        "several only 8 were compared, which took 0.90 to 1.05 of the predicted times"
    )


@pytest.mark.parametrize(("count", "least"), [(9, 0.8), (14, 0.8), (99, 0.8)])
def test_eight_of_ten_are_inside(count, least):
    """Whatever the distribution: of ten thousand runs that come after as many as the interval is from, at least 80%;
    and not many more where these are many."""
    generator = random.Random(7)
    inside = 0
    for _ in range(10_000):
        *known, new = (generator.lognormvariate(0, 0.3) ** 3 for _ in range(count + 1))
        low, high = quantiles(known)
        inside += low <= new <= high
    assert least - 0.01 < inside / 10_000 < (0.82 if count == 99 else 0.9)


def test_few_runs_are_joined_by_wider_groups():
    """First other schedules on such GPUs, then other GPUs, then other networks; never runs under another pressure."""
    few = runs(BPIPE, 1.0, 1.01)
    narrow = interval_of(BPIPE, [*few, *runs(FLUSH, *NINE), *runs(V100, 2.0), *runs(PRESSED, *NINE)])
    assert (narrow.num_runs, narrow.high) == (11, 1.3) and narrow.group.startswith("any schedule, ")
    gpus = interval_of(BPIPE, [*few, *runs(V100, *NINE), *runs(ONE_NODE, 3.0)])
    assert (gpus.num_runs, gpus.high) == (11, 1.3) and "any schedule and GPU" in gpus.group
    nodes = interval_of(BPIPE, [*few, *runs(ONE_NODE, *NINE)])
    assert nodes.num_runs == 11 and nodes.group.endswith("one node or several")
    pressed = interval_of(PRESSED, [*runs(FLUSH, *NINE), *runs(PRESSED, *(2 * each for each in NINE))])
    assert (pressed.low, pressed.high) == (1.0, 2.6) and pressed.group.endswith(", slowed or borderline")
    assert "only 0 were compared" in interval_of(PRESSED, runs(FLUSH, *NINE)).reason


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (replace(FLUSH, device="B200"), "no published time on B200 was compared"),
        (replace(FLUSH, strategy="2bw"), "no published time of 2bw was compared"),
        (replace(FLUSH, attention="flash attention"), "no published time with flash attention was compared"),
        (replace(FLUSH, precision="32 bits"), "no published time in 32 bits was compared"),
        (replace(FLUSH, extras=("fully sharded",)), "no published time with fully sharded was compared"),
        (replace(BPIPE, device="V100"),
         "no published time of bpipe with unfused attention on V100 was compared"),
    ],
)  # fmt: skip
def test_what_was_never_compared_has_none(kind, reason):
    """However many others were; nor has a combination whose parts were."""
    assert interval_of(kind, [*runs(FLUSH, *NINE), *runs(BPIPE, *NINE), *runs(V100, 1.0)]) == NotValidated(reason)


def test_the_prediction_is_inside():
    """Also where all runs took longer, or none did."""
    later, sooner = (interval_of(FLUSH, runs(FLUSH, *(each + by for each in NINE))) for by in (0.5, -0.5))
    assert (later.low, later.high) == (1.0, 1.8) and (sooner.low, sooner.high) == (0.4, 1.0)


def test_coverage_leaves_out_a_run_or_a_source():
    """An outlier is outside without itself; a source that alone is far off is outside as a whole."""
    near = runs(FLUSH, *NINE, 1.03, source="near")
    far = runs(FLUSH, *(each + 1 for each in NINE), source="far")
    alone = without_run(near)
    assert (alone.num_runs, alone.num_inside, alone.num_without) == (10, 8, 0)
    apart = without_source([*near, *far])
    assert (apart.num_runs, apart.num_inside) == (19, 6)  # of near, what took longer than predicted
    assert without_source(near).num_without == 10


def test_what_goes_on_beside_the_rest_is_joined():
    """Where it was compared on such a GPU; and with nothing that has another feature."""
    hidden = replace(FLUSH, extras=("overlaps gradients", "FP8"))
    other = replace(FLUSH, extras=("overlaps weights", "cuda graphs", "FP8"))
    few = runs(hidden, 1.0)
    found = interval_of(hidden, [*few, *runs(other, *NINE), *runs(replace(FLUSH, extras=("overlaps gradients",)), 2.0)])
    assert (found.num_runs, found.high) == (10, 1.3)
    assert found.group == "any schedule and overlap, unfused attention, FP8, A100, several nodes"
    gpus = interval_of(hidden, [*few, *runs(replace(other, device="V100", several_nodes=False), *NINE)])
    assert gpus.num_runs == 10
    assert gpus.group == "any schedule, overlap and GPU, unfused attention, FP8, one node or several"
    never = interval_of(replace(hidden, device="V100"), [*few, *runs(other, *NINE)])
    assert isinstance(never, NotValidated)
    plain = replace(FLUSH, extras=("FP8",))
    assert interval_of(plain, runs(hidden, *NINE)).num_runs == 9  # what is not there need not be compared
    assert isinstance(interval_of(hidden, runs(plain, *NINE)), NotValidated)


def test_other_overlaps_of_a_gpu_are_nearer_than_other_gpus():
    """Runs of another GPU with the same overlaps do not widen the interval of a GPU that has enough without them."""
    hidden = replace(FLUSH, extras=("overlaps gradients",))
    elsewhere = replace(hidden, device="H100", several_nodes=False)
    few = runs(hidden, 1.02, 1.04)
    found = interval_of(
        hidden, [*few, *runs(replace(FLUSH, extras=("overlaps weights",)), *NINE), *runs(elsewhere, *[3.0] * 9)]
    )
    assert found.group == "any schedule and overlap, unfused attention, A100, several nodes"
    assert found.high <= 1.3
