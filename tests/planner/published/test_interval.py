"""Intervals of made-up residuals, where each number can be counted; and the refusals."""

import math
import random
from dataclasses import replace

import pytest

from megatron.planner.published.interval import (
    FEWEST,
    FEWEST_SOURCES,
    LEVEL,
    Interval,
    NotValidated,
    error_of_sources,
    interval_of,
    quantiles,
    without_run,
    without_source,
)
from megatron.planner.published.residuals import Kind, Residual

FLUSH = Kind(device="A100", attention="unfused attention", precision="16 bits", strategy="flush", several_nodes=True)
ONE_NODE = replace(FLUSH, several_nodes=False)
BPIPE = replace(FLUSH, strategy="bpipe")
V100 = replace(FLUSH, device="V100")
PRESSED = replace(FLUSH, under_pressure=True)


def runs(kind: Kind, *ratios: float, source: str = "Ours") -> list[Residual]:
    return [Residual(id=f"{kind} {source} {ratio}", source=source, ratio=ratio, kind=kind) for ratio in ratios]


NINE = (0.9, 0.95, 0.97, 0.98, 1.0, 1.01, 1.02, 1.05, 1.3)
FOUR = [
    *runs(FLUSH, 1.01, 1.2, source="A (2021), Table 1"),
    *runs(FLUSH, 1.02, source="A (2021), Table 2"),
    *runs(ONE_NODE, 1.1, 1.15, source="B"),
    *runs(BPIPE, 0.9, source="C"),
    *runs(V100, *[1.25, 1.26] * 20, source="D"),
]


def test_an_interval_of_one_source_takes_nine_runs():
    """Of nine it is from the least to the largest, of nineteen from the second on either side."""
    assert FEWEST == 9
    assert quantiles(NINE) == (0.9, 1.3)
    assert quantiles([*range(1, 20)][::-1]) == (2, 18)
    found = interval_of(FLUSH, runs(FLUSH, *NINE))
    assert found == Interval(low=0.9, high=1.3, num_runs=9, group="Ours, of such a kind")
    assert found.seconds(10.0) == (9.0, 13.0)
    assert interval_of(FLUSH, runs(FLUSH, *NINE[:8])) == NotValidated(
        "an interval takes 9 published runs, and of such a kind only 8 were compared, which took 0.90 to 1.05 of the "
        "predicted times"
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


def test_sources_count_alike():
    """Of four sources all of each count, here 1.26 of D. With a fifth, two thirds of one may be farther off."""
    assert FEWEST_SOURCES == 4
    assert error_of_sources(FOUR) == pytest.approx(math.log(1.26))
    for more in (1, 100):
        near = runs(FLUSH, *(1 + index / 1e4 for index in range(more)), source="E")
        assert error_of_sources([*FOUR, *near]) == pytest.approx(math.log(1.26))  # 0.8 of 6 are 4.8 of 5 sources
    five = [run for run in [*FOUR, *runs(FLUSH, 1.0, source="E"), *runs(FLUSH, 1.0, source="F")] if run.source != "D"]
    far = [*five, *runs(FLUSH, 1.11, 3.0, source="D")]  # 0.8 of 7 are 5.6 of 6: all of the others, and 0.6 of D's
    assert error_of_sources(far) == pytest.approx(math.log(3.0))
    assert error_of_sources([*far, *runs(FLUSH, 1.12, source="D")]) == pytest.approx(math.log(1.2))
    found = interval_of(FLUSH, FOUR)
    assert (found.low, found.high) == (pytest.approx(1 / 1.26), pytest.approx(1.26))
    assert (found.num_runs, found.group) == (46, "4 sources")


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_sources", [4, 9, 39])
def test_eight_of_ten_runs_of_another_source_are_inside(num_sources):
    """Whatever the sources' own bias, spread and numbers of runs. Intervals of all runs alike would hold far fewer."""
    generator = random.Random(11)
    inside, alike = 0, 0
    for _ in range(3_000):
        *known, (new, *_) = (_source(generator, f"S{letter}") for letter in map(chr, range(97, 98 + num_sources)))
        known = [run for source in known for run in source]
        inside += abs(math.log(new.ratio)) <= error_of_sources(known)
        ordered = sorted(abs(math.log(run.ratio)) for run in known)
        alike += abs(math.log(new.ratio)) <= ordered[int(LEVEL * len(ordered))]
    assert LEVEL - 0.02 < inside / 3_000 < (0.83 if num_sources == 39 else 0.95)
    assert alike < inside - 60 or num_sources == 39


def _source(generator: random.Random, name: str) -> list[Residual]:
    """The farther off a source is, the fewer runs it has."""
    bias = generator.gauss(0, 0.1)
    count = 1 + int(0.5 / (0.01 + abs(bias)))
    return runs(FLUSH, *(math.exp(generator.gauss(bias, 0.02)) for _ in range(count)), source=name)


def test_two_sources_are_too_few():
    two = [run for run in FOUR if run.source.startswith("A")] + runs(BPIPE, *NINE, source="C")
    assert interval_of(FLUSH, two).reason == (
        "an interval takes 4 sources, or one alone, and of 2 sources only 12 were compared, which took 0.90 to 1.30 of "
        "the predicted times"
    )


def test_pressure_is_apart():
    assert interval_of(PRESSED, [*FOUR, *runs(PRESSED, 1.0)]).reason == (
        "an interval takes 9 published runs, and of such a kind, slowed or borderline only 1 was compared, which took "
        "1.00 to 1.00 of the predicted times"
    )
    slow = [replace(run, kind=replace(run.kind, under_pressure=True), ratio=2 * run.ratio) for run in FOUR]
    found = interval_of(PRESSED, [*FOUR, *slow])
    assert (found.high, found.group) == (pytest.approx(2.52), "4 sources, slowed or borderline")


def test_features_widen():
    """Where the runs that have them are farther off; not where they are nearer. Overlaps beside the rest are none."""
    fp8 = replace(FLUSH, extras=("overlaps gradients", "FP8"))
    other = replace(FLUSH, extras=("cuda graphs", "FP8"))
    far = runs(other, *(each * 1.5 for each in NINE), source="A")
    found = interval_of(fp8, [*FOUR, *far, *runs(fp8, 1.0)])
    assert (found.low, found.high) == (pytest.approx(1 / 1.53), pytest.approx(1.95))
    assert (found.num_runs, found.group) == (56, "5 sources; 10 with FP8")
    assert interval_of(fp8, [*FOUR, *runs(other, *[1.0] * 8), *runs(fp8, 1.0)]).high == pytest.approx(1.26)
    hidden = replace(FLUSH, extras=("overlaps gradients",))
    assert interval_of(hidden, [*FOUR, *runs(hidden, 1.0, source="A")]).group == "4 sources"
    assert interval_of(fp8, [*FOUR, *runs(fp8, 1.0)]).reason.startswith(
        "an interval takes 9 published runs, and with FP8 only 1 was compared"
    )


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
    near = runs(FLUSH, *NINE, 1.03)
    alone = without_run(near)
    assert (alone.num_runs, alone.num_inside, alone.num_without) == (10, 8, 0)
    assert without_source(near).num_without == 10
    far = runs(FLUSH, *(each + 1 for each in NINE), source="far")
    apart = without_source([*FOUR, *far])  # of A and B the limit is far's 2.3; the kinds of C and D are theirs alone
    assert (apart.num_runs, apart.num_inside, apart.num_without) == (14, 5, 41)
