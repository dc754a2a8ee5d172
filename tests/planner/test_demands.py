"""The demand that a schedule states is that of its proved programs."""

import itertools
from dataclasses import fields

import pytest

from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.schedules import Schedule
from megatron.planner import Demand, demand_of
from megatron.planner.demands import schedule_demand

CHOICES = [
    (name, p, v, balance)
    for name, p, v, balance in itertools.product(
        ("gpipe", "flush", "2bw", "pipedream", "bpipe", "interleaved"), (1, 2, 3, 4, 6), (1, 2, 3), (False, True)
    )
    if (v == 1 or name == "interleaved")
    and not (balance and name in ("gpipe", "pipedream", "bpipe"))
    and (p > 1 or name != "interleaved")
]


def proved(schedule: Schedule, num_microbatches: int) -> Demand:
    if schedule.weights.drains:
        program = schedule.build((num_microbatches,))
        return demand_of(program, check(program))
    periodic = schedule.build_periodic(num_microbatches)
    return demand_of(periodic.unroll(1), check_periodic(periodic))


@pytest.mark.parametrize(("name", "p", "v", "balance"), CHOICES)
def test_is_that_of_the_proved_program(name, p, v, balance):
    """For batches of one microbatch up to five times as many as ranks, wherever the schedule can run them."""
    schedule, compared = Schedule.preset(name, num_stages=p * v, num_virtual_stages=v, balance=balance), 0
    for m in sorted({1, 2, p - 1 or 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p, 5 * p, 5 * p + 1}):
        try:
            schedule.validate(m)
        except ValueError:
            continue
        stated, program = schedule_demand(schedule, m), proved(schedule, m)
        # A batch of one microbatch asks for fewer receives ahead than a full pipeline.
        ahead = [stated.receives_ahead, program.receives_ahead]
        assert all(more >= fewer for more, fewer in zip(*ahead, strict=True))
        assert m == 1 or ahead[0] == ahead[1]
        for field in {field.name for field in fields(Demand)} - {"receives_ahead"}:
            assert getattr(stated, field) == getattr(program, field), (m, field)
        compared += 1
    assert compared
