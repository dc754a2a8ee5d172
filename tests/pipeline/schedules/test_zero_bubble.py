"""zb-h1 and zbv: their turns, their bubbles, their memory, and what does not go with I and W; and made-up orders with I
and W go through the same passes and proofs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.program.instruction import BEGINS_BACKWARD, ENDS_BACKWARD, Instruction, Kind, Row
from megatron.pipeline.schedules import ORDERS, PRESETS, Preset, Schedule
from megatron.pipeline.simulate import Costs, simulate
from tests.draws import draws
from tests.pipeline.runtime import made_up_orders
from tests.pipeline.strategies import kinds_of

FLAGS = st.fixed_dictionaries({name: st.booleans() for name in ("recompute", "data_parallel", "tied_embeddings")})
BATCHES = st.lists(st.integers(1, 12), min_size=1, max_size=3)
HALVES = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def h1(p: int, weights: str = "flush", **flags: object) -> Schedule:
    return Schedule(order="zb-h1", weights=weights, num_stages=p, **flags)


def zbv(p: int, **flags: object) -> Schedule:
    return Schedule.preset("zbv", num_stages=2 * p, num_virtual_stages=2, **flags)


def in_flight(row: Row, stage: int, ends: frozenset[Kind]) -> int:
    """The most microbatches of a stage between their forward and such an end."""
    count = peak = 0
    for each in (each for each in row if each.stage == stage):
        count += (each.kind is Kind.FORWARD) - (each.kind in ends)
        peak = max(peak, count)
    return peak


# --- zb-h1


@draws(60)
@given(st.integers(1, 8), st.integers(1, 24))
def test_h1_is_1f1b_whose_w_come_late(p: int, m: int):
    """Forwards, and I in the place of B, are 1F1B's; on rank s the W of a microbatch follows the I of the s-th after
    it, or at the end the W before it."""
    flush = Schedule.preset("flush", num_stages=p).build((m,))
    for rank, row in enumerate(h1(p).build((m,)).rows):
        without = [each for each in kinds_of(row, Kind.FORWARD, Kind.BACKWARD_INPUT)]
        whole = kinds_of(flush.rows[rank], Kind.FORWARD, Kind.BACKWARD)
        assert [(each.kind is Kind.FORWARD, each.microbatch) for each in without] == [
            (each.kind is Kind.FORWARD, each.microbatch) for each in whole
        ]
        halves = kinds_of(row, *HALVES)
        for position, each in enumerate(halves):
            if each.kind is Kind.BACKWARD_WEIGHT:
                before = halves[position - 1]
                if each.microbatch + rank < m:
                    assert before == Instruction(Kind.BACKWARD_INPUT, rank, each.microbatch + rank, each.version)
                else:
                    assert before.microbatch == each.microbatch - 1 or (each.microbatch, before.microbatch) == (
                        0,
                        m - 1,
                    )


@draws(30)
@given(st.integers(1, 8), BATCHES, FLAGS, st.sampled_from(["flush", "2bw"]))
def test_h1_is_proved_with_p_microbatches_on_every_rank(p: int, more: list[int], flags: dict, weights: str):
    """Any p, ramp-ups, flags, and 2bw: proved, for every number of batches; no stage holds more than p microbatches
    between forward and end of W, which a batch of p and more reaches on all of them."""
    batches = [each + (p - 1 if weights == "2bw" else 0) for each in more]
    schedule = h1(p, weights, **flags)
    report = check(schedule.build(batches), max_saved=schedule.max_saved_microbatches(batches))
    assert report.peak_saved_microbatches == (min(p, max(batches)),) * p
    assert report.peak_deferred_microbatches == tuple(min(stage + 1, max(batches)) for stage in range(p))
    periodic = check_periodic(schedule.build_periodic(batches[0]), max_saved=[p] * p)
    assert max(periodic.peak_saved_microbatches) <= p


@draws(30)
@given(st.integers(1, 8), st.integers(0, 20), st.integers(1, 6))
def test_h1_idles_a_third_of_what_1f1b_does(p: int, more: int, unit: int):
    """At f = i = w every rank idles for (p-1)(f+i-w), where 1F1B does for (p-1)(f+i+w) (Qi et al. 2023, table 2)."""
    costs = Costs(forward=unit, backward=2 * unit)
    timeline = simulate(h1(p).build((p + more,)), costs)
    flush = simulate(Schedule.preset("flush", num_stages=p).build((p + more,)), costs)
    for rank in range(p):
        assert timeline.idle(rank) == pytest.approx((p - 1) * unit)
        assert flush.idle(rank) == pytest.approx((p - 1) * 3 * unit)


@draws(60)
@given(st.integers(1, 7), st.integers(1, 16), st.tuples(*[st.integers(1, 5)] * 3))
def test_h1_is_no_slower_than_1f1b(p: int, m: int, times: tuple[int, int, int]):
    """Whatever F, I and W take: a batch ends no later than with whole backwards that take as long as both halves."""
    forward, of_input, of_weight = times
    costs = Costs(forward=forward, backward=of_input + of_weight, backward_input=of_input, backward_weight=of_weight)
    split, whole = h1(p).build((m,)), Schedule.preset("flush", num_stages=p).build((m,))
    assert simulate(split, costs).end <= simulate(whole, costs).end


def test_h1_under_2bw_hides_latency():
    """A round trip without the W of the stages behind is shorter: what links of half a forward cost 2bw under 1F1B, W
    fill, for the memory of the first stage on all."""
    costs = Costs(latency=0.5)
    schedules = Schedule.preset("2bw", num_stages=4), h1(4, "2bw")
    plain, split = (simulate(each.build((8,) * 8), costs).steady_time_per_batch() for each in schedules)
    assert plain == pytest.approx(8 * 3 + 8 * 2 * 3 * 0.5 / 4) and split <= 8 * 3 + 0.5 + 1e-9


# --- zbv


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
def test_zbv_is_torchs(p: int):
    """ScheduleZBVZeroBubble of torch.distributed.pipelining computes in the same order, in small batches, too."""
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    kinds = {kind: kind.name for kind in (Kind.FORWARD, *HALVES)}
    for m in range(1, 4 * p + 2):
        torchs = object.__new__(torch_schedules.ScheduleZBVZeroBubble)
        torchs.pp_group_size, torchs.num_stages, torchs._n_microbatches = p, 2 * p, m
        for rank, row in enumerate(zbv(p).build((m,)).rows):
            expected = [each for each in torchs._calculate_single_rank_operations(rank) if each is not None]
            expected = [(each.stage_index, each.computation_type.name, each.microbatch_index) for each in expected]
            found = [(each.stage, kinds.get(each.kind), each.microbatch) for each in row if each.kind.is_computation]
            assert found == expected, (m, rank)


@draws(20)
@given(st.integers(1, 7), st.lists(st.integers(1, 24), min_size=1, max_size=3), FLAGS)
def test_zbv_is_proved_with_2p_microbatches_on_every_rank(p: int, batches: list[int], flags: dict):
    """Any p, batches and flags, also batches that do not fill the V: proved, for every number of batches, with 2p
    microbatches at the two stages of a rank: as much as p at a stage of twice the layers."""
    schedule = zbv(p, **flags)
    bounds = schedule.max_saved_microbatches(batches), schedule.max_saved_on_rank(batches)
    report = check(schedule.build(batches), max_saved=bounds[0], max_saved_on_rank=bounds[1])
    check_periodic(schedule.build_periodic(batches[0]), max_saved=bounds[0], max_saved_on_rank=bounds[1])
    assert max(report.peak_saved_on_rank) <= 2 * p
    if max(batches) >= 2 * p:
        assert report.peak_saved_on_rank == (2 * p,) * p
        assert report.peak_saved_microbatches == bounds[0]


@draws(25)
@given(st.integers(1, 7), st.integers(0, 20), st.integers(1, 6))
def test_zbv_has_no_bubble_between_a_ranks_first_and_last_computation(p: int, more: int, unit: int):
    """At f = i = w, with batches that fill the V. What is left is that a rank begins a forward of a stage after the one
    before it: (p-1) of them."""
    timeline = simulate(zbv(p).build((2 * p - 1 + more,)), Costs(forward=unit, backward=2 * unit))
    for rank in range(p):
        spans = [span for span in timeline.computations(rank) if span.instruction.kind is not Kind.STEP]
        length = max(span.end for span in spans) - min(span.start for span in spans)
        assert length == pytest.approx(sum(span.end - span.start for span in spans))
        assert timeline.idle(rank) == pytest.approx((p - 1) * unit)


def test_zbv_with_one_stage_on_each_rank_is_h1():
    for p in (1, 2, 4):
        flat = Schedule(order="zbv", weights="flush", num_stages=p)
        assert flat.build((5, 3)).rows == h1(p).build((5, 3)).rows
        assert flat.max_saved_microbatches((5,)) == h1(p).max_saved_microbatches((5,))


def test_a_preset_deals_out_as_many_stages_as_its_order_is_for():
    """Two for zbv, where nobody says how many; one for orders without several; interleaved leaves the choice."""
    assert Schedule.preset("zbv", num_stages=8).rank_of_stage == (0, 1, 2, 3, 3, 2, 1, 0)
    assert Schedule.preset("zb-h1", num_stages=4).num_ranks == 4
    assert [PRESETS[name].virtual_stages for name in ("zbv", "zb-h1", "interleaved")] == [2, 1, None]


# --- what does not go with I and W


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (
            {"balance": True},
            "zb-h1 computes backwards in halves, I and W, and balance moves activations whole",
        ),
        ({"weights": "stash"}, "and stash steps each stage right after a microbatch's backward; drop it, or use"),
        ({"weights": "stale"}, "weights stale go with stages that"),
        ({"weights": "2bw-provisional"}, "reads gradients to which a later W still adds"),
        ({"num_frozen": 1}, "a frozen prefix needs backwards that are not split"),
        ({"extra_warmup": True}, "zb-h1 has no warm-up that could be extended; drop extra_warmup"),
        ({"num_virtual_stages": 2}, "zb-h1 has one stage on each rank, not 2"),
        ({"order": "zbv", "num_virtual_stages": 4}, "zbv has 2 stages on each rank, not 4; make num_virtual_stages 2"),
        ({"order": "zbv", "num_virtual_stages": 2}, "zbv takes stages that are placed there and back again"),
        ({"order": "zbv", "microbatch_group_size": 8}, "zbv takes no groups of microbatches; drop"),
        ({"order": "zbv", "weights": "2bw"}, "zbv drains in every batch, so the versions of 2bw would buy nothing"),
    ],
)
def test_refusals(choices: dict, said: str):
    with pytest.raises(ValueError, match=said):
        Schedule(**{"order": "zb-h1", "weights": "flush", "num_stages": 4} | choices)


# --- any order


@pytest.fixture
def made_up():
    with made_up_orders.registered():
        yield


@pytest.mark.parametrize("name", made_up_orders.SPLIT)
def test_whether_an_order_splits_is_seen_in_its_rows(name: str, made_up):
    """No order says it. So balance and the others are refused for those that nobody has heard of, and for no other."""
    v = 2 if ORDERS[name].interleaves else 1
    built = Schedule(order=name, weights="flush", num_stages=4 * v, num_virtual_stages=v)
    assert built.splits_backward
    with pytest.raises(ValueError, match="computes backwards in halves, I and W, and balance"):
        Schedule(order=name, weights="flush", num_stages=4 * v, num_virtual_stages=v, balance=True)
    assert not Schedule.preset("bpipe", num_stages=4).splits_backward
    assert not Schedule.preset("interleaved", num_stages=8, num_virtual_stages=2).splits_backward


@pytest.mark.parametrize("weights", ["flush", "2bw"])
@pytest.mark.parametrize("name", made_up_orders.SPLIT)
def test_made_up_orders_with_halves_are_completed_and_proved(name: str, weights: str, made_up):
    """A recompute right before each I or B and none before a W; the gradient of an input is sent behind the I; the
    chain stands behind the last W; a W has the version of its forward; and the counts are those of the rows."""
    v = 2 if ORDERS[name].interleaves else 1
    if v > 1 and weights == "2bw":
        return  # it drains
    schedule = Schedule(
        order=name, weights=weights, num_stages=3 * v, num_virtual_stages=v, recompute=True, data_parallel=True
    )
    sizes = (80, 80) if name == "split-at-the-end" and weights == "2bw" else (12, 12)
    program = schedule.build(sizes)
    report = check(program, max_saved=schedule.max_saved_microbatches(sizes))
    for rank, row in enumerate(program.rows):
        for position, each in enumerate(row):
            if each.kind in BEGINS_BACKWARD:
                assert row[position - 1] == Instruction(Kind.RECOMPUTE, each.stage, each.microbatch, each.version)
                sends = [other for other in row[position + 1 :][:1] if other.kind is Kind.SEND_B]
                crosses = each.stage > 0 and program.crosses(each.stage, each.stage - 1)
                assert [other.microbatch for other in sends] == [each.microbatch] * crosses
            if each.kind is Kind.REDUCE_GRAD:
                left = [other for other in row[position:] if other.kind in ENDS_BACKWARD]
                assert all(program.batch_of(other.microbatch) >= each.version for other in left)
        forwards = {(each.stage, each.microbatch): each.version for each in kinds_of(row, Kind.FORWARD)}
        assert all(each.version == forwards[each.stage, each.microbatch] for each in kinds_of(row, *HALVES))
        for stage in program.stages_of(rank):
            assert report.peak_saved_microbatches[stage] == in_flight(row, stage, ENDS_BACKWARD)
            assert report.peak_recomputed_microbatches[stage] == 1
    check_periodic(schedule.build_periodic(sizes[0]))


def test_a_backward_in_halves_costs_what_its_halves_do():
    """Half a backward each, as the papers draw it, or the rest of what is given; given both, they may be longer."""
    of = {
        (): (1.0, 1.0),
        (("backward_input", 1.5),): (1.5, 0.5),
        (("backward_weight", 0.5),): (1.5, 0.5),
        (("backward_input", 1.5), ("backward_weight", 0.75)): (1.5, 0.75),
    }
    for given_, halves in of.items():
        seconds = Costs(**dict(given_)).seconds(1)
        assert (seconds[Kind.BACKWARD_INPUT], seconds[Kind.BACKWARD_WEIGHT]) == tuple([each] for each in halves)
        assert seconds[Kind.BACKWARD] == [2.0]
    for name in ("backward_input", "backward_weight"):
        with pytest.raises(ValueError, match=f"{name} is a part of backward, so it cannot be longer"):
            Costs(**{name: 3.0}).seconds(1)


def test_a_preset_of_halves_and_2bw_is_one_row(monkeypatch):
    """What the tables combine: nothing has to be added for it."""
    monkeypatch.setitem(PRESETS, "2bw-zb-h1", Preset("zb-h1", "2bw"))
    schedule = Schedule.preset("2bw-zb-h1", num_stages=3)
    assert check_periodic(schedule.build_periodic(4)).live_versions == (2, 2, 2)
    with pytest.raises(ValueError, match="2bw with 3 stages needs batches of at least 3 microbatches"):
        schedule.build((2,))
