"""Costs that settle on who works beside whom, against a machine whose speed follows the moment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.planner.time.profiled import settle
from tests.draws import draws

BUSY = {Kind.FORWARD, Kind.BACKWARD, Kind.STEP}


def shared_machine(program, work, slowdown):
    """The end of `program` where each rank works off `work[kind, stage]` seconds at the speed 1 / slowdown[n] while n
    ranks work: every moment on its own, without averages. Transfers take no time."""
    rows = [[each for each in row if each.kind in BUSY] for row in program.rows]
    position, left, clock = [0] * len(rows), [None] * len(rows), 0.0
    done = set()

    def needs(instruction):
        stage, microbatch = instruction.stage, instruction.microbatch
        if instruction.kind is Kind.FORWARD:
            return {(Kind.FORWARD, stage - 1, microbatch)} if stage else set()
        if instruction.kind is Kind.BACKWARD:
            return {(Kind.BACKWARD, stage + 1, microbatch)} if stage < program.num_stages - 1 else set()
        batch = program.microbatches_of(instruction.version - 1)  # the norm's reduction: every rank has ended it
        return {(Kind.BACKWARD, each, microbatch) for each in range(program.num_stages) for microbatch in batch}

    while any(position[rank] < len(row) for rank, row in enumerate(rows)):
        for rank, row in enumerate(rows):
            if left[rank] is None and position[rank] < len(row) and needs(row[position[rank]]) <= done:
                left[rank] = work[row[position[rank]].kind, row[position[rank]].stage]
        working = [rank for rank in range(len(rows)) if left[rank] is not None]
        speed = 1 / slowdown[len(working)]
        passed = min(left[rank] for rank in working) / speed
        clock += passed
        for rank in working:
            left[rank] -= passed * speed
            if left[rank] <= 1e-12:
                ended = rows[rank][position[rank]]
                done.add((ended.kind, ended.stage, ended.microbatch))
                left[rank], position[rank] = None, position[rank] + 1
    return clock


def settled_end(schedule, batches, work, slowdown):
    program = schedule.build(batches)
    at_work = {
        count: {(kind.row.cost, stage): value * slowdown[count] for (kind, stage), value in work.items()}
        for count in slowdown
    }
    stages = range(schedule.num_stages)

    def costs_of(times):
        return Costs(**{name: [times[name, stage] for stage in stages] for name in ("forward", "backward", "step")})

    costs = settle(program, at_work, costs_of, batches=range(len(batches)))
    return simulate(program, costs).end


@draws(60)
@given(
    st.integers(2, 4), st.integers(1, 12), st.floats(0.0, 0.6), st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4)
)
def test_a_flush_takes_as_long_as_on_the_shared_machine(p, m, slowdown, weights):
    """But for a fifth of the slowdown at most, for costs are averages over a batch; stages may be uneven."""
    schedule = Schedule.preset("flush", num_stages=p)
    work = {(Kind.FORWARD, stage): weights[stage] for stage in range(p)}
    work |= {(Kind.BACKWARD, stage): 2 * weights[stage] for stage in range(p)}
    work |= {(Kind.STEP, stage): 0.5 * weights[stage] for stage in range(p)}
    speeds = {count: 1 + slowdown * (count - 1) / (p - 1) for count in range(1, p + 1)}
    program = schedule.build((m,))
    expected = shared_machine(program, work, speeds)
    assert settled_end(schedule, (m,), work, speeds) == pytest.approx(expected, rel=0.2 * slowdown + 1e-9)


def test_without_contention_nothing_changes():
    schedule = Schedule.preset("flush", num_stages=2)
    work = {(kind, stage): 1.0 for kind in BUSY for stage in range(2)}
    assert settled_end(schedule, (4,), work, {1: 1.0, 2: 1.0}) == pytest.approx(5 * 2 + 1)


def test_one_microbatch_is_never_disturbed():
    """With one microbatch the ranks take turns, so all but the steps runs at full speed."""
    schedule = Schedule.preset("flush", num_stages=2)
    work = {(kind, stage): 1.0 for kind in BUSY for stage in range(2)}
    assert settled_end(schedule, (1,), work, {1: 1.0, 2: 1.5}) == pytest.approx(4 + 1.5)
