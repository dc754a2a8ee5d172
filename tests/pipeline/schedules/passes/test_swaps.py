"""Programs that keep a few microbatches on the device: within the bound, for any number of batches, at no cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.program.instruction import SWAPS
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import Costs, simulate
from megatron.planner.memory.schedule_demand import closed_form_demand, schedule_demand
from tests.draws import draws


@st.composite
def bounded(draw) -> tuple[Schedule, int]:
    """A schedule with a bound, and the microbatches of a batch that it accepts."""
    name, p = draw(st.sampled_from(("gpipe", "flush", "2bw", "interleaved"))), draw(st.integers(2, 6))
    v = draw(st.integers(2, 3)) if name == "interleaved" else 1
    schedule = Schedule.preset(
        name, num_stages=p * v, num_virtual_stages=v, most_on_device=draw(st.integers(3, 2 * p)),
        recompute=draw(st.booleans()), tied_embeddings=True,
    )  # fmt: skip
    return schedule, draw(st.integers(1, 3 * p).filter(schedule.accepts))


@draws(40)
@given(bounded())
def test_no_rank_exceeds_its_bound(case: tuple[Schedule, int]):
    """At any speed and for every number of batches; a rank that had more copies some, and reaches the bound."""
    schedule, m = case
    plain = Schedule.preset(
        {"1f1b": schedule.weights.name}.get(schedule.order, schedule.order), num_stages=schedule.num_stages,
        num_virtual_stages=schedule.num_virtual_stages, recompute=schedule.recompute, tied_embeddings=True,
    )  # fmt: skip
    most, batches = schedule.most_on_device, (m,) * 3
    bounds = {
        "max_saved": schedule.max_saved_microbatches(batches),
        "max_saved_on_rank": schedule.max_saved_on_rank(batches),
    }
    report = check(schedule.build(batches), **bounds)
    whole = check(plain.build(batches))
    assert report.peak_saved_on_rank == tuple(min(each, most) for each in whole.peak_saved_on_rank)
    for rank, own in enumerate(whole.peak_saved_on_rank):
        swapped = sum(report.swapped_microbatches[stage] for stage in schedule.stages_of(rank))
        assert bool(swapped) >= (own > most) and own - most <= report.peak_on_host[rank] <= own
    check_periodic(schedule.build_periodic(m), **bounds)
    without = tuple(tuple(each for each in row if each.kind not in SWAPS) for row in schedule.build(batches).rows)
    assert without == plain.build(batches).rows
    found = schedule_demand(schedule, m)
    assert found.saved_on_rank == closed_form_demand(schedule, m).saved_on_rank == report.peak_saved_on_rank


@pytest.mark.parametrize(("preset", "p", "most", "m"), [("flush", 8, 3, 32), ("2bw", 8, 3, 16), ("gpipe", 4, 4, 16)])
def test_copies_no_longer_than_a_forward_cost_nothing(preset: str, p: int, most: int, m: int):
    """1F1B with three microbatches on each device takes as long as with up to eight; longer copies are waited for."""
    program = Schedule.preset(preset, num_stages=p, most_on_device=most).build((m,) * 2)
    plain = simulate(Schedule.preset(preset, num_stages=p).build((m,) * 2)).makespan
    assert simulate(program, Costs(swap_out=1, swap_in=1)).makespan == plain
    assert simulate(program, Costs(swap_out=4, swap_in=4)).makespan > plain


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"name": "zb-h1"}, "zb-h1 computes backwards in halves, I and W, and a bound on activations on the device"),
        ({"name": "pipedream"}, "may drain after every microbatch, so no copy to the host"),
        ({"name": "l2l"}, "set the stash of the residency instead"),
        ({"name": "bpipe"}, "to the host or to a pair stage, not both"),
        ({"name": "flush", "most_on_device": 2}, "with 2 microbatches on its device has none to copy"),
        ({"name": "interleaved", "num_stages": 2, "num_virtual_stages": 2}, "a single rank turns to its next stage"),
        ({"name": "flush", "num_frozen": 1}, "is for ranks whose stages are all trained"),
        ({"name": "gpipe", "rank_of_stage": (0, 1, 1, 0)}, "places stages freely, and activations on the host go with"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_a_bound(choices: dict, reason: str):
    with pytest.raises(ValueError, match=reason):
        Schedule.preset(**{"num_stages": 4, "most_on_device": 3} | choices)
