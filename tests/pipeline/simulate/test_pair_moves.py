"""Moves of saved activations in the simulator."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.simulate import Costs, SimulationError, simulate
from tests.draws import draws
from tests.pipeline.simulate.programs import build, program


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


@pytest.mark.sample(8)
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


@draws(40)
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
