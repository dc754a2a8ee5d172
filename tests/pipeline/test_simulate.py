"""The simulator against closed forms, and against what must hold for every program."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline import simulate as simulate_module
from megatron.pipeline.instruction import Instruction, Kind
from megatron.pipeline.program import Program, WeightPolicy
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import Costs, SimulationError, simulate

F, B = 1.0, 2.0


def build(name, num_stages, batches, **flags):
    return Schedule.preset(name, num_stages=num_stages, **flags).build(tuple(batches))


def program(*rows, batches=(1,), stages=None):
    """A program from the text of its rows."""
    parsed = tuple(tuple(map(Instruction.parse, row.split())) for row in rows)
    return Program(parsed, tuple(range(stages or len(rows))), tuple(batches), WeightPolicy.FLUSH)


def without_transfers(program):
    rows = tuple(tuple(each for each in row if not each.kind.is_transfer) for row in program.rows)
    return replace(program, rows=rows)


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


def test_2bw_over_flush_at_four_and_eight_stages():
    """At m = p a flush costs 1.75 times the time of 2BW for 4 stages, and 1.875 times for 8."""
    for p, ratio in ((4, 1.75), (8, 1.875)):
        flush, two_bw = (simulate(build(name, p, (p,) * 6)).steady_time_per_batch() for name in ("flush", "2bw"))
        assert flush / two_bw == pytest.approx(ratio)


def test_input_9_is_the_first_with_new_weights():
    """Figure 2: on each of 4 workers the STEP of version 1 stands after input 8's forward and before input 9's."""
    timeline = simulate(build("2bw", 4, (4, 4, 4)))
    for rank in range(4):
        spans = {str(span.instruction): span for span in timeline.computations(rank)}
        step = spans[f"{rank}STEP@1"]
        assert spans[f"{rank}F7@0"].end <= step.start <= step.end <= spans[f"{rank}F8@1"].start
        assert spans[f"{rank}B6@0"].end <= spans[f"{rank}B7@0"].end  # input 8 and those before it keep the old weights


def test_the_slowest_stage_sets_the_pace():
    """With uneven stages 2BW takes m times the slowest stage's f + b per batch."""
    costs = Costs(forward=(1.0, 1.5, 0.5, 1.0), backward=(2.0, 3.0, 1.0, 2.0))
    assert simulate(build("2bw", 4, (8,) * 8), costs).steady_time_per_batch() == pytest.approx(8 * 4.5)


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("latency", [0.1, 0.5])
def test_latency_costs_a_round_trip_over_the_microbatches_in_flight(p, latency):
    """A round trip has 2(p-1) latencies, and stage 0 has p microbatches in flight that share them."""
    costs = Costs(forward=F, backward=B, latency=latency)
    timeline = simulate(build("2bw", p, (p,) * 40), costs)
    assert timeline.steady_time_per_batch() == pytest.approx(p * (F + B) + 2 * (p - 1) * latency, rel=1e-3)


@pytest.mark.parametrize("latencies", [(0.0, 0.8, 0.0), (0.3, 0.1, 0.8), (0.8, 0.8, 0.1, 0.0, 0.8)])
def test_uneven_latencies_cost_their_slowest_circle(latencies):
    """Stages s to t share 2(t - s) latencies among t - s + 1 microbatches; the slowest such circle sets the pace."""
    p = len(latencies) + 1
    circles = [2 * sum(latencies[s:t]) / (t - s + 1) for s in range(p) for t in range(s + 1, p)]
    lowered, costs = build("2bw", p, (p,) * 40), Costs(forward=F, backward=B, latency=latencies)
    law = p * (F + B + max(circles))
    assert simulate(without_transfers(lowered), costs).steady_time_per_batch() == pytest.approx(law, rel=1e-3)
    assert law - 1e-6 <= simulate(lowered, costs).steady_time_per_batch() <= law + max(latencies)


@pytest.mark.parametrize("latency", [0.1, 0.5, 1.0])
def test_extra_warmup_buys_the_latency_back(latency):
    """With 2(p-1) forwards of warm-up, latency up to a forward is hidden, but for one per batch.

    That one remains because no receive is posted before the border of its batch, where a run may be drained instead.
    """
    schedule = build("2bw", 4, (8,) * 8, extra_warmup=True)
    timeline = simulate(schedule, Costs(forward=F, backward=B, latency=latency))
    assert 8 * (F + B) <= timeline.steady_time_per_batch() <= 8 * (F + B) + latency + 1e-9
    assert [timeline.peak_saved_microbatches(stage) for stage in range(4)] == [7, 5, 3, 1]


def test_a_slow_link_sets_the_pace():
    """An edge that a transfer occupies for longer than a stage computes is the bottleneck.

    With every receive posted in time it carries one transfer after the other; a program that posts a receive only when
    the forward before has run pays that forward, too, and one transfer at the border of a batch.
    """
    costs = Costs(forward=F, backward=B, forward_bytes=(0, 5e6, 0), backward_bytes=0, bandwidth=1e6)
    lowered = build("2bw", 4, (12,) * 6, extra_warmup=True)
    assert simulate(without_transfers(lowered), costs).steady_time_per_batch() == pytest.approx(12 * 5.0)
    assert 12 * 5.0 <= simulate(lowered, costs).steady_time_per_batch() <= 12 * (5.0 + F) + 5.0


def test_transfers_overlap_with_computation():
    """A link that a transfer occupies for less than a computation costs a filled pipeline one transfer per batch."""
    costs = Costs(forward=F, backward=B, forward_bytes=500.0, bandwidth=1000.0)
    lowered = build("2bw", 4, (8,) * 8, extra_warmup=True)
    assert simulate(without_transfers(lowered), costs).steady_time_per_batch() == pytest.approx(8 * (F + B))
    assert simulate(lowered, costs).steady_time_per_batch() <= 8 * (F + B) + 0.5 + 1e-9


def test_a_transfer_waits_for_both_ends_and_for_its_channel():
    """A transfer starts when both ends have posted it and the channel is free; latency does not occupy it."""
    rows = ("0F0@0 0SEND_F0 0F1@0 0SEND_F1", "1RECV_F0 1RECV_F1 1F0@0 1F1@0")
    costs = Costs(forward=1.0, forward_bytes=3.0, bandwidth=1.0, latency=10.0)
    timeline = simulate(program(*rows, batches=(2,)), costs)
    assert [(span.start, span.end) for span in timeline.spans if span.instruction.kind is Kind.SEND_F] == [
        (1, 14),
        (4, 17),
    ]
    assert timeline.starts[1] == [1, 4, 14, 17]
    late = ("0F0@0 0SEND_F0 0F1@0 0SEND_F1", "1RECV_F0 1F0@0 1RECV_F1 1F1@0")  # posted only after the first forward
    assert simulate(program(*late, batches=(2,)), costs).starts[1] == [1, 14, 15, 28]


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


def test_recompute_takes_its_own_time():
    """Recompute adds its seconds to every backward; by default those of a forward."""
    base = build("2bw", 4, (4,) * 5, recompute=True)
    assert simulate(base).steady_time_per_batch() == pytest.approx(4 * (F + F + B))
    assert simulate(base, Costs(recompute=0.5)).steady_time_per_batch() == pytest.approx(4 * (F + 0.5 + B))


@pytest.mark.parametrize("data_parallel", [False, True])
def test_pipedream_runs_without_a_bubble(data_parallel):
    """Under weight stashing, with one microbatch per batch, a steady pipeline takes f + b per batch.

    The norm of a batch comes together only when the first stage has ended it; it serves the report, so no STEP waits.
    """
    timeline = simulate(build("pipedream", 4, (1,) * 24, data_parallel=data_parallel))
    assert timeline.steady_time_per_batch() == pytest.approx(F + B)


def test_split_backwards_take_their_halves():
    """The input half lets the stage before go on; the weight half is the rest of the backward."""
    timeline = simulate(program("0F0@0 0I0@0 0W0@0"), Costs(forward=1.0, backward=2.0, backward_input=0.5))
    assert timeline.ends[0] == [1.0, 1.5, 3.0]
    assert timeline.saved_microbatches(0) == [(0.0, 1), (3.0, 0)]


def test_compute_only_programs_are_timed_alike():
    """Without transfers in the program, tensors move by themselves, with the same latency."""
    lowered = build("2bw", 4, (4, 4, 4))
    for costs in (Costs(), Costs(latency=0.25)):
        alone = simulate(without_transfers(lowered), costs)
        assert alone.makespan == pytest.approx(simulate(lowered, costs).makespan)


def test_a_program_may_begin_anywhere_in_a_run():
    """Numbers of batches and microbatches change no times."""
    schedule = Schedule.preset("2bw", num_stages=4)
    early, late = schedule.build((4, 6)), schedule.build((4, 6), first_batch=7, first_microbatch=100)
    assert simulate(late).ends == simulate(early).ends
    assert simulate(late).first_microbatch == 100


COSTS = st.fixed_dictionaries(
    {
        name: st.floats(0, 4)
        for name in (
            "forward",
            "backward",
            "recompute",
            "step",
            "latency",
            "forward_bytes",
            "reduce_grad",
            "reduce_norm",
        )
    }
)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["gpipe", "flush", "2bw"]),
    p=st.integers(1, 5),
    extra=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    costs=COSTS,
    grown=st.sampled_from(
        ["forward", "backward", "recompute", "step", "latency", "forward_bytes", "reduce_grad", "reduce_norm"]
    ),
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


@settings(max_examples=30, deadline=None)
@given(p=st.integers(1, 6), extra=st.lists(st.integers(0, 5), min_size=1, max_size=4), factor=st.floats(0.1, 10))
def test_the_unit_of_time_does_not_matter(p, extra, factor):
    """All costs times a factor give all times times that factor."""
    schedule = build("2bw", p, [p + more for more in extra])
    one, other = (simulate(schedule, Costs(forward=x, backward=2 * x, latency=0.3 * x)) for x in (1.0, factor))
    assert other.makespan == pytest.approx(factor * one.makespan)


def spans_of(timeline, rank):
    spans = zip(timeline.rows[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
    return {str(each).split("@")[0]: times for each, *times in spans}


def test_moves_run_beside_computations():
    """Figure 4: what moves within a forward delays nothing; a LOAD that is late delays its backward by as much."""
    plain, bpipe = (build(name, 4, (8,)) for name in ("flush", "bpipe"))
    assert simulate(bpipe, Costs(evict=1.0)).makespan == simulate(plain).makespan
    timeline = simulate(bpipe, Costs(evict=0.5, load=1.25))
    evictor, acceptor = spans_of(timeline, 0), spans_of(timeline, 3)
    assert evictor["0EVICT1"] == [2.0, 2.5]  # beside F2
    assert evictor["0EVICT3"] == [4.0, 4.5]  # after F3, before B0, which waits for its gradient until 10
    assert evictor["0LOAD1"] == [12.0, 13.25]  # beside F4, which ends at 13
    assert evictor["0B1"][0] == 13.25
    assert acceptor["3ACCEPT1"] == [0.0, 2.5]  # posted with the batch
    assert acceptor["3ACCEPT3"] == [2.5, 4.5]  # posted when the move before it is complete
    assert acceptor["3RETURN1"] == [4.5, 13.25]
    assert timeline.makespan > simulate(plain).makespan


def test_a_forward_waits_for_a_late_eviction():
    """EVICT1 has the time of F2; where it takes longer, F3 waits for its room."""
    timeline = simulate(build("bpipe", 4, (8,)), Costs(evict=1.75, load=0.0))
    assert spans_of(timeline, 0)["0F3"][0] == 2.0 + 1.75


def test_synchronous_moves_stop_the_evictor():
    """The computation after an EVICT or a LOAD starts when that is complete; the acceptor waits for nothing, and moves
    that take no time change nothing.
    """
    bpipe = build("bpipe", 4, (8,))
    timeline = simulate(bpipe, Costs(evict=0.5), synchronous_moves=True)
    evictor = spans_of(timeline, 0)
    for move, computation in (("0EVICT1", "0F2"), ("0EVICT3", "0B0"), ("0LOAD1", "0F4")):
        assert evictor[computation][0] >= evictor[move][1]
    assert evictor["0F2"] == [2.5, 3.5]
    assert spans_of(timeline, 3)["3F0"][0] == 3.0  # as without moves
    assert timeline.makespan > simulate(bpipe, Costs(evict=0.5)).makespan
    assert simulate(bpipe, synchronous_moves=True).makespan == simulate(bpipe).makespan


@pytest.mark.parametrize("name", ["flush", "2bw"])
@pytest.mark.parametrize(("f", "b"), [(1.0, 1.0), (1.0, 1.4), (1.0, 2.0)])
@pytest.mark.parametrize("p", [4, 5, 8, 16])
def test_balancing_costs_no_time(name, f, b, p):
    """Whatever the ratio of backward to forward: moves that fit under a forward leave the makespan as it is."""
    batches = (p, p + 3, 2 * p + 1)
    plain, balanced = (build(name, p, batches, balance=balance) for balance in (False, True))
    costs = {"forward": f, "backward": b}
    timeline = simulate(balanced, Costs(**costs, evict=f))
    assert timeline.makespan == pytest.approx(simulate(plain, Costs(**costs)).makespan)
    assert max(map(timeline.peak_saved_microbatches, range(p))) == -(-(p + 2) // 2)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), name=st.sampled_from(["flush", "2bw"]), p=st.integers(1, 9))
def test_no_speed_exceeds_the_bound(data, name, p):
    """Stages of any speed, moves and transfers of any duration: at no moment more than ceil((p+2)/2) is saved."""
    seconds = st.floats(0.01, 5.0)
    costs = {
        each: data.draw(st.lists(seconds, min_size=p, max_size=p)) for each in ("forward", "backward", "evict", "load")
    }
    program = build(name, p, (p + data.draw(st.integers(0, 6)), 2 * p), balance=True)
    timeline = simulate(program, Costs(**costs, latency=data.draw(seconds)))
    bound = max(1, -(-(p + 2) // 2))
    assert all(timeline.peak_saved_microbatches(stage) <= bound for stage in range(p))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (("0F0@0 0EVICT0 0LOAD0 0B0@0", "1F0@0 1B0@0"), "rank 0, position 3, 0B0@0: a deadlock: the moves that it"),
        (("0F0@0 0EVICT0 0B0@0", "1F0@0 1B0@0"), "0EVICT0: the other members never post it"),
        (("0F0@0 0EVICT0 0B0@0", "1RETURN0 1F0@0 1B0@0"), "move 0 of rank 0 is 0EVICT0, not 0LOAD0|is 1RETURN0, not"),
        (("0F0@0 0EVICT0 0B0@0",), "its pair stage lives on the same rank"),
    ],
)
def test_moves_that_cannot_end_are_refused(rows, reason):
    """A move without its other end, or with another one, is named."""
    with pytest.raises(SimulationError, match=reason):
        simulate(program(*rows))


def test_an_unknown_kind_is_an_error(monkeypatch):
    """What the simulator does not handle, it refuses by name."""
    monkeypatch.delitem(simulate_module._ACTION, Kind.RECOMPUTE)
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


def test_time_is_linear_in_the_instructions():
    """Hundreds of thousands of instructions take a second or so of one core, not minutes."""
    schedule = build("2bw", 16, (128,) * 8)
    begin = time.process_time()
    timeline = simulate(schedule)
    assert time.process_time() - begin < 10e-6 * schedule.num_instructions
    assert timeline.makespan == pytest.approx((8 * 128 + 15) * 3)
