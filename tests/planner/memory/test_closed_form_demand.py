"""The closed form of a schedule's demand against that of its proved programs."""

from dataclasses import replace

import pytest

from megatron.pipeline.schedules import Schedule
from megatron.planner.memory.schedule_demand import closed_form_demand, proved_demand

CASES = [
    ("gpipe", 1, False), ("flush", 1, False), ("bpipe", 1, False), ("2bw", 1, False), ("2bw", 1, True),
    ("pipedream", 1, False), ("interleaved", 2, False), ("interleaved", 3, False), ("interleaved", 2, True),
    ("interleaved", 3, True),
]  # fmt: skip


@pytest.mark.parametrize("options", [
    {}, {"tied_embeddings": True}, {"reduce_partial": True, "data_parallel": True}, {"provisional_microbatches": 1},
    {"provisional_microbatches": 2},
])  # fmt: skip
def test_closed_form_of_predictions(options):
    """What is held is that of the proved program, exactly."""
    compared = 0
    for ranks in (1, 2, 4, 5):
        schedule = Schedule.preset("2bw", num_stages=ranks, predict=True, **options)
        for num_microbatches in filter(schedule.accepts, (ranks, ranks + 1, 3 * ranks, 4 * ranks + 1)):
            compare(schedule, num_microbatches)
            compared += 1
    assert compared > 8


def schedules(name: str, virtual: int, balance: bool, sizes: tuple[int, ...], most: int):
    """The schedule on so many ranks, with every batch that it runs up to `most` times as many microbatches."""
    for ranks in sizes:
        if virtual > 1 and ranks == 1:
            continue
        schedule = Schedule.preset(name, num_stages=ranks * virtual, num_virtual_stages=virtual, balance=balance)
        for num_microbatches in range(1, most * ranks + 1):
            try:
                schedule.validate(num_microbatches)
            except ValueError:
                continue
            yield schedule, num_microbatches


def compare(schedule: Schedule, num_microbatches: int) -> None:
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


@pytest.mark.parametrize(("name", "virtual", "balance"), CASES)
def test_closed_form_is_what_programs_demand(name, virtual, balance):
    """Equal, or where it says so an upper bound that is reached with 3p microbatches."""
    for schedule, num_microbatches in schedules(name, virtual, balance, (1, 2, 5), 3):
        compare(schedule, num_microbatches)


@pytest.mark.full
@pytest.mark.parametrize(("name", "virtual", "balance"), CASES)
def test_closed_form_at_more_ranks(name, virtual, balance):
    for schedule, num_microbatches in schedules(name, virtual, balance, (3, 4, 6, 7, 8), 5):
        compare(schedule, num_microbatches)


def test_refuses_what_the_schedule_refuses():
    """Batches that 2bw cannot run are refused as by the schedule itself."""
    with pytest.raises(ValueError, match="needs batches of at least 4"):
        closed_form_demand(Schedule.preset("2bw", num_stages=4), 3)
