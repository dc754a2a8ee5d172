"""The order interleaved is Megatron's: its loop, its bubble, its memory, and the batches that it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.program.instruction import Instruction, Kind, Row
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import Costs, simulate
from tests import workers
from tests.draws import draws
from tests.pipeline.check.examples import interleaved_bounds
from tests.pipeline.strategies import kinds_of


def schedule(p: int, v: int, **choices: object) -> Schedule:
    return Schedule.preset("interleaved", num_stages=p * v, num_virtual_stages=v, **choices)


def words(row: Row, p: int) -> str:
    """The computations of a row, with the chunk in the place of the stage."""
    computations = kinds_of(row, Kind.FORWARD, Kind.BACKWARD)
    return " ".join(f"{each.stage // p}{each.kind.value}{each.microbatch}" for each in computations)


@pytest.mark.full
def test_it_is_megatrons_loop():
    """megatron.core's own loop, run on every rank of many pipelines, computes in our order, and refuses what we do."""
    cases = [
        (p, v, m, group, rank, forward_only)
        for p in (2, 3, 4)
        for v in (2, 3)
        for group in (p, p + 1, p - 1)
        for m in (group, 2 * group, 2 * group + p, 3 * group, 2 * group + 1, group - 1)
        for forward_only in (False, True)
        for rank in range(p)
    ]
    function = "tests.pipeline.schedules.megatron_loop:run_all"
    (loops,) = workers.run(1, function, cases=cases, timeout=180)
    num_refused = 0
    for case, loop in zip(cases, loops, strict=True):
        p, v, m, group, rank, forward_only = case
        if loop.startswith("refused"):
            with pytest.raises(ValueError, match=r"groups of|in groups"):
                schedule(p, v, microbatch_group_size=group).validate(m)
            num_refused += 1
            continue
        if rank == 0:
            choices = schedule(p, v, microbatch_group_size=group)
            program = choices.build_evaluation(m, version=0) if forward_only else choices.build((m,))
        assert words(program.rows[rank], p) == loop, case
    assert min(num_refused, len(cases) - num_refused) > 200


@draws(30)
@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 4),
    st.fixed_dictionaries({name: st.booleans() for name in ("recompute", "data_parallel", "tied_embeddings")}),
)
def test_it_is_proved_with_the_memory_that_it_takes(p: int, v: int, groups: int, choices: dict[str, bool]):
    """Any p, v and number of groups: proved, for every number of batches, and each stage and rank reaches its bound."""
    interleaved, batches = schedule(p, v, **choices), (groups * p,)
    on_stages, on_ranks = interleaved.max_saved_microbatches(batches), interleaved.max_saved_on_rank(batches)
    for report in (
        check(interleaved.build(batches), max_saved=on_stages, max_saved_on_rank=on_ranks),
        check_periodic(interleaved.build_periodic(*batches), max_saved=on_stages, max_saved_on_rank=on_ranks),
    ):
        assert report.peak_saved_microbatches == on_stages
        assert report.peak_saved_on_rank == on_ranks
    if v > 1:
        assert list(on_stages) == interleaved_bounds(p, v, *batches)
        assert list(on_ranks) == [min(2 * (p - r - 1) + (v - 1) * p + 1, v * groups * p) for r in range(p)]


@draws(60)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 4), st.integers(1, 30), st.integers(0, 3))
def test_other_group_sizes_and_smaller_last_groups(p: int, v: int, more: int, m: int, first_batch: int):
    """Whatever batch is accepted is proved within the bounds that the schedule states."""
    interleaved = schedule(p, v, microbatch_group_size=p + more)
    try:
        interleaved.validate(m)
    except ValueError as error:
        assert v > 1 and (m < p + more or 0 < m % (p + more) < p)
        assert f"which {m} microbatches do not fill; make the batch a multiple of {p + more}" in str(error)
        return
    program = interleaved.build((m,) * 2, first_batch=first_batch)
    bounds = interleaved.max_saved_microbatches((m, m)), interleaved.max_saved_on_rank((m, m))
    check(program, max_saved=bounds[0], max_saved_on_rank=bounds[1])


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_one_chunk_on_each_rank_is_1f1b(num_stages: int):
    """v = 1 takes any batch, and is flush to the last instruction."""
    for m in (1, num_stages, num_stages + 1):
        interleaved, flush = schedule(num_stages, 1), Schedule.preset("flush", num_stages=num_stages)
        assert interleaved.build((m, m)).rows == flush.build((m, m)).rows
        assert interleaved.max_saved_microbatches((m,)) == flush.max_saved_microbatches((m,))


@draws(60)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.integers(1, 8))
def test_the_bubble_shrinks_with_the_chunks(p: int, v: int, groups: int, forward: int, backward: int):
    """Each rank idles for (p-1)(f+b)/v, where f and b are a whole rank's; flush with the same ranks for (p-1)(f+b)."""
    costs = Costs(forward=forward / v, backward=backward / v)
    timeline = simulate(schedule(p, v).build((groups * p,)), costs)
    for rank in range(p):
        assert timeline.idle(rank) == pytest.approx((p - 1) * (forward + backward) / v)


@draws(60)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 20))
def test_an_evaluation_takes_any_number_of_microbatches(p: int, v: int, m: int):
    """Forwards fill any last group, since nothing waits for a gradient; every chunk runs each microbatch once."""
    program = schedule(p, v).build_evaluation(m, version=2)
    check(program)
    for rank, row in enumerate(program.rows):
        forwards = kinds_of(row, Kind.FORWARD)
        expected = {Instruction(Kind.FORWARD, stage, each, 2) for stage in range(rank, p * v, p) for each in range(m)}
        assert set(forwards) == expected and len(forwards) == len(expected)


def test_a_rank_steps_once():
    """One optimizer owns all chunks of a rank: one STEP a batch, at its lowest stage, and its costs are the sum."""
    program = schedule(2, 2, data_parallel=True, tied_embeddings=True).build((2, 2))
    for rank, row in enumerate(program.rows):
        chain = kinds_of(row, Kind.REDUCE_GRAD, Kind.REDUCE_EMBED, Kind.REDUCE_NORM, Kind.STEP)
        assert [(each.stage, each.version) for each in chain] == [(rank, 1)] * 4 + [(rank, 2)] * 4
    costs = Costs(step=(1.0, 2.0, 3.0, 4.0), reduce_grad=(0.5, 0.5, 1.0, 2.0))
    spans = {(each.rank, each.instruction.kind): each.end - each.start for each in simulate(program, costs).spans}
    assert [spans[rank, Kind.STEP] for rank in range(2)] == [4.0, 6.0]
    assert [spans[rank, Kind.REDUCE_GRAD] for rank in range(2)] == [1.5, 2.5]
