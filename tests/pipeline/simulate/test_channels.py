"""Transfers in the simulator: latency, bandwidth, and whether they run beside computations."""

import pytest

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules import PRESETS
from megatron.pipeline.simulate import Costs, simulate
from tests.pipeline.simulate.programs import B, F, build, program, without_transfers


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


def test_who_is_held_computes_later():
    """The next forward starts when the SEND lets go, whether its receive is posted or not; latency holds nobody."""
    rows = ("0F0@0 0SEND_F0 0F1@0", "1RECV_F0 1F0@0")
    costs = Costs(forward=1.0, forward_bytes=3.0, bandwidth=1.0, latency=10.0, overlap=False)
    timeline = simulate(program(*rows, batches=(2,)), costs)
    assert timeline.starts == ([0, 1, 4], [1, 14])
    assert simulate(without_transfers(program(*rows, batches=(2,))), costs).starts == ([0, 4], [14])


@pytest.mark.parametrize("name", PRESETS)
def test_holding_senders_ends_no_run(name):
    """Whoever is held goes on by himself, so every preset runs to its end, and later than with overlap."""
    virtual = PRESETS[name].virtual_stages or 2
    batches = (1,) * 6 if name == "pipedream" else (8, 8)
    lowered = build(name, 4 * virtual, batches, num_virtual_stages=virtual)
    costs = {"forward_bytes": 0.5, "bandwidth": 1.0, "latency": 0.1}
    beside, held = (simulate(lowered, Costs(**costs, overlap=overlap)) for overlap in (True, False))
    for earlier, later in zip(beside.ends, held.ends, strict=True):
        assert all(a <= b + 1e-9 for a, b in zip(earlier, later, strict=True))
    assert held.makespan > beside.makespan


def test_compute_only_programs_are_timed_alike():
    """Without transfers in the program, tensors move by themselves, with the same latency."""
    lowered = build("2bw", 4, (4, 4, 4))
    for costs in (Costs(), Costs(latency=0.25)):
        alone = simulate(without_transfers(lowered), costs)
        assert alone.makespan == pytest.approx(simulate(lowered, costs).makespan)
