"""zb-h2, interleaved-zb, v-half and v-min: their turns, their memory, their bubbles, and what they refuse."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.program.edges import v
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.controllable_memory import VHalf, VMin
from megatron.pipeline.simulate import Costs, simulate
from tests.draws import draws
from tests.pipeline.strategies import kinds_of

FLAGS = st.fixed_dictionaries({name: st.booleans() for name in ("recompute", "data_parallel", "tied_embeddings")})
BATCHES = st.lists(st.integers(1, 20), min_size=1, max_size=3)
UNITS = Costs(forward=1, backward=2)
HELD = {"v-half": lambda p: 2 * ((p + 2) // 2), "v-min": lambda p: 2 * ((p + 4) // 3)}
"""Microbatches at the two stages of a rank, where 1F1B's first rank has as much as 2p of them."""


def in_a_v(name: str, p: int, **flags: object) -> Schedule:
    return Schedule.preset(name, num_stages=2 * p, **flags)


def interleaved(name: str, p: int, num_virtual_stages: int, **flags: object) -> Schedule:
    return Schedule.preset(
        name, num_stages=p * num_virtual_stages, num_virtual_stages=num_virtual_stages, **flags
    )  # fmt: skip


def proved(schedule: Schedule, batches: list[int]):
    """The checker's report, within the bounds of the schedule, which hold for any number of the first batch, too."""
    bounds = {
        "max_saved": schedule.max_saved_microbatches(batches), "max_saved_on_rank": schedule.max_saved_on_rank(batches)
    }  # fmt: skip
    check_periodic(schedule.build_periodic(batches[0]), **bounds)
    return check(schedule.build(batches), **bounds)


def idle(schedule: Schedule, m: int, costs: Costs = UNITS) -> float:
    """Seconds for which a rank is idle in a batch."""
    return simulate(schedule.build((m,)), costs).idle(0)


# --- v-half and v-min


@pytest.mark.parametrize("order", [VHalf, VMin])
def test_blocks_do_not_collide_and_follow_the_path_of_a_microbatch(order):
    """Four times of a rank that differ modulo 6, each behind that of the rank before, for any number of ranks."""
    for p in range(1, 65):
        blocks = order(2 * p, rank_of_stage=v(p, 2))._blocks
        assert all(len({time % 6 for time in block}) == 4 for block in blocks)
        path = [[block[0] for block in blocks], [block[1] for block in reversed(blocks)],
                [block[2] for block in blocks], [block[3] for block in reversed(blocks)]]  # fmt: skip
        assert all(before < behind for before, behind in pairwise(time for leg in path for time in leg))


@pytest.mark.parametrize("name", HELD)
def test_memory_is_a_half_and_a_third(name: str):
    """By the formula, for any p; beside a half and a third of 2p that is less than three microbatches of one stage."""
    for p in range(1, 65):
        held = in_a_v(name, p).max_saved_on_rank((4 * p,))
        assert held == (HELD[name](p),) * p
        assert 0 <= held[0] - 2 * p / {"v-half": 2, "v-min": 3}[name] < 3


@draws(40)
@given(st.sampled_from(sorted(HELD)), st.integers(1, 9), BATCHES, FLAGS)
def test_they_are_proved_within_their_memory(name: str, p: int, batches: list[int], flags: dict):
    """Any p, batches and flags, also batches that do not fill the V; each stage computes in order."""
    schedule = in_a_v(name, p, **flags)
    report = proved(schedule, batches)
    assert max(report.peak_saved_on_rank) <= HELD[name](p)
    if max(batches) >= 2 * p:
        assert max(report.peak_saved_on_rank) == HELD[name](p)
    for stage, rank in enumerate(schedule.rank_of_stage):
        row = schedule.computations(rank, batches)
        for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
            numbers = [each.microbatch for each in kinds_of(row, kind) if each.stage == stage]
            assert numbers == list(range(sum(batches)))


@pytest.mark.parametrize("name", HELD)
def test_a_longer_batch_costs_no_bubble(name: str):
    """At f = i = w a rank is busy between the ends of a batch: so much longer, with as many idle units."""
    for p in (2, 3, 4, 5, 7, 8):
        schedule = in_a_v(name, p)
        assert idle(schedule, 3 * p) == pytest.approx(idle(schedule, 6 * p)) and idle(schedule, 3 * p) <= 4 * p


def test_bubbles_at_published_costs():
    """The first row of zero bubble, p = 8 and m = 24, published with bubbles of 16.95% and 29.93%."""
    f, i, w = 18522 / 2, 18086 / 2, 9337 / 2
    costs = Costs(forward=f, backward=i + w, backward_input=i, backward_weight=w, latency=601)
    for name, published in (("v-half", 16.95), ("v-min", 29.93)):
        timeline = simulate(in_a_v(name, 8).build((24,)), costs)
        assert 100 * timeline.idle(0) / timeline.end == pytest.approx(published, abs=1)


# --- zb-h2


@draws(40)
@given(st.integers(1, 8), BATCHES, FLAGS, st.sampled_from(["flush", "2bw"]))
def test_h2_is_proved_with_2p_less_one_microbatches_on_every_rank(p: int, more: list[int], flags: dict, weights: str):
    batches = [each + (2 * p - 2 if weights == "2bw" else 0) for each in more]
    schedule = Schedule(order="zb-h2", weights=weights, num_stages=p, **flags)
    report = proved(schedule, batches)
    assert report.peak_saved_microbatches == (min(2 * p - 1, max(batches)),) * p
    first = schedule.computations(0, batches[:1])
    ahead = next(place for place, each in enumerate(first) if each.kind is not Kind.FORWARD)
    assert ahead == min(2 * p - 1, batches[0])


@draws(30)
@given(st.integers(1, 8), st.integers(0, 20), st.integers(1, 6))
def test_h2_idles_only_before_its_first_computation_and_behind_its_last(p: int, more: int, unit: int):
    """At f = i = w, with batches that fill the pipeline."""
    costs = Costs(forward=unit, backward=2 * unit)
    timeline = simulate(Schedule.preset("zb-h2", num_stages=p).build((2 * p - 1 + more,)), costs)
    for rank in range(p):
        spans = [span for span in timeline.computations(rank) if span.instruction.kind is not Kind.STEP]
        assert spans[0].start == rank * unit
        assert all(before.end == behind.start for before, behind in pairwise(spans))
        assert timeline.idle(rank) == pytest.approx((p - 1) * unit)


# --- interleaved-zb


@draws(40)
@given(
    st.integers(1, 6), st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 2), FLAGS
)
def test_interleaved_is_megatrons_order_with_late_w(p: int, v: int, groups: list[int], more: int, flags: dict):
    """Forwards, and I in the place of backwards, are those of `interleaved`; the W of rank r stand 2r behind their I,
    in the order of the I; and every rank holds what the first one of `interleaved` holds."""
    size = p + more if v > 1 and p > 1 else p
    flags |= {"microbatch_group_size": size} if size > p else {}
    whole, split = (interleaved(name, p, v, **flags) for name in ("interleaved", "interleaved-zb"))
    batches = [each * size for each in groups]
    report = proved(split, batches)
    assert max(report.peak_saved_on_rank) <= whole.max_saved_on_rank(batches)[0]
    for rank in range(p):
        row = split.computations(rank, batches[:1])
        turns = [(each.kind is Kind.FORWARD, each.stage, each.microbatch) for each in row]
        of_weight = [each.kind is Kind.BACKWARD_WEIGHT for each in row]
        expected = [
            (each.kind is Kind.FORWARD, each.stage, each.microbatch)
            for each in whole.computations(rank, batches[:1])
        ]  # fmt: skip
        assert [turn for turn, late in zip(turns, of_weight, strict=True) if not late] == expected
        halves = [[turn for turn, late in zip(turns, of_weight, strict=True) if late is kind and not turn[0]]
                  for kind in (False, True)]  # fmt: skip
        assert halves[0] == halves[1]
        num_before = [sum(each.kind is Kind.BACKWARD_INPUT for each in row[:place])
                      for place, late in enumerate(of_weight) if late]  # fmt: skip
        late = (2 if v > 1 else 1) * rank
        assert num_before[: -late or None] == list(range(late + 1, batches[0] * v + 1))


def test_interleaved_idles_for_a_part_of_a_forward():
    """At f = i = w and with two groups or more: (p-1)f/v, f of a rank, where interleaved idles for (p-1)(f+b)/v."""
    for p, num_virtual_stages in ((2, 2), (3, 2), (4, 2), (6, 2), (2, 3), (4, 3), (6, 3), (4, 4)):
        for m in (2 * p, 4 * p):
            assert idle(interleaved("interleaved-zb", p, num_virtual_stages), m) == pytest.approx(p - 1)
            assert idle(interleaved("interleaved", p, num_virtual_stages), m) == pytest.approx(3 * (p - 1))


def test_interleaved_with_one_stage_on_each_rank_is_h1():
    for p in (1, 2, 5):
        flat, h1 = (Schedule.preset(name, num_stages=p, num_virtual_stages=1) for name in ("interleaved-zb", "zb-h1"))
        assert flat.build((7, 3)).rows == h1.build((7, 3)).rows


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"order": "v-half"}, "v-half takes two stages on each rank; make num_virtual_stages 2, or use zb-h1"),
        ({"order": "v-half", "num_virtual_stages": 2}, "v-half takes stages that are placed there and back again"),
        ({"order": "v-min", "num_virtual_stages": 4}, "v-min has 2 stages on each rank, not 4; make"),
        ({"order": "v-min", "microbatch_group_size": 8}, "v-min takes no groups of microbatches; drop"),
        ({"order": "v-half", "rank_of_stage": (0, 1, 1, 0), "weights": "2bw"}, "v-half drains in every batch"),
        ({"order": "zb-h2", "balance": True}, "zb-h2 computes backwards in halves, I and W"),
        ({"order": "zb-h2", "num_virtual_stages": 2}, "zb-h2 has one stage on each rank, not 2"),
        ({"order": "zb-h2", "extra_warmup": True}, "zb-h2 has no warm-up that could be extended"),
        ({"order": "interleaved-zb", "rank_of_stage": (0, 1, 1, 0)}, "interleaved-zb takes stages that are dealt out"),
        ({"order": "interleaved-zb", "num_virtual_stages": 2, "balance": True}, "interleaved-zb computes backwards in"),
    ],
)
def test_refusals(choices: dict, said: str):
    with pytest.raises(ValueError, match=said):
        Schedule(**{"weights": "flush", "num_stages": 4} | choices)


def test_interleaved_takes_whole_groups():
    with pytest.raises(ValueError, match="interleaved-zb takes microbatches in groups of 2, which 3"):
        interleaved("interleaved-zb", 2, 2).build((3,))
