"""What a file of somebody's own registers goes through everything that the project's own presets go through."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.costs import Costs
from megatron.pipeline.critical_path import critical_path
from megatron.pipeline.draw import draw_timeline, timeline_text
from megatron.pipeline.program import Program
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from tests.open_tables import PRESET, registered


@pytest.fixture(autouse=True)
def tables():
    with registered():
        yield


def schedule(num_ranks: int = 2, **options) -> Schedule:
    return Schedule.preset(PRESET, num_stages=2 * num_ranks, num_virtual_stages=2, **options)


def test_where_its_stages_lie():
    """The preset's placement decides, and the program says so."""
    assert schedule().rank_of_stage == (1, 0, 0, 1)
    assert schedule().build((2,)).stages_of(1) == (0, 3)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_its_programs_are_proved(num_ranks: int, batches: list[int], recompute: bool, tied: bool):
    """For any size, ramp-up and flags; the text is read back as the same program."""
    with registered():
        chosen = schedule(num_ranks, recompute=recompute, tied_embeddings=tied, data_parallel=True)
        program = chosen.build(batches)
        report = check(program, max_saved=chosen.max_saved_microbatches(batches))
        assert report.live_versions == (min(3, len(batches) + 1),) * chosen.num_stages
        assert Program.from_csv(program.to_csv()) == program
        check_periodic(chosen.build_periodic(batches[0]))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=3))
def test_its_legs_are_the_programs(num_ranks: int, stretches: list[list[int]]):
    """Legs and drains, which are what runs, are what is built; drains in between included."""
    with registered():
        chosen = schedule(num_ranks)
        stream = chosen.stream()
        for batches in stretches:
            program = chosen.build(batches, first_batch=stream.next_batch, first_microbatch=stream.next_microbatch)
            legs = [*(stream.start_batch(size) for size in batches), stream.drain()]
            for rank, row in enumerate(program.rows):
                assert tuple(each for leg in legs for each in leg[rank]) == row


def test_it_is_simulated_and_explained():
    """Every microbatch's work is in the timeline, and a critical path explains it."""
    costs = Costs(forward=1.0, backward=2.0, latency=0.25)
    timeline = simulate(schedule().build((4,) * 6), costs)
    assert timeline.busy(0) == timeline.busy(1) == 6 * 4 * 2 * 3.0
    path = critical_path(timeline, costs)
    assert path[0].start == 0.0 and path[-1].end == pytest.approx(timeline.end)


def test_it_is_drawn(tmp_path):
    """As a picture and as text."""
    timeline = simulate(schedule().build((2,) * 3), Costs(forward=1.0, backward=2.0))
    draw_timeline([timeline], tmp_path / "timeline.png", saved_microbatches=True, lanes=True)
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
    assert "rank 1" in timeline_text(timeline).plain
