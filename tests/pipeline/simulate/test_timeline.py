"""Timelines: what they count, their parts, their form on disk, and the costs that they show."""

import json
import math
from dataclasses import replace

import pytest

from megatron.pipeline.check import check
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import Costs, simulate
from megatron.pipeline.simulate.costs import measured_costs
from megatron.pipeline.simulate.timeline import FORMAT, Timeline


@pytest.fixture
def timeline():
    return simulate(Schedule.preset("2bw", num_stages=4).build((4, 4, 6)), Costs(latency=0.1, step=0.3))


def test_disk_keeps_everything(timeline, tmp_path):
    """Saved and loaded, a timeline is equal, whatever wrote it."""
    timeline.save(tmp_path / "timeline.json")
    loaded = Timeline.load(tmp_path / "timeline.json")
    assert loaded.to_dict() == timeline.to_dict()
    assert (loaded.makespan, loaded.batches, loaded.rank_of_stage) == (timeline.makespan, (4, 4, 6), (0, 1, 2, 3))


def test_spans_make_the_same_timeline(timeline):
    """A tracer that collects spans gets the timeline that the simulator gives."""
    facts = {"rank_of_stage": timeline.rank_of_stage, "batches": timeline.batches, "name": timeline.name}
    assert Timeline.from_spans(timeline.spans, **facts).to_dict() == timeline.to_dict()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data.update(format="other/3"), "format"),
        (lambda data: data.pop("batches"), "no complete timeline"),
        (lambda data: data["rows"][1].append(["1F99garbage", 0.0, 1.0]), "1F99garbage"),
        (lambda data: data["rows"][0].append(["0F99@0", 2.0, 1.0]), "0F99@0 starts at 2.0 and ends at 1.0"),
        (lambda data: data["rows"].clear(), "on ranks \\[0, 1, 2, 3\\], and it has rows of 0 ranks"),
        (lambda data: data["rank_of_stage"].append(7), "on ranks \\[0, 1, 2, 3, 7\\], and it has rows of 4"),
        (lambda data: data["rows"][0].append(["3F9@0", 1.0, 2.0]), "rank 0 has 3F9@0, and its stages are \\[0\\]"),
        (lambda data: data["rows"][0].append(["0F99@0", math.nan, 1.0]), "starts at nan"),
    ],
)
def test_damaged_files_are_refused(timeline, tmp_path, damage, reason):
    """A file that is no timeline says which file, and why."""
    data = timeline.to_dict()
    damage(data)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=reason) as caught:
        Timeline.load(tmp_path / "bad.json")
    assert "bad.json" in str(caught.value)


def test_other_files_are_refused(tmp_path):
    """JSON of something else, and no JSON at all, are no timelines."""
    for text in ("[]", "not json"):
        (tmp_path / "other").write_text(text)
        with pytest.raises(ValueError, match="other is no timeline: "):
            Timeline.load(tmp_path / "other")
    assert Timeline.from_dict({"format": FORMAT, "name": "", "rank_of_stage": [0], "batches": [], "first_batch": 0,
                               "first_microbatch": 0, "rows": [[]]}).makespan == 0  # fmt: skip


def test_busy_and_idle_fill_the_makespan(timeline):
    """A rank computes, steps or is idle, whatever its transfers do."""
    for rank in range(4):
        assert timeline.busy(rank) == pytest.approx(14 * 3 + 3 * 0.3)
        assert timeline.busy(rank) + timeline.idle(rank) == pytest.approx(timeline.makespan)


def test_saved_microbatches_follow_the_bound_of_1f1b(timeline):
    """Stage s of 1F1B holds p - s microbatches at most, and none after the drain."""
    for stage in range(4):
        saved = timeline.saved_microbatches(stage)
        assert timeline.peak_saved_microbatches(stage) == 4 - stage
        assert saved[-1][1] == 0
        assert [time for time, _ in saved] == sorted(time for time, _ in saved)


def test_saved_on_a_rank_are_counted_over_its_stages():
    """4 ranks of 2 stages: 11, 9, 7 and 5 at the peak, as the checker says; of one stage, what that one saves."""
    schedule = Schedule.preset("interleaved", num_stages=8, num_virtual_stages=2)
    program = schedule.build((8,))
    timeline = simulate(program)
    assert tuple(map(timeline.peak_saved_on_rank, range(4))) == check(program).peak_saved_on_rank == (11, 9, 7, 5)
    for stage in range(8):
        assert timeline.saved_on_rank(stage % 4, [stage]) == timeline.saved_microbatches(stage)


def test_a_part_holds_what_belongs_to_its_batches(timeline):
    """`of_batches` keeps the microbatches of its batches and the updates that apply their gradients, at their times."""
    part = timeline.of_batches(1, 1)
    microbatches = {span.instruction.microbatch for span in part.spans if span.instruction.microbatch is not None}
    versions = {span.instruction.version for span in part.spans if span.instruction.microbatch is None}
    assert (microbatches, versions) == ({4, 5, 6, 7}, {2})
    assert (part.batches, part.first_batch, part.first_microbatch) == ((4,), 1, 4)
    assert set(part.spans) <= set(timeline.spans)
    with pytest.raises(ValueError, match="batches 0 to 2"):
        timeline.of_batches(2, 2)


def test_shifted_and_scaled(timeline):
    """Another origin or unit changes times and nothing else."""
    other = timeline.shifted(100.0).scaled(1000.0)
    assert other.start == pytest.approx((timeline.start + 100) * 1000)
    assert other.makespan == pytest.approx(timeline.makespan * 1000)
    assert other.rows == timeline.rows


def test_steady_state_needs_three_batches():
    """With two batches there is a fill and a drain, and nothing between."""
    timeline = simulate(Schedule.preset("2bw", num_stages=2).build((2, 2)))
    with pytest.raises(ValueError, match="2 batches has no steady state"):
        timeline.steady_time_per_batch()


def test_lists_of_different_lengths_are_refused():
    """Every instruction has a start and an end."""
    row = (Instruction.parse("0F0@0"),)
    with pytest.raises(ValueError, match="1 instructions, 1 starts, 0 ends"):
        Timeline((row,), ([0.0],), ([],), (0,), (1,))
    with pytest.raises(ValueError, match="1 ranks"):
        Timeline((row,), (), (), (0,), (1,))


def test_costs_that_were_not_measured_follow_from_the_others():
    """A timeline with whole backwards and without moves has neither halves nor a way back from the host that take no
    time. One of halves keeps both, also a stage that has a W and no I."""
    whole = measured_costs(simulate(Schedule.preset("flush", num_stages=2).build((4,)), Costs(backward=[2.0, 3.0])))
    found = replace(whole, forward=1.5, backward_input=0.5, swap_out=4.0).by_name(2)
    assert (found["backward"], found["backward_weight"]) == ([2.0, 3.0], [1.5, 2.5])
    assert (found["recompute"], found["swap_in"], found["load"]) == ([1.5, 1.5], [4.0, 4.0], [0.0, 0.0])
    simulated = simulate(Schedule.preset("zb-h1", num_stages=2).build((4,)), Costs(backward_input=[1.25, 0.5]))
    halves = measured_costs(simulated).by_name(2)
    assert (halves["backward_input"], halves["backward_weight"]) == ([1.25, 0.5], [0.75, 1.5])
    only_w = measured_costs(Timeline.from_spans(
        [each for each in simulated.spans if each.instruction.kind is not Kind.BACKWARD_INPUT],
        rank_of_stage=simulated.rank_of_stage, batches=simulated.batches, name="W",
    )).by_name(2)  # fmt: skip
    assert (only_w["backward_input"], only_w["backward_weight"]) == ([0.0, 0.0], [0.75, 1.5])
