"""The lanes between device and host: times by hand, by the closed form, and against the bounds of the idea."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import Costs, SimulationError, simulate
from megatron.pipeline.simulate.critical_path import critical_path
from megatron.pipeline.simulate.timeline import Timeline
from tests.draws import draws
from tests.pipeline.check.hosted import hosted

SECONDS = st.sampled_from((0, 1, 2, 3, 5, 8, 13, 21))


def costs(X: float = 0, G: float = 0, R: float = 0, U: float = 0, **others: float) -> Costs:
    """In forwards of a microbatch, with the page's letters."""
    return Costs(forward=1, backward=2, fetch=X, store=G, reduce_grad=R, update=U, **others)


def span(timeline: Timeline, word: str) -> tuple[float, float]:
    """Start and end of an instruction, where it stands first."""
    found = next(each for each in timeline.spans if each.instruction == Instruction.parse(word))
    return found.start, found.end


def last_end(timeline: Timeline) -> float:
    """The end of everything, updates on the host included."""
    return max(end for ends in timeline.ends for end in ends)


def closed_form(N: int, u: int, X: float, G: float, R: float, U: float) -> float:
    """Seconds of a batch on one rank: equal stages, two resident, eager updates, a forward is 1 and a backward 2."""
    pace = max(3 * u, X, G, R, U, (3 * u + R + G) / 2)
    return X + (N - 1) * max(u, X) + max(3 * u, X) + (N - 1) * pace + R + G + U


@draws(150)
@given(st.integers(2, 9), st.integers(1, 5), SECONDS, SECONDS, SECONDS, SECONDS)
def test_a_batch_takes_what_the_closed_form_says(N: int, u: int, X: int, G: int, R: int, U: int):
    """Exactly, unless fetches are longer than backwards, or two gradient buffers are what holds everything up.

    Then it is a bound: the form fetches two stages more than are fetched, since those of the turn stay; and it holds a
    buffer from the first recompute on, where the program takes it for the first backward, and has two free at first.
    """
    timeline = simulate(hosted(1, N, update="eager", data_parallel=True).build((u,)), costs(X, G, R, U))
    expected = closed_form(N, u, X, G, R, U)
    if 3 * u >= X and max(3 * u, G, R, U) >= (3 * u + R + G) / 2:
        assert last_end(timeline) == expected
    else:
        assert last_end(timeline) <= expected


@draws(40)
@given(st.integers(2, 9), st.integers(1, 5), st.integers(0, 30))
def test_where_fetches_are_long_2n_less_2_of_them_pass(N: int, u: int, more: int):
    """One after another, but for the two resident stages at the turn and the last backwards."""
    X = 3 * u + more
    timeline = simulate(hosted(1, N).build((u,)), costs(X))
    assert timeline.end == (2 * N - 2) * X + 6 * u


@pytest.mark.sample(1)
@pytest.mark.parametrize(("update", "U"), [("eager", 12), ("deferred", 4)])
def test_96_stages_stay_within_three_percent_of_their_computation(update: str, U: int):
    """Reduction and store together as long as a stage's backwards, fetches as its forwards; updates that fit beside a
    backward where they are eager, and beside a forward where they wait for the norm.
    """
    u, N = 4, 96
    computation = (N - 1) * 4 * u + 3 * u
    built = {U: hosted(1, N, update=update, data_parallel=True).build((u,) * 4) for U in (U, 3 * U + 3)}
    shares = {
        U: simulate(program, costs(X=u, G=1.5 * u, R=1.5 * u, U=U)).steady_time_per_batch() / computation
        for U, program in built.items()
    }
    assert 1 < shares[U] < 1.03 < shares[3 * U + 3]  # and longer ones do not fit


def test_four_ranks():
    """4 ranks, 16 stages, 8 microbatches: 137 where all is recomputed, for 128 of computation; 134 as the last stage
    recomputes nothing.
    """
    flags = {"weights": "flush", "num_stages": 16, "num_virtual_stages": 4, "recompute": True}
    everywhere = Schedule(order="interleaved", microbatch_group_size=8, **flags)
    assert simulate(everywhere.build((8,))).makespan == 137
    relay = simulate(Schedule(order="relay", **flags).build((8,)))
    assert relay.makespan == simulate(hosted(4, 4).build((8,))).makespan == 134


def test_deferred_updates_hold_up_their_own_fetch():
    """The next batch begins when its first stage is updated and fetched, beside the other updates."""
    timeline = simulate(hosted(1, 3, update="deferred").build((1, 1)), costs(X=1, G=1, U=4, step=2.0, reduce_norm=3.0))
    norm, step = span(timeline, "0REDUCE_NORM@1"), span(timeline, "0STEP@1")
    assert norm[1] == step[0] == span(timeline, "0B0@0")[1] + 3  # the norm does not wait for the store
    assert span(timeline, "0UPDATE@1") == (step[1], step[1] + 4)
    assert span(timeline, "1UPDATE@1") == (step[1] + 4, step[1] + 8)
    assert span(timeline, "0FETCH@1") == (step[1] + 4, step[1] + 5)
    assert span(timeline, "0F1@1")[0] == step[1] + 5
    assert span(timeline, "1FETCH@1") == (step[1] + 8, step[1] + 9)


def test_tied_embeddings_are_added_up_when_both_have_come():
    """On two ranks: behind the later of the two stores, and then both update."""
    program = hosted(2, 2, update="eager", tied_embeddings=True).build((2,))
    timeline = simulate(program, costs(X=1, G=5, U=2, reduce_embed=3.0))
    [first, last] = [each for each in timeline.spans if each.instruction.kind is Kind.REDUCE_EMBED]
    stored = [span(timeline, f"{end}STORE_GRAD@1")[1] for end in (0, 3)]
    assert (first.start, first.end) == (last.start, last.end) == (max(stored), max(stored) + 3)
    assert span(timeline, "0UPDATE@1")[0] == span(timeline, "3UPDATE@1")[0] == first.end


def test_a_reduction_is_of_one_stage():
    """Its own time, not that of all stages of the rank."""
    each = Costs(reduce_grad=(1.0, 2.0, 4.0), update=(5.0, 6.0, 7.0), store=(0.5, 0.25, 0.125), fetch=(0.0, 1.0, 2.0))
    timeline = simulate(hosted(1, 3, update="eager", data_parallel=True).build((2,)), each)
    for stage in range(3):
        for kind, seconds in (("REDUCE_GRAD", each.reduce_grad), ("UPDATE", each.update), ("STORE_GRAD", each.store)):
            start, end = span(timeline, f"{stage}{kind}@1")
            assert end - start == seconds[stage]


def test_what_never_comes_is_named():
    """A program that nobody has proved: a reduction that the other rank joins at the end holds up those behind it, and
    so the store that a third stage's backward waits for.
    """
    program = hosted(2, 4, data_parallel=True, tied_embeddings=True).build((2,))
    row = [each for each in program.rows[0] if each.kind is not Kind.REDUCE_EMBED]
    early = replace(program, rows=((Instruction.parse("0REDUCE_EMBED@1"), *row), program.rows[1]))
    with pytest.raises(SimulationError, match=r"2B0@0: a deadlock: the copies to and from the host .* never come"):
        simulate(early)


@draws(40)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(1, 4),
    SECONDS, SECONDS, SECONDS, SECONDS,
)  # fmt: skip
def test_a_path_explains_every_run(
    p: int, v: int, resident: int, eager: bool, tied: bool, m: int, X: int, G: int, R: int, U: int
):
    """From its start to its end without a gap, through lanes and reductions."""
    update = "eager" if eager else "deferred"
    schedule = hosted(p, v, resident=resident, update=update, tied_embeddings=tied, data_parallel=bool(R))
    priced = costs(X, G, R, U, reduce_norm=1, reduce_embed=2, latency=0.5)
    timeline = simulate(schedule.build((m, m)), priced)
    path = critical_path(timeline, priced)
    assert path[0].start == 0 and path[-1].end == pytest.approx(timeline.end)
    assert all(first.end == pytest.approx(second.start) for first, second in pairwise(path))
