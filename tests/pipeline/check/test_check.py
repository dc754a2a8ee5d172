"""Good programs are accepted, and their peaks are those of the papers."""

import pytest
from hypothesis import given

from megatron.pipeline.check import check
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import STASH
from megatron.pipeline.schedules import Schedule
from tests.draws import draws
from tests.pipeline.check.examples import cases, saved_bounds
from tests.pipeline.check.oracle import verdict


@draws(150)
@given(cases())
def test_built_programs_are_proved_and_compute_the_definition(case: tuple[Schedule, Program]):
    """Over p, m, ramp-up, policies, chains and starts: what is built is accepted in the papers' bounds and, executed on
    symbols, ends with the weights that the policy's definition gives."""
    schedule, program = case
    bounds = saved_bounds(schedule, program.batches)
    report = check(program, max_saved=bounds)
    assert report.versioned and report.communicates == (schedule.num_ranks > 1)
    assert report.num_instructions == sum(map(len, program.rows))
    assert verdict(program, bounds) == ""


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("name", ["gpipe", "flush", "2bw", "pipedream"])
def test_peaks_are_those_of_the_papers(name: str, num_stages: int):
    """In steady state the bounds are reached: p-s saved microbatches (gpipe: m), one weight version, two, or p-s."""
    schedule = Schedule.preset(name, num_stages=num_stages)
    batches = (1,) * (3 * num_stages) if schedule.weights is STASH else (2 * num_stages,) * 3
    report = check(schedule.build(batches))
    assert list(report.peak_saved_microbatches) == saved_bounds(schedule, batches)
    live = {"gpipe": 1, "flush": 1, "2bw": 2}
    assert list(report.live_versions) == [live.get(name, num_stages - stage) for stage in range(num_stages)]


@pytest.mark.parametrize("num_stages", range(2, 6))
def test_extra_warmup_costs_what_it_says(num_stages: int):
    """A warm-up of 2(p-s-1) forwards saves 2(p-s)-1 microbatches at stage s."""
    schedule = Schedule.preset("2bw", num_stages=num_stages, extra_warmup=True)
    report = check(schedule.build((2 * num_stages,) * 3))
    assert list(report.peak_saved_microbatches) == [2 * (num_stages - stage) - 1 for stage in range(num_stages)]


def test_recompute_is_counted_apart():
    """With recompute one microbatch at a time is there in full, however many wait."""
    report = check(Schedule.preset("2bw", num_stages=4, recompute=True).build((4, 4)))
    assert report.peak_saved_microbatches == (4, 3, 2, 1)
    assert report.peak_recomputed_microbatches == (1, 1, 1, 1)
