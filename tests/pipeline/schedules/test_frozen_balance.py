"""Balanced schedules behind a frozen prefix: those of the pipeline that is left, with the prefix in front."""

from dataclasses import replace
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import ProgramError, check, check_periodic
from megatron.pipeline.check.hardware_queues import PROVED, prove_hardware_queues
from megatron.pipeline.program.instruction import COMPUTATIONS, MOVES, Instruction, Kind, Row
from megatron.pipeline.program.lane_order import awaited_moves
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import SimulationError, simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.memory_curve import MemorySizes, memory_curves
from megatron.pipeline.simulate.timeline import Timeline
from tests.draws import draws
from tests.pipeline.check.examples import with_row
from tests.pipeline.check.mutations import assert_every_mutation_is_rejected
from tests.pipeline.schedules.test_frozen import placement


def behind(num_active: int, num_frozen: int, together: bool, preset: str = "flush", **choices) -> Schedule:
    num_stages = num_active + num_frozen
    return Schedule.preset(
        preset, num_stages=num_stages, num_frozen=num_frozen, balance=True,
        rank_of_stage=placement(num_stages, num_frozen, together), **choices,
    )  # fmt: skip


def what_is_trained(row: Row, num_frozen: int) -> list[Instruction]:
    """The computations and moves of the stages behind the prefix, counted from its end."""
    return [
        replace(each, stage=each.stage - num_frozen)
        for each in row
        if each.kind in COMPUTATIONS | MOVES and each.stage >= num_frozen
    ]


def what_waits(row: Row, num_frozen: int) -> dict[Instruction, int]:
    """The computations that wait for moves, counted likewise, and for how many."""
    found = awaited_moves(row, num_frozen=num_frozen)
    return {replace(row[place], stage=row[place].stage - num_frozen): needed for place, needed in found.items()}


@draws(20)
@given(st.data())
def test_a_prefix_changes_nothing_behind_it(data: st.DataObject):
    """For any number of active stages, any prefix, border rank or not, and any batches: what is trained computes and
    moves in the order of the pipeline that is left, within its bound, proved, at any speed.
    """
    num_active, num_frozen = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    preset, together = data.draw(st.sampled_from(["flush", "2bw"])), data.draw(st.booleans())
    choices = {"recompute": data.draw(st.booleans()), "extra_warmup": data.draw(st.booleans())}
    schedule = behind(num_active, num_frozen, together, preset, **choices)
    alone = Schedule.preset(preset, num_stages=num_active, balance=True, **choices)
    in_flight = 2 * num_active - 1 if choices["extra_warmup"] else num_active
    fewest = in_flight if preset == "2bw" else 1
    batches = tuple(data.draw(st.lists(st.integers(fewest, fewest + in_flight + 3), min_size=1, max_size=3)))
    before = schedule.num_ranks - num_active  # ranks that are frozen
    program, left = schedule.build(batches), alone.build(batches)
    for rank, row in enumerate(left.rows):
        found = program.rows[before + rank]
        assert what_is_trained(found, num_frozen) == what_is_trained(row, 0)
        assert what_waits(found, num_frozen) == what_waits(row, 0)
    assert not any(each.kind in MOVES for row in program.rows[:before] for each in row)
    assert schedule.evicting_ranks(batches) == tuple(before + rank for rank in alone.evicting_ranks(batches))
    assert schedule.max_saved_microbatches(batches) == (0,) * num_frozen + alone.max_saved_microbatches(batches)
    assert schedule.max_saved_on_rank(batches) == (0,) * before + alone.max_saved_on_rank(batches)
    bounds = {
        "max_saved": schedule.max_saved_microbatches(batches),
        "max_saved_on_rank": schedule.max_saved_on_rank(batches),
    }
    report, of_left = check(program, **bounds), check(left)
    assert report.evicted_microbatches == (0,) * num_frozen + of_left.evicted_microbatches
    assert report.peak_saved_on_rank == (0,) * before + of_left.peak_saved_on_rank
    most = max(num_active + 1 if choices["extra_warmup"] else -(-(num_active + 2) // 2), 1 if num_active < 2 else 2)
    assert max(report.peak_saved_on_rank) <= most
    periodic = schedule.build_periodic(batches[0])
    check_periodic(periodic, max_saved_on_rank=schedule.max_saved_on_rank(batches[:1] * 3))
    assert Program.from_csv(program.to_csv()) == program
    seconds = st.lists(st.floats(0.05, 4.0), min_size=schedule.num_stages, max_size=schedule.num_stages)
    costs = {name: data.draw(seconds) for name in ("forward", "backward", "evict", "load")}
    timeline = simulate(program, Costs(**costs))
    for rank, most in enumerate(bounds["max_saved_on_rank"]):
        assert timeline.peak_saved_on_rank(rank) <= most


@draws(40)
@given(st.integers(4, 9), st.integers(1, 3), st.booleans(), st.integers(1, 20))
def test_evictor_and_acceptor_list_the_same(num_active: int, num_frozen: int, together: bool, num_microbatches: int):
    """Active stage x and active stage a-1-x, the one at its rank as the other at its own."""
    program = behind(num_active, num_frozen, together).build((num_microbatches,))
    other_end = {Kind.EVICT: Kind.ACCEPT, Kind.LOAD: Kind.RETURN}
    of_rank = [[each for each in row if each.kind in MOVES] for row in program.rows]
    for place in range(num_active // 2):
        evictor, acceptor = num_frozen + place, num_frozen + num_active - 1 - place
        sent, met = (of_rank[program.rank_of_stage[stage]] for stage in (evictor, acceptor))
        assert [each.stage for each in sent] == [evictor] * len(sent)
        assert met == [Instruction(other_end[each.kind], acceptor, each.microbatch) for each in sent]


def test_forwards_of_the_prefix_wait_for_no_move():
    """EVICT1 has the time of what is frozen, too, on the rank that has both: three forwards, until the room is needed
    for microbatch 3. What takes longer delays that one by as much, and nothing before it.
    """
    balanced = behind(4, 1, True)
    plain = simulate(replace(balanced, balance=False).build((8,)), Costs())
    for evict, late in ((3.0, 0.0), (3.5, 0.5)):
        found = _starts(simulate(balanced.build((8,)), Costs(evict=evict, load=0.0)))
        for stage, microbatch in ((0, 2), (1, 2), (0, 3), (1, 3)):
            delay = found[stage, microbatch] - _starts(plain)[stage, microbatch]
            assert delay == (late if (stage, microbatch) == (1, 3) else 0.0)


def _starts(timeline: Timeline) -> dict[tuple[int, int], float]:
    """The starts of forwards, by stage and microbatch."""
    return {
        (span.instruction.stage, span.instruction.microbatch): span.start
        for span in timeline.spans
        if span.instruction.kind is Kind.FORWARD
    }


@pytest.mark.parametrize("preset", ["flush", "2bw"])
@pytest.mark.parametrize("together", [False, True])
def test_every_wrong_move_is_rejected(preset: str, together: bool):
    """Dropped, doubled, of another microbatch, exchanged with the next move, or of the frozen stage."""
    schedule = behind(4, 1, together, preset)
    batches = (5, 4) if preset == "2bw" else (6,)
    program, bounds = schedule.build(batches), schedule.max_saved_on_rank(batches)
    for rank, row in enumerate(program.rows):
        places = [place for place, each in enumerate(row) if each.kind in MOVES]
        for place, following in zip_longest(places, places[1:]):
            each = row[place]
            rest, behind_it = row[:place], row[place + 1 :]
            wrong = [
                [*rest, *behind_it],
                [*rest, each, each, *behind_it],
                [*rest, replace(each, microbatch=each.microbatch - 1), *behind_it],
                [*rest, replace(each, stage=0), *behind_it],
            ]
            if following is not None:
                exchanged = list(row)
                exchanged[place], exchanged[following] = row[following], each
                wrong.append(exchanged)
            for mutant in wrong:
                with pytest.raises(ProgramError):
                    check(with_row(program, rank, mutant), max_saved_on_rank=bounds)


@pytest.mark.full
@pytest.mark.parametrize("preset", ["flush", "2bw"])
@pytest.mark.parametrize("together", [False, True])
def test_every_single_mutation_is_rejected(preset: str, together: bool):
    schedule = behind(4, 1, together, preset, data_parallel=True, recompute=together)
    assert_every_mutation_is_rejected(schedule.build((5, 4)))


def test_nothing_moves_from_a_frozen_stage():
    """Not even where the rank has an evictor, too; the reason says so."""
    program = behind(4, 1, True).build((6,))
    row = [replace(each, stage=0) if each.kind in (Kind.EVICT, Kind.LOAD) else each for each in program.rows[0]]
    reason = "stage 0 gets no gradients, so it has forwards only and saves nothing that could move"
    with pytest.raises(ProgramError, match=reason):
        check(with_row(program, 0, row))
    with pytest.raises(SimulationError, match=reason):
        simulate(with_row(program, 0, row), Costs())


def test_what_a_rank_holds_has_the_size_of_the_stage_that_saved_it():
    """The acceptor of stage 1, which is at the border, holds 10 bytes for each of its microbatches; the frozen stage
    none of its own.
    """
    timeline = simulate(behind(4, 1, True).build((8,)), Costs(evict=0.5))
    sizes = MemorySizes(activations=(1000, 10, 1, 1, 1))
    curves = memory_curves(timeline, sizes, behind(4, 1, True).weights)
    assert [curve.peak for curve in curves] == [30, 3, 2, 21]
    assert [timeline.peak_saved_on_rank(rank) for rank in range(4)] == [3, 3, 2, 3]


def test_with_a_hardware_queue_for_each_stream_no_timing_deadlocks():
    for together in (False, True):
        program = behind(4, 1, together, data_parallel=True).build((6, 6))
        assert prove_hardware_queues(program, data=2, num_queues=99).verdict == PROVED


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"order": "gpipe", "balance": True}, "saves a whole batch at every stage, so there is nothing to balance"),
        ({"order": "gpipe", "extra_warmup": True}, "gpipe has no warm-up that could be extended"),
        (
            {"order": "merged-1f1b"},
            "merged-1f1b has several trained stages on each rank, and the first 2 stages are frozen",
        ),
        ({"microbatch_group_size": 8}, "microbatch_group_size is for several trained stages on a rank, and the first"),
        ({"weights": "stash", "balance": True}, "is for trained stages, each of which steps by itself"),
    ],
)
def test_choices_that_do_not_go_with_it(choices: dict, reason: str):
    with pytest.raises(ValueError, match=reason):
        Schedule(**{"order": "1f1b", "weights": "flush", "num_stages": 6, "num_frozen": 2, **choices})


def test_few_that_are_left_have_nothing_to_balance():
    """Three active stages: nothing moves, and everything else goes on."""
    schedule = behind(3, 2, False)
    assert schedule.evicting_ranks((8,)) == () and not any(schedule.build((8,)).num_evictions)
