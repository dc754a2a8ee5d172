"""The balance pass: which microbatches move and when, and that no rank exceeds the bound."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.program.instruction import MOVES, Kind
from megatron.pipeline.program.lane_order import Pairs
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.passes import activations as passes
from megatron.pipeline.schedules.passes.activations import add_balance, balanced_bounds
from tests.draws import draws
from tests.pipeline.schedules.passes.written import extent, segments, texts
from tests.pipeline.strategies import kinds_of, text


def balance(evictor: list[str], *, bound: int) -> list[list[str]]:
    """What the pass makes of an evictor's segments and of an acceptor's empty ones, as words."""
    program = extent("2bw", num_stages=2, batches=(1,) * (len(evictor) - 1))
    result = add_balance([segments(*evictor), segments(*[""] * len(evictor))], program, (bound, bound))
    return [texts(each) for each in result]


def test_one_pair():
    """Figure 4: in the warm-up an eviction before the forward that fills the bound; later each LOAD beside a forward,
    after another eviction; in the cool-down each LOAD after the backward that makes room."""
    order = "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7"
    (first, rest), (accepts, _) = balance([order, ""], bound=3)
    assert first + " " + rest == (
        "0F0 0F1 0EVICT1 0F2 0F3 0EVICT3 0B0 0LOAD1 0F4 0B1 0F5 0EVICT5 0B2 0LOAD3 0F6 0B3 0F7 0B4 0LOAD5 0B5 0B6 0B7 "
    )
    assert accepts == "1ACCEPT1 1ACCEPT3 1RETURN1 1ACCEPT5 1RETURN3 1RETURN5"


def test_loads_of_the_cool_down_run_beside_a_backward_where_there_is_room():
    """Microbatches 0 to 2 leave more room than the load of 3 takes, so it is posted before the backward of 2."""
    (first, _), _ = balance(["0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5", ""], bound=5)
    assert first == "0F0 0F1 0F2 0F3 0EVICT3 0F4 0F5 0B0 0B1 0LOAD3 0B2 0B3 0B4 0B5"


def test_halves_of_a_backward():
    """Activations stay until the weight half, and are loaded before the input half."""
    (first, _), _ = balance(["0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4", ""], bound=3)
    assert first == "0F0 0F1 0EVICT1 0F2 0F3 0I0 0EVICT3 0W0 0LOAD1 0F4 0I1 0W1 0I2 0LOAD3 0W2 0I3 0W3 0I4 0W4"


def test_at_a_border_the_last_are_away():
    """Where a run may stop or go on, the same is away each time, and no decision looks beyond the border."""
    batch = "0F{0} 0B{1} 0F{2} 0B{3} 0F{4} 0B{5} 0F{6} 0B{7}"
    fill = "0F0 0F1 0F2 0F3 0B0"
    second, third = (batch.format(*chain(*((k, k - 3) for k in range(first, first + 4)))) for first in (4, 8))
    (first, *others, drain), _ = balance([fill, second, third, "0B9 0B10 0B11"], bound=3)
    assert first == "0F0 0F1 0EVICT1 0F2 0F3 0EVICT3 0B0 0LOAD1"
    assert others[0] == "0F4 0B1 0F5 0EVICT5 0B2 0LOAD3 0F6 0B3 0F7 0EVICT7 0B4 0LOAD5"
    assert others[1] == "0F8 0B5 0F9 0EVICT9 0B6 0LOAD7 0F10 0B7 0F11 0EVICT11 0B8 0LOAD9"
    assert drain == "0B9 0LOAD11 0B10 0B11"


def test_a_bound_that_no_order_can_keep():
    """With room for one microbatch there is nothing that could be evicted."""
    with pytest.raises(ValueError, match="a bound of 1 saved microbatches is too small"):
        balance(["0F0 0F1 0B0 0B1", ""], bound=1)


@pytest.mark.parametrize("num_stages", range(1, 40))
def test_the_bound_is_the_papers(num_stages: int):
    """Section 3.3: ceil((p+2)/2); appendix A, for the microbatches that p(v-1) + 2(p-s-1) + 1 says: pv+1."""
    p = num_stages
    pairs = Pairs(tuple(range(p)))
    bounds = balanced_bounds([p - stage for stage in range(p)], pairs)
    assert all(bound == -(-(p + 2) // 2) for stage, bound in enumerate(bounds) if stage != p - 1 - stage)
    for v in (2, 3):
        bounds = balanced_bounds([p * (v - 1) + 2 * (p - stage - 1) + 1 for stage in range(p)], pairs)
        assert all(bound == p * v + 1 for stage, bound in enumerate(bounds) if stage != p - 1 - stage)


# --- properties


@draws(25)
@given(st.integers(1, 32), st.lists(st.integers(1, 70), min_size=1, max_size=2), st.booleans())
def test_bpipe_keeps_the_bound(num_stages: int, batches: list[int], recompute: bool):
    """For any p and m: proved, within ceil((p+2)/2) on both sides; only stages up to (p-4)/2 evict, if m is enough."""
    schedule = Schedule.preset("bpipe", num_stages=num_stages, recompute=recompute)
    program = schedule.build(batches)
    report = check(program, max_saved=schedule.max_saved_microbatches(batches))
    bound = -(-(num_stages + 2) // 2)
    assert max(report.peak_saved_microbatches) <= max(bound, 1)
    early = (stage for stage in range(num_stages) if stage <= (num_stages - 4) / 2)
    evicting = tuple(stage for stage in early if min(num_stages - stage, max(batches)) > bound)
    assert tuple(s for s, count in enumerate(report.evicted_microbatches) if count) == evicting
    assert schedule.evicting_ranks(batches) == evicting


@draws(12)
@given(st.data(), st.integers(1, 16), st.booleans())
def test_2bw_keeps_the_bound_and_repeats(data: st.DataObject, num_stages: int, extra_warmup: bool):
    """For ramp-ups, and for any number of equal batches: proved within half of the pair's sum and one, rounded up."""
    schedule = Schedule.preset("2bw", num_stages=num_stages, balance=True, extra_warmup=extra_warmup)
    fewest = 2 * num_stages - 1 if extra_warmup else num_stages
    batches = data.draw(st.lists(st.integers(fewest, 3 * fewest), min_size=1, max_size=4))
    bound = num_stages + 1 if extra_warmup else -(-(num_stages + 2) // 2)
    for report in (
        check(schedule.build(batches), max_saved=schedule.max_saved_microbatches(batches)),
        check_periodic(schedule.build_periodic(batches[0]), max_saved=schedule.max_saved_microbatches(batches * 3)),
    ):
        assert max(report.peak_saved_microbatches) <= bound


@draws(15)
@given(st.integers(1, 12), st.lists(st.integers(12, 30), min_size=1, max_size=3), st.sampled_from(["flush", "2bw"]))
def test_the_order_stays(num_stages: int, batches: list[int], name: str):
    """Without its moves, a balanced program is the program that was to be balanced."""
    plain, balanced = (
        Schedule.preset(name, num_stages=num_stages, balance=flag).build(batches) for flag in (False, True)
    )
    for row, other in zip(balanced.rows, plain.rows, strict=True):
        assert text([each for each in row if each.kind not in MOVES]) == text(other)


def test_each_victim_is_the_last_to_be_needed():
    """No microbatch that stays behind has its backward after that of one that is evicted (Belady)."""
    for row in Schedule.preset("bpipe", num_stages=12).build((40,)).rows:
        saved, needed = set(), {each.microbatch: place for place, each in enumerate(row) if each.kind is Kind.BACKWARD}
        for instruction in kinds_of(row, Kind.FORWARD, Kind.BACKWARD, Kind.EVICT, Kind.LOAD):
            if instruction.kind in (Kind.FORWARD, Kind.LOAD):
                saved.add(instruction.microbatch)
            else:
                if instruction.kind is Kind.EVICT:
                    assert instruction.microbatch == max(saved, key=needed.__getitem__)
                saved.remove(instruction.microbatch)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("num_virtual_stages", [1, 2, 3])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_interleaved_keeps_the_bound_of_ranks(num_ranks: int, num_virtual_stages: int, num_groups: int):
    """On p ranks with v stages each no rank holds more than pv+1, for any number of batches."""
    schedule = Schedule.preset(
        "interleaved",
        num_stages=num_ranks * num_virtual_stages,
        num_virtual_stages=num_virtual_stages,
        balance=True,
    )
    batches = (num_groups * num_ranks,) * 3
    bounds = {
        "max_saved": schedule.max_saved_microbatches(batches),
        "max_saved_on_rank": schedule.max_saved_on_rank(batches),
    }
    assert all(bound <= num_ranks * num_virtual_stages + 1 for bound in bounds["max_saved_on_rank"])
    report = check(schedule.build(batches), **bounds)
    check_periodic(schedule.build_periodic(batches[0]), **bounds)
    evicting = {stage % num_ranks for stage, count in enumerate(report.evicted_microbatches) if count}
    assert evicting == set(schedule.evicting_ranks(batches))


@pytest.mark.parametrize(("preset", "v"), [("bpipe", 1), ("2bw", 1), ("interleaved", 2)])
def test_ranks_with_room_stay_as_they_are(preset, v, monkeypatch):
    """They are not walked through for moves, and that would set none."""
    given = passes._has_room
    for p in (4, 6, 7):
        schedule = Schedule.preset(preset, num_stages=p * v, num_virtual_stages=v, balance=True)
        batches = (2 * p,) * (1 if schedule.weights.drains else 3)
        found, answers = schedule.build(batches), []
        monkeypatch.setattr(passes, "_has_room", lambda *asked, to=answers: to.append(given(*asked)))
        assert schedule.build(batches) == found
        monkeypatch.setattr(passes, "_has_room", lambda *asked, to=answers: to.append(given(*asked)) or to[-1])
        answers.clear()
        assert schedule.build(batches) == found
        assert set(answers) == {True, False}
