"""The proof for every number of periods: it holds for what is built, and finds a period that does not repeat."""

from dataclasses import dataclass

import pytest
from hypothesis import given

from megatron.pipeline.check import ProgramError, check, check_periodic
from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.program.program import PeriodicProgram, Program
from megatron.pipeline.program.weight_policies import STASH
from megatron.pipeline.schedules import Schedule
from tests.draws import draws
from tests.pipeline.check.examples import CHOICES, saved_bounds, written
from tests.pipeline.strategies import schedules


def periodic(
    fill: str, period: str, drain: str, *, fill_batches: tuple[int, ...], size: int, **fields: object
) -> PeriodicProgram:
    """A periodic program on one rank; the drain as it stands after the fill."""
    rows = [written(row, batches=fill_batches, **fields).rows for row in (fill, period, drain)]
    extent = written("", batches=fill_batches, **fields)
    return PeriodicProgram(extent=extent, fill=rows[0], period=rows[1], drain=rows[2], num_microbatches=size)


@draws(60)
@given(schedules(max_stages=6, **CHOICES))
def test_every_built_period_repeats(schedule: Schedule):
    """Fill, n periods and drain of every schedule are proved for every n, and keep the papers' bounds."""
    p = schedule.num_stages
    twice = schedule.extra_warmup or schedule.order == "zb-h2"
    num_microbatches = 2 * p - 1 if twice else p  # of interleaved: a multiple of its ranks, too
    if schedule.weights is STASH:
        num_microbatches = 1
    bounds = saved_bounds(schedule, (num_microbatches,))
    check_periodic(schedule.build_periodic(num_microbatches), max_saved=bounds)


@pytest.mark.parametrize("name", ["gpipe", "flush", "2bw", "pipedream"])
def test_the_peaks_are_those_of_a_long_run(name: str):
    """What one period reports holds for twenty."""
    schedule = Schedule.preset(name, num_stages=4)
    program = schedule.build_periodic(1 if name == "pipedream" else 5)
    report, long = check_periodic(program), check(program.unroll(20))
    assert report.peak_saved_microbatches == long.peak_saved_microbatches
    assert report.live_versions == long.live_versions


def test_the_report_of_stash_holds_up_no_step():
    """The norm of a microbatch is complete only when the first stage has ended it; no stage waits for that to go on.

    In one queue with the reductions over the replicas it would: the last stage could not end its period on its own.
    """
    check_periodic(Schedule.preset("pipedream", num_stages=3, data_parallel=True).build_periodic(1))


def test_a_written_period_repeats():
    """The smallest one: a batch is a period, and there is neither fill nor drain."""
    check_periodic(periodic("", "0F0@0 0B0@0 0REDUCE_NORM@1 0STEP@1", "", fill_batches=(), size=1))


def test_a_period_that_leaks_is_rejected():
    """Each period begins two microbatches and ends one: one period drains, two leave a microbatch behind."""
    leaky = periodic("0F1", "0F2 0F3 0B1", "0B0 0B1", fill_batches=(1,), size=2, first_microbatch=1)
    check(leaky.unroll(1))
    with pytest.raises(ProgramError, match=r"does not repeat.*under way at stage 0") as caught:
        check_periodic(leaky)
    assert (caught.value.rank, caught.value.position) == (0, 4)
    with pytest.raises(ProgramError):
        check(leaky.unroll(2))


def test_the_start_of_2bw_is_no_period():
    """The first batch uses version 0 and so does the second: what the first does, shifted, is wrong for the second."""
    start = periodic("", "0F0@0 0B0@0 0REDUCE_NORM@1 0STEP@1", "", fill_batches=(), size=1, weights="2bw")
    check(start.unroll(1))
    with pytest.raises(ProgramError, match=r"does not repeat.*version") as caught:
        check_periodic(start)
    assert caught.value.rank == 0
    with pytest.raises(ProgramError):
        check(start.unroll(2))


def test_a_fill_that_waits_for_the_period_is_rejected():
    """A cut through the rows is a place where a drain may be decided: every rank has to reach it on its own."""
    one = written("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2", batches=(3,))
    two = written("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3", batches=(4,))
    check_periodic(Cut((2, 2), (2, 2), (one, one, two)))
    with pytest.raises(
        ProgramError, match=r"rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 has executed all that stands before"
    ):
        check_periodic(Cut((3, 1), (2, 2), (one, one, two)))


def test_what_is_unrolled_has_to_repeat():
    """The proof is about fill, period and drain; an unrolling that does something else is rejected."""
    one = written("0F0 0B0 0F1 0B1", batches=(2,))
    other = written("0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3", batches=(4,))
    with pytest.raises(ProgramError, match="in the second of two periods 0F3 is due here"):
        check_periodic(Cut((2,), (2,), (one, one, other)))


@dataclass(frozen=True)
class Cut:
    """Unrolled programs (with no period, one, two) and where to cut their rows: a test can make them disagree."""

    lengths_of_fill: tuple[int, ...]
    lengths_of_period: tuple[int, ...]
    unrolled: tuple[Program, ...]

    @property
    def fill(self) -> list[tuple[Instruction, ...]]:
        return [row[:end] for row, end in zip(self.unrolled[1].rows, self.lengths_of_fill, strict=True)]

    @property
    def period(self) -> list[tuple[Instruction, ...]]:
        lengths = zip(self.unrolled[1].rows, self.lengths_of_fill, self.lengths_of_period, strict=True)
        return [row[start : start + length] for row, start, length in lengths]

    def unroll(self, count: int) -> Program:
        return self.unrolled[count]
