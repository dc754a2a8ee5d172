"""No program within the bound moves less than the balance pass: by trying all, and by choosing windows."""

from itertools import accumulate, chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check
from megatron.pipeline.program.instruction import Kind, Row
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.one_f_one_b import OneForwardOneBackward
from tests.draws import draws
from tests.pipeline.schedules.passes.fewest_moves import Word, fewest_evictions, fewest_windows, words
from tests.pipeline.strategies import kinds_of


@pytest.mark.parametrize(("num_stages", "most"), [(4, 14), (5, 13), (6, 11), (7, 10), (8, 10)])
def test_no_program_of_a_batch_moves_less(num_stages: int, most: int):
    """All ways to evict and load within the bound are tried: none moves fewer microbatches than the pass."""
    order = OneForwardOneBackward(num_stages)
    bound = -(-(num_stages + 2) // 2)
    moved = set()
    for num_microbatches in range(1, most + 1):
        counts = Schedule.preset("bpipe", num_stages=num_stages).build((num_microbatches,)).num_evictions
        moved |= {*counts}
        for stage in range(num_stages // 2):
            row = words([list(chain(*order.segments(stage, [range(num_microbatches)])))])
            assert counts[stage] == fewest_evictions(row, bound, {}, at_most=counts[stage])
    assert max(moved) > 1


@pytest.mark.parametrize("num_stages", [4, 5, 6])
@pytest.mark.parametrize("more", [(0, 0), (0, 1, 0), (3, 0), (2, 5)])
def test_no_program_that_may_stop_at_its_borders_moves_less(num_stages: int, more: tuple[int, ...]):
    """The same without flushes, among the programs that have the same away at each border."""
    batches = tuple(num_stages + each for each in more)
    order, bound = OneForwardOneBackward(num_stages), -(-(num_stages + 2) // 2)
    counts = Schedule.preset("2bw", num_stages=num_stages, balance=True).build(batches).num_evictions
    starts = list(accumulate(batches, initial=0))
    for stage in range(num_stages // 2):
        num_away = max(0, num_stages - stage - bound)
        away = {index: frozenset(range(starts[index] - num_away, starts[index])) for index in range(1, len(starts))}
        row = words(order.segments(stage, [range(*border) for border in pairwise(starts)]))
        assert counts[stage] == fewest_evictions(row, bound, away, at_most=counts[stage])
    assert counts[0]


# --- beyond what can be tried


def computations(row: Row) -> list[Word]:
    return [(each.kind.value, (each.stage, each.microbatch)) for each in row if each.kind.is_computation]


def assert_fewest(schedule: Schedule, num_microbatches: int) -> list[int]:
    """The number of evictions of each rank, the least by its windows."""
    batches = (num_microbatches,)
    rows, moved = schedule.build(batches).rows, []
    for row, bound in zip(rows, schedule.max_saved_on_rank(batches), strict=True):
        moved.append(len(kinds_of(row, Kind.EVICT)))
        assert moved[-1] == fewest_windows(computations(row), bound)
    return moved


@pytest.mark.parametrize(("p", "v", "m"), [(4, 1, 9), (5, 1, 9), (6, 1, 8), (3, 2, 6), (4, 2, 8), (3, 3, 6)])
def test_windows_find_what_trying_all_finds(p: int, v: int, m: int):
    """Both oracles agree where both can be asked, with the paper's bound and with one less."""
    bound = -(-(p + 2) // 2) if v == 1 else p * v + 1
    for row in Schedule.preset("interleaved", num_stages=p * v, num_virtual_stages=v).build((m,)).rows[: p // 2]:
        row = computations(row)
        fewest = fewest_windows(row, bound)
        assert fewest == fewest_evictions(row, bound, {}, at_most=fewest)


@draws(20)
@given(st.integers(4, 32), st.integers(1, 70))
def test_no_batch_of_any_size_moves_less(num_stages: int, num_microbatches: int):
    """1F1B, up to 32 stages."""
    moved = assert_fewest(Schedule.preset("bpipe", num_stages=num_stages), num_microbatches)
    assert any(moved) == (min(num_stages, num_microbatches) > -(-(num_stages + 2) // 2))


@draws(8)
@given(st.integers(2, 32), st.integers(2, 4), st.integers(1, 5))
def test_no_interleaved_batch_moves_less(p: int, v: int, num_groups: int):
    """Groups of p microbatches, up to 32 ranks, in rows of up to 400 computations; and pv+1 is kept at any timing."""
    batches = (max(1, min(num_groups, 200 // (p * v))) * p,)
    schedule = Schedule.preset("interleaved", num_stages=p * v, num_virtual_stages=v, balance=True)
    moved = assert_fewest(schedule, *batches)
    assert any(moved) == (batches[0] > p > 2)
    report = check(schedule.build(batches), max_saved_on_rank=schedule.max_saved_on_rank(batches))
    assert max(report.peak_saved_on_rank) <= p * v + 1


@pytest.mark.parametrize(("size", "m"), [(5, 10), (6, 10), (7, 11), (8, 20)])
def test_no_batch_in_larger_groups_moves_less(size: int, m: int):
    """Groups of more than p: the bound is half of what the pair saves, and one more."""
    schedule = Schedule.preset(
        "interleaved", num_stages=8, num_virtual_stages=2, microbatch_group_size=size, balance=True
    )
    assert any(assert_fewest(schedule, m))
