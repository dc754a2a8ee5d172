"""Where the words of the stash stand, and what that costs in time."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.lane_order import RELOADED_AHEAD, Residency
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule, schedule
from megatron.pipeline.schedules.passes import residency as stash
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from tests.draws import draws


def l2l(num_stages: int, *, where: str = "host", num_ranks: int = 1, resident: int = 2) -> Schedule:
    residency = Residency(resident, "eager", where)
    v = num_stages // num_ranks
    return Schedule.preset("l2l", num_stages=num_stages, num_virtual_stages=v, residency=residency)


def makespan(m: int, *, ahead: int | None = None, where: str = "host", **costs: float) -> float:
    """The makespan of a batch on one rank with 12 stages; `ahead`: with RELOADs so many backwards ahead, proved or
    not."""
    with pytest.MonkeyPatch.context() as patch:
        if ahead is not None:
            patch.setattr(schedule, "add_stash", functools.partial(stash.add_stash, ahead=ahead))
        return simulate(l2l(12, where=where).build((m,)), Costs(**costs)).makespan


@draws(30)
@given(
    p=st.integers(1, 4), v=st.integers(1, 5), m=st.integers(1, 6), resident=st.integers(1, 3),
    offload=st.floats(0, 3), fetch=st.floats(0, 20),
)  # fmt: skip
def test_every_input_that_leaves_comes_back_before_it_is_needed(p, v, m, resident, offload, fetch):
    """One OFFLOAD behind its forward and one RELOAD two computations ahead; at any speed of the lanes a program
    ends, no sooner than with inputs that stay.
    """
    built: list[Program] = [l2l(p * v, num_ranks=p, resident=resident, where=each).build((m, m)) for each in
                            ("host", "device")]  # fmt: skip
    words = (Kind.OFFLOAD, Kind.RELOAD)
    for with_stash, without in zip(built[0].rows, built[1].rows, strict=True):
        assert tuple(each for each in with_stash if each.kind not in words) == without
        moved = {kind: [(each.stage, each.microbatch) for each in with_stash if each.kind is kind] for kind in words}
        assert sorted(moved[Kind.OFFLOAD]) == sorted(moved[Kind.RELOAD])
        for at, each in enumerate(with_stash):
            if each.kind is Kind.OFFLOAD:
                before = next(unit for unit in reversed(with_stash[:at]) if unit.kind.is_computation)
                assert (before.kind, before.stage, before.microbatch) == (Kind.FORWARD, each.stage, each.microbatch)
            elif each.kind is Kind.RELOAD:
                units = [unit for unit in with_stash[at:] if unit.kind in (Kind.FORWARD, Kind.BACKWARD)]
                needed = Kind.BACKWARD, each.stage, each.microbatch
                found = [(unit.kind, unit.stage, unit.microbatch) for unit in units]
                assert found.index(needed) == RELOADED_AHEAD
    costs = Costs(offload=offload, fetch=fetch)
    host, device = (simulate(program, costs).makespan for program in built)
    assert host >= device - 1e-9 * device


@pytest.mark.parametrize("m", [4, 8, 16])
def test_reloads_ahead_of_a_fetch_hide_it(m):
    """A fetch as long as two backwards with their recomputes: the RELOADs that stand ahead of it cost nothing, where
    one backward ahead each stage waits for the rest of the fetch.
    """
    costs = {"fetch": 6.0, "store": 6.0, "update": 6.0, "offload": 0.5}
    stay = makespan(m, where="device", **costs)
    assert makespan(m, **costs) == stay == {4: 210, 8: 376, 16: 752}[m]
    assert makespan(m, ahead=1, **costs) == stay + 10


def test_a_longer_fetch_is_waited_for():
    """By X + 2A - 9C at each of ten stages: two RELOADs in its lane, and three inputs to compute with meanwhile."""
    costs = {"fetch": 12.0, "store": 12.0, "update": 12.0, "offload": 0.25}
    stay = makespan(16, where="device", **costs)
    assert makespan(16, **costs) - stay == pytest.approx(10 * (12 + 2 * 0.25 - 9))
    assert makespan(16, ahead=1, **costs) - makespan(16, **costs) == 30


def test_a_slow_way_out_sets_the_pace_of_forwards():
    """Where an OFFLOAD takes three forwards, the forwards of the stages whose inputs leave take as long."""
    fast, slow = makespan(8, offload=1.0, reload=0.0), makespan(8, offload=3.0, reload=0.0)
    assert slow - fast == pytest.approx(10 * 8 * 2, rel=0.1)


def test_what_is_two_ahead_is_what_is_proved():
    """Three ahead is one boundary more than the checker grants."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="8 tensors between stages may be on"):
        patch.setattr(schedule, "add_stash", functools.partial(stash.add_stash, ahead=3))
        check(l2l(8).build((4,)))
