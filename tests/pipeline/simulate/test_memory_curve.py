"""Memory over time: its peaks are what the checker proves, its shape what the timeline shows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check
from megatron.pipeline.program.weight_policies import FLUSH
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.memory_curve import MemorySizes, memory_curves
from megatron.planner.memory.schedule_demand import demand_of
from tests.draws import draws
from tests.pipeline.simulate.programs import build, program

UNITS = MemorySizes(activations=1, weights=1, gradients=1, tied_gradients=0.25, optimizer=1, transfers=1)
CASES = (
    ("gpipe", 3, (4, 5), {}),
    ("flush", 4, (6, 3), {"recompute": True}),
    ("2bw", 4, (5, 6, 5), {}),
    ("2bw", 5, (7, 8, 7), {"balance": True}),
    ("bpipe", 6, (8, 8), {}),
    ("pipedream", 4, (1,) * 9, {}),
    ("interleaved", 6, (6, 3), {"num_virtual_stages": 2}),
    ("interleaved", 8, (8,), {"num_virtual_stages": 2, "balance": True}),
    ("2bw", 4, (6, 6, 6), {"predict": True}),
    ("2bw", 4, (6, 6, 6), {"predict": True, "tied_embeddings": True}),
    ("2bw", 4, (5, 6, 5), {"predict": True, "provisional_microbatches": 2, "tied_embeddings": True}),
    ("2bw", 3, (4, 4, 4), {"predict": True, "reduce_partial": True, "data_parallel": True, "recompute": True}),
)


@draws(30)
@given(case=st.sampled_from(CASES), data=st.data())
def test_peaks_are_what_the_checker_proves(case, data):
    """At any speed: as many versions and gradient buffers, and where nothing moves as many activations; with moves, and
    of receives, no more.
    """
    name, num_stages, batches, flags = case
    lowered = build(name, num_stages, batches, **flags)
    seconds = st.lists(st.floats(0.1, 4.0), min_size=num_stages, max_size=num_stages)
    costs = Costs(
        forward=data.draw(seconds),
        backward=data.draw(seconds),
        evict=data.draw(seconds),
        latency=data.draw(seconds)[1:],
        predict=0.1,  # what is kept for a prediction is there for a while
    )
    report = check(lowered)
    demand = demand_of(lowered, report)
    curves = memory_curves(simulate(lowered, costs), UNITS, lowered.weights)
    for rank, curve in enumerate(curves):
        stages = len(lowered.stages_of(rank))
        peaks = {name: max(values) for name, values in curve.parts.items()}
        assert peaks["weights"] == stages * demand.live_versions[rank]
        kept = demand.held_gradients[rank] + 0.25 * demand.held_embeddings[rank]  # beside those of two batches
        assert peaks["gradients"] == stages * demand.gradient_buffers[rank] + kept
        assert peaks["optimizer"] == stages
        moves = any(demand.evicts) or any(demand.accepts)
        assert peaks["activations"] <= demand.saved_on_rank[rank]
        assert moves or peaks["activations"] == demand.saved_on_rank[rank]
        assert curve.parts["activations"][-1] == curve.parts["transfers"][-1] == 0
        assert curve.peak == max(curve.total) <= sum(peaks.values())


def test_sizes_are_those_of_the_stage_that_saved():
    """An acceptor holds its partner's microbatches at their size: 2 of its own 1 byte, and one of 10."""
    timeline = simulate(build("bpipe", 4, (8,)), Costs(evict=0.5))
    sizes = MemorySizes(activations=(10, 1, 1, 1))
    first, _, _, last = memory_curves(timeline, sizes, FLUSH)
    assert first.peak == 30  # ceil((4 + 2) / 2) microbatches
    assert last.peak == 21
    time, parts = last.at_peak
    assert parts == {"optimizer": 0, "weights": 0, "gradients": 0, "activations": 21, "transfers": 0}
    assert last.times[last.total.index(21)] == time


def test_the_curve_of_two_stages_by_hand():
    """Forward 1, backward 2, latency 0.5: what stage 0 holds, from what to what moment."""
    timeline = simulate(build("flush", 2, (2,)), Costs(latency=0.5))
    curve = memory_curves(timeline, MemorySizes(activations=4, weights=100, gradients=10, transfers=1), FLUSH)[0]
    held = {name: dict(zip(curve.times, values, strict=True)) for name, values in curve.parts.items()}
    # F0 at 0, F1 at 1, B0 at 5 (1.5 + 1 + 2 + 0.5), B1 at 8 (4.5 + 1 + 2 + 0.5)
    assert held["activations"][0] == 4 and held["activations"][1] == 8
    assert held["activations"][7.0] == 4 and held["activations"][10.0] == 0
    assert held["gradients"][5.0] == 10 and held["gradients"][1] == 0
    assert set(held["weights"].values()) == {100}
    # while F1 runs, the receive of the first gradient waits and the first activation is under way
    assert held["transfers"][1] == 2 and held["transfers"][10.0] == 0


@pytest.mark.parametrize(
    ("weights", "held"), [("stale", (101, 1010)), ("stale-predicted", (202, 1020)), ("stale-provisional", (202, 1020))]
)
def test_stages_that_step_by_themselves_have_one_version_and_perhaps_one_ahead(weights, held):
    """The last of stages of 1, 10, 100 and 1000 bytes, two on each rank, has nothing ahead."""
    schedule = Schedule(order="async", weights=weights, recompute=True, num_stages=4, rank_of_stage=(0, 1, 0, 1))
    timeline = simulate(schedule.build((2, 2, 2)), Costs())
    curves = memory_curves(timeline, MemorySizes(weights=(1, 10, 100, 1000)), schedule.weights)
    assert tuple(max(curve.parts["weights"]) for curve in curves) == held


def test_kept_gradients_are_there_until_they_are_read():
    """Two stages, 4 microbatches, one read: 10 bytes more from each HOLD, behind the first backward of a batch, to the
    end of its PREDICT; nothing where all that is done is read.
    """
    costs, sizes = Costs(predict=0.5, hold=0.25), MemorySizes(gradients=10, weights=100)
    lowered = build("2bw", 2, (4, 4), predict=True, provisional_microbatches=1)
    timeline = simulate(lowered, costs)
    for rank, curve in enumerate(memory_curves(timeline, sizes, lowered.weights)):
        spans = {str(span.instruction): span for span in timeline.spans if span.rank == rank}
        kept = [(spans[f"{rank}HOLD@{each}"].start, spans[f"{rank}PREDICT@{each}"].end) for each in (1, 2)]
        second = spans[f"{rank}B4@1"].start  # the first backward of batch 1
        for time, held in zip(curve.times, curve.parts["gradients"], strict=True):
            batches = (time >= spans[f"{rank}B0@0"].start) + (time >= second)
            assert held == 10 * (batches + any(start <= time < end for start, end in kept))
        assert max(curve.parts["gradients"]) == 30
        assert curve.parts["weights"][-1] == 200
    lowered = build("2bw", 2, (4, 4), predict=True)
    for curve in memory_curves(simulate(lowered, costs), sizes, lowered.weights):
        assert max(curve.parts["gradients"]) == 20


def test_optimistic_steps_keep_a_copy_and_no_second_buffer():
    """Of zbv on two ranks: weights and optimizer once more from the first STEP on, and one gradient buffer."""
    sizes = MemorySizes(gradients=10, weights=100, optimizer=1000)
    lowered = build("zbv", 2, (4, 4), num_virtual_stages=2, optimistic=True)
    timeline = simulate(lowered, Costs(step=0.5, reduce_norm=1))
    for rank, curve in enumerate(memory_curves(timeline, sizes, lowered.weights)):
        first = next(each.start for each in timeline.spans if str(each.instruction) == f"{rank}STEP@1")
        for time, held in zip(curve.times, curve.parts["optimizer"], strict=True):
            assert held == 2000 + 2200 * (time >= first)
        assert max(curve.parts["gradients"]) == 20


def test_whole_and_split_backwards_may_stand_in_one_row():
    """A whole backward frees its microbatch, and of a split one the weight half, as the checker counts."""
    mixed = program("0F0 0F1 0B0 0I1 0W1 0F2 0B2", batches=(3,))
    (curve,) = memory_curves(simulate(mixed), UNITS, FLUSH)
    assert dict(zip(curve.times, curve.parts["activations"], strict=True)) == {0: 1, 1: 2, 2: 2, 4: 1, 6: 1, 9: 0}
    assert check(mixed).peak_saved_microbatches == (2,)


def test_a_compute_only_program_has_one_of_each():
    """Without versions and updates: the weights, and one gradient buffer."""
    timeline = simulate(program("0F0 0F1 0B0 0B1", batches=(1, 1)))
    (curve,) = memory_curves(timeline, UNITS, FLUSH)
    assert {name: max(values) for name, values in curve.parts.items()} == {
        "optimizer": 1, "weights": 1, "gradients": 1, "activations": 2, "transfers": 0,
    }  # fmt: skip


def test_wrong_sizes_are_refused():
    """A number for each stage, and for transfers one for each edge."""
    timeline = simulate(build("flush", 2, (2,)))
    with pytest.raises(ValueError, match="weights has 3 numbers; give one for all, or one for each of 2"):
        memory_curves(timeline, MemorySizes(weights=(1, 2, 3)), FLUSH)
    with pytest.raises(ValueError, match="transfers has 2 numbers; give one for all, or one for each of 1"):
        memory_curves(timeline, MemorySizes(transfers=(1, 2)), FLUSH)


def test_what_a_split_backward_defers_has_a_size_of_its_own():
    """The input half frees the activations, and what the weight half needs stays up to its end: 3 each, then 1."""
    split = program("0F0 0F1 0I0 0I1 0W0 0W1", batches=(2,))
    (curve,) = memory_curves(simulate(split), MemorySizes(activations=3, deferred=1), FLUSH)
    held = {name: dict(zip(curve.times, values, strict=True)) for name, values in curve.parts.items()}
    assert held["activations"] == {0: 3, 1: 6, 2: 6, 3: 3, 4: 0, 5: 0, 6: 0}
    assert held["deferred"] == {0: 0, 1: 0, 2: 0, 3: 1, 4: 2, 5: 1, 6: 0}
    assert curve.peak == 6 and check(split).peak_deferred_microbatches == (2,)
    (whole,) = memory_curves(simulate(split), MemorySizes(activations=3), FLUSH)
    assert "deferred" not in whole.parts and max(whole.parts["activations"]) == 6
    assert dict(zip(whole.times, whole.parts["activations"], strict=True))[5] == 3
