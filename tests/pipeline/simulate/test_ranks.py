"""The simulator against closed forms, and against what must hold for every program."""

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.graph import row_graph
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import Costs, SimulationError, simulate
from tests.draws import draws
from tests.pipeline.simulate.programs import B, F, build, program


@pytest.mark.parametrize("name", ["gpipe", "flush"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (2, 4), (4, 2), (4, 4), (8, 16)])
def test_flushed_batches_take_the_closed_form(name, p, m):
    """With a flush, every batch takes (m + p - 1)(f + b), and a rank is idle for (p - 1)(f + b) of it."""
    timeline = simulate(build(name, p, (m,) * 3), Costs(forward=F, backward=B))
    assert timeline.makespan == pytest.approx(3 * (m + p - 1) * (F + B))
    assert timeline.steady_time_per_batch() == pytest.approx((m + p - 1) * (F + B))
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.idle(0) == pytest.approx(3 * (p - 1) * (F + B))


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 4), (4, 8), (8, 8)])
def test_2bw_has_no_bubble_in_steady_state(p, m):
    """2BW takes m(f + b) per batch; only one fill and drain of (p - 1)(f + b) stays for the whole run."""
    timeline = simulate(build("2bw", p, (m,) * 5), Costs(forward=F, backward=B))
    assert timeline.steady_time_per_batch() == pytest.approx(m * (F + B))
    assert timeline.makespan == pytest.approx((5 * m + p - 1) * (F + B))


def test_the_slowest_stage_sets_the_pace():
    """With uneven stages 2BW takes m times the slowest stage's f + b per batch."""
    costs = Costs(forward=(1.0, 1.5, 0.5, 1.0), backward=(2.0, 3.0, 1.0, 2.0))
    assert simulate(build("2bw", 4, (8,) * 8), costs).steady_time_per_batch() == pytest.approx(8 * 4.5)


def test_recompute_takes_its_own_time():
    """Recompute adds its seconds to every backward; by default those of a forward."""
    base = build("2bw", 4, (4,) * 5, recompute=True)
    assert simulate(base).steady_time_per_batch() == pytest.approx(4 * (F + F + B))
    assert simulate(base, Costs(recompute=0.5)).steady_time_per_batch() == pytest.approx(4 * (F + 0.5 + B))


def test_split_backwards_take_their_halves():
    """The input half lets the stage before go on; the weight half is the rest of the backward."""
    timeline = simulate(program("0F0@0 0I0@0 0W0@0"), Costs(forward=1.0, backward=2.0, backward_input=0.5))
    assert timeline.ends[0] == [1.0, 1.5, 3.0]
    assert timeline.saved_microbatches(0) == [(0.0, 1), (3.0, 0)]


def test_a_program_may_begin_anywhere_in_a_run():
    """Numbers of batches and microbatches change no times."""
    schedule = Schedule.preset("2bw", num_stages=4)
    early, late = schedule.build((4, 6)), schedule.build((4, 6), first_batch=7, first_microbatch=100)
    assert simulate(late).ends == simulate(early).ends
    assert simulate(late).first_microbatch == 100


GROWING = ("forward", "backward", "recompute", "step", "latency", "forward_bytes", "reduce_grad", "reduce_norm")


@draws(60)
@given(
    name=st.sampled_from(["gpipe", "flush", "2bw"]),
    p=st.integers(1, 5),
    extra=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    costs=st.fixed_dictionaries({name: st.floats(0, 4) for name in GROWING}),
    grown=st.sampled_from(GROWING),
)
def test_nothing_gets_faster_when_a_cost_grows(name, p, extra, costs, grown):
    """No cost can grow and make any instruction end earlier; no rank is busier than the run is long; order is kept."""
    schedule = build(name, p, [p + more for more in extra], recompute=True, data_parallel=True)
    before = simulate(schedule, Costs(**costs, bandwidth=1.0))
    after = simulate(schedule, Costs(**{**costs, grown: costs[grown] + 1.0}, bandwidth=1.0))
    for earlier, later in zip(before.ends, after.ends, strict=True):
        assert all(a <= b + 1e-9 for a, b in zip(earlier, later, strict=True))
    for rank in range(p):
        assert before.idle(rank) >= -1e-9
        assert all(first.end <= second.start + 1e-9 for first, second in pairwise(before.computations(rank)))


@draws(30)
@given(p=st.integers(1, 6), extra=st.lists(st.integers(0, 5), min_size=1, max_size=4), factor=st.floats(0.1, 10))
def test_the_unit_of_time_does_not_matter(p, extra, factor):
    """All costs times a factor give all times times that factor."""
    schedule = build("2bw", p, [p + more for more in extra])
    one, other = (simulate(schedule, Costs(forward=x, backward=2 * x, latency=0.3 * x)) for x in (1.0, factor))
    assert other.makespan == pytest.approx(factor * one.makespan)


def test_an_unknown_kind_is_an_error(monkeypatch):
    """What the simulator does not handle, it refuses by name."""
    monkeypatch.delitem(row_graph.ACTIONS, Kind.RECOMPUTE)
    with pytest.raises(SimulationError, match=r"rank 0, position 1, 0R0@0: the simulator does not know R"):
        simulate(program("0F0@0 0R0@0 0B0@0"))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (("0F0@0 0SEND_F0", "1F0@0 1RECV_F0"), "rank 1, position 0, 1F0@0: a deadlock"),
        (("0F0@0", "1RECV_F0 1F0@0"), "rank 1, position 1, 1F0@0: a deadlock"),
        (("0F0@0 0SEND_F0", "1REDUCE_NORM@1"), "rank 0, position 1, 0SEND_F0: the other members never post it"),
        (("0SEND_B0", "1RECV_B0"), "0SEND_B0: no channel leads there"),
        (("0F0@0 0SEND_F0 0F1@0 0SEND_F1", "1RECV_F1 1RECV_F0"), "the other end of the channel has microbatch"),
        (("0F2@0",), "there is no such microbatch"),
        (
            ("0REDUCE_NORM@1 0REDUCE_EMBED@1 0STEP@1", "1REDUCE_EMBED@1 1REDUCE_NORM@1 1STEP@1"),
            "STEP@1: a deadlock: the reductions",
        ),
    ],
)
def test_programs_that_cannot_end_are_refused(rows, reason):
    """A deadlock, a lost end and a crossed channel are named with rank, position and instruction."""
    with pytest.raises(SimulationError, match=reason):
        simulate(program(*rows, batches=(2,)))


@pytest.mark.parametrize(
    ("costs", "reason"),
    [
        ({"forward": (1.0, 2.0)}, "forward has 2 numbers; give one for all, or one for each of 4"),
        ({"latency": (0.1,) * 4}, "latency has 4 numbers; give one for all, or one for each of 3"),
        ({"backward": -1.0}, "backward is -1"),
        ({"step": float("nan")}, "step is nan"),
        ({"bandwidth": 0.0}, "bandwidth is 0"),
        ({"backward_input": 3.0}, "backward_input is a part"),
        ({"evict": -1.0}, "evict is -1"),
        ({"load": (1.0,)}, "load has 1 numbers"),
    ],
)
def test_costs_out_of_range_are_refused(costs, reason):
    """A cost says what is wrong with it, and what to give instead."""
    with pytest.raises(ValueError, match=reason):
        simulate(build("flush", 4, (4,)), Costs(**costs))


@pytest.mark.full
def test_a_million_instructions_take_less_than_two_seconds():
    """Two microseconds of one core for each instruction, at the least of three: on a busy core they take one."""
    lowered = build("2bw", 16, (128,) * 8)
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        timeline = simulate(lowered)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 2e-6 * lowered.num_instructions
    assert timeline.makespan == pytest.approx((8 * 128 + 15) * 3)


# --- the chain of reductions


@pytest.mark.parametrize("m", [4, 8])
def test_2bw_hides_the_reduction_chain_within_its_slack(m):
    """A chain up to (m-p+1)(f+b) costs nothing; a longer one does."""
    slack = (m - 3) * (F + B)
    schedule = build("2bw", 4, (m,) * 8, data_parallel=True, tied_embeddings=True)

    def time_per_batch(share):
        costs = Costs(
            reduce_grad=0.3 * share * slack, reduce_embed=0.3 * share * slack, reduce_norm=0.4 * share * slack
        )
        return simulate(schedule, costs).steady_time_per_batch()

    assert time_per_batch(0.99) == pytest.approx(m * (F + B))
    assert time_per_batch(2.0) > m * (F + B) + 0.4 * slack


def test_a_flush_pays_for_its_chain():
    """Under flush the STEP stands right after the chain, so every batch pays for it and for the step."""
    costs = Costs(reduce_norm=0.75, step=0.25)
    assert simulate(build("flush", 4, (4,) * 3), costs).steady_time_per_batch() == pytest.approx(7 * (F + B) + 1.0)


def test_norm_starts_with_its_last_member():
    """The norm's reduction has the same span on every rank: from the last member's post on."""
    timeline = simulate(build("flush", 4, (4,)), Costs(reduce_norm=0.5))
    spans = {(span.start, span.end) for span in timeline.spans if span.instruction.kind is Kind.REDUCE_NORM}
    assert spans == {(21.0, 21.5)}


@pytest.mark.parametrize("data_parallel", [False, True])
def test_pipedream_runs_without_a_bubble(data_parallel):
    """Under weight stashing, with one microbatch per batch, a steady pipeline takes f + b per batch.

    The norm of a batch comes together only when the first stage has ended it; it serves the report, so no STEP waits.
    """
    timeline = simulate(build("pipedream", 4, (1,) * 24, data_parallel=data_parallel))
    assert timeline.steady_time_per_batch() == pytest.approx(F + B)
