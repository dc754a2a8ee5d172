"""The demand that a schedule states, and its closed form, are that of its proved programs."""

import itertools
from dataclasses import fields, replace

import pytest

from megatron.pipeline.schedules import Schedule
from megatron.planner import Demand
from megatron.planner.memory.schedule_demand import closed_form_demand, proved_demand, schedule_demand

CHOICES = [
    (name, p, v, balance)
    for name, p, v, balance in itertools.product(
        ("gpipe", "flush", "2bw", "pipedream", "bpipe", "interleaved"), (1, 2, 3, 4, 6), (1, 2, 3), (False, True)
    )
    if (v == 1 or name == "interleaved")
    and not (balance and name in ("gpipe", "pipedream", "bpipe"))
    and (p > 1 or name != "interleaved")
]


def compare(schedule: Schedule, num_microbatches: int) -> None:
    """The closed form is equal, or where it says so an upper bound that is reached with 3p microbatches."""
    found, exact = closed_form_demand(schedule, num_microbatches), proved_demand(schedule, num_microbatches)
    where = f"{schedule}, {num_microbatches} microbatches"
    assert found.evicts == exact.evicts and found.accepts == exact.accepts, where
    assert all(a <= b <= a + 1 for a, b in zip(exact.receives_ahead, found.receives_ahead, strict=True)), where
    for rank in range(schedule.num_ranks):
        more = found.saved_on_rank[rank] - exact.saved_on_rank[rank]
        assert more >= 0 and (found.accepts[rank] or more == 0), where
        assert not (more and num_microbatches >= 3 * schedule.num_ranks), where
        for stage in found.stages_of(rank):
            assert found.saved_microbatches[stage] >= exact.saved_microbatches[stage], where
            if not any(found.evicts):
                assert found.saved_microbatches[stage] == exact.saved_microbatches[stage], where
    loose = {name: getattr(exact, name) for name in ("saved_microbatches", "saved_on_rank", "receives_ahead")}
    assert replace(found, **loose) == exact, where


PREDICTING = {
    "stage": {},
    "uniform": {"provisional_microbatches": 1},
    "uniform, all but what the first stage leaves": {"provisional_microbatches": "most"},
    "reduced": {"reduce_partial": True, "data_parallel": True},
    "tied": {"tied_embeddings": True},
    "balanced": {"balance": True},
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("mode", PREDICTING)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_predictions_keep_what_the_proved_program_keeps(p, mode):
    """Also of batches that are larger than those that are proved."""
    for m in (p, p + 1, 3 * p, 5 * p, 5 * p + 1, 11 * p):
        options = dict(PREDICTING[mode])
        if options.get("provisional_microbatches") == "most":
            options["provisional_microbatches"] = m - p + 1
        schedule = Schedule.preset("2bw", predict=True, num_stages=p, **options)
        assert schedule_demand(schedule, m) == proved_demand(schedule, m), m
        compare(schedule, m)
    assert all(proved_demand(schedule, m).predicts) and not any(
        proved_demand(Schedule.preset("2bw", num_stages=p), m).predicts
    )


def test_who_holds_gradients():
    """Nobody where each stage reads what it has done; all but the first where all read what the first has done; all
    where replicas reduce them, or fewer are read. The ends hold a tied embedding's.
    """

    def held(num_microbatches: int = 9, **options) -> tuple[int, ...]:
        return schedule_demand(Schedule.preset("2bw", predict=True, num_stages=4, **options), num_microbatches)

    assert held().held_gradients == held().held_embeddings == (0, 0, 0, 0)
    assert held(provisional_microbatches=6).held_gradients == (0, 1, 1, 1)
    assert held(60, provisional_microbatches=57).held_gradients == (0, 1, 1, 1)
    assert held(provisional_microbatches=5).held_gradients == (1, 1, 1, 1)
    assert held(reduce_partial=True, data_parallel=True).held_gradients == (1, 1, 1, 1)
    assert held(reduce_partial=True).held_gradients == (0, 0, 0, 0)
    assert held(tied_embeddings=True).held_embeddings == (1, 0, 0, 1)
    assert held().live_versions == held().gradient_buffers == (2, 2, 2, 2)


@pytest.mark.sample(25)
@pytest.mark.parametrize(("name", "p", "v", "balance"), CHOICES)
def test_is_that_of_the_proved_program(name, p, v, balance):
    """For batches of one microbatch up to five times as many as ranks, wherever the schedule can run them."""
    schedule, compared = Schedule.preset(name, num_stages=p * v, num_virtual_stages=v, balance=balance), 0
    for m in sorted({1, 2, p - 1 or 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p, 5 * p, 5 * p + 1}):
        try:
            schedule.validate(m)
        except ValueError:
            continue
        stated, program = schedule_demand(schedule, m), proved_demand(schedule, m)
        # A batch of one microbatch asks for fewer receives ahead than a full pipeline.
        ahead = [stated.receives_ahead, program.receives_ahead]
        assert all(more >= fewer for more, fewer in zip(*ahead, strict=True))
        assert m == 1 or ahead[0] == ahead[1]
        for field in {field.name for field in fields(Demand)} - {"receives_ahead"}:
            assert getattr(stated, field) == getattr(program, field), (m, field)
        compare(schedule, m)
        compared += 1
    assert compared


def test_refuses_what_the_schedule_refuses():
    """Batches that 2bw cannot run are refused as by the schedule itself."""
    with pytest.raises(ValueError, match="needs batches of at least 4"):
        closed_form_demand(Schedule.preset("2bw", num_stages=4), 3)
