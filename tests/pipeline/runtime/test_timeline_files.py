"""The files of --pipeline-timeline: which batches are shown, and that the plan shows the same ones."""

from megatron import backend

backend.install()

import json

import pytest

from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.program import Program
from megatron.pipeline.runtime import timeline_files
from megatron.pipeline.runtime.contract.trace import COMPUTE, BatchExtent, RankTrace, TraceSpan
from megatron.pipeline.runtime.timeline_files import last_stretch, planned_timeline, write_pictures
from megatron.pipeline.schedules import ProgramSchedule, Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs, measured_costs
from megatron.pipeline.simulate.timeline import Timeline
from megatron.pipeline.survivors import ReplicaRank, without
from tests.trainer.run.run_case import train

SCHEDULE = Schedule.preset("2bw", num_stages=2)
COSTS = Costs(forward=[1.0, 1.5], backward=[2.0, 2.5], step=0.25)


def measured(batches=(3, 3, 3, 3)):
    """A timeline as a run would measure it, of batches 4 to 7."""
    return simulate(SCHEDULE.build(batches, first_batch=4, first_microbatch=12), COSTS)


def test_a_drain_is_not_shown():
    """The longest stretch between drains is shown, its last batches, and of equal ones the later."""
    assert last_stretch(measured(), [], most=8) == range(4, 8)
    assert last_stretch(measured(), [8], most=2) == range(6, 8)
    assert last_stretch(measured(), [2, 7], most=8) == range(4, 7)
    assert last_stretch(measured(), [6], most=8) == range(6, 8)


def test_plan_shows_the_same_batches_with_the_measured_times():
    """Costs are the measured means, and a noiseless measurement equals its plan."""
    timeline = measured()
    costs = measured_costs(timeline)
    assert (list(costs.forward), list(costs.backward), list(costs.step)) == ([1.0, 1.5], [2.0, 2.5], [0.25, 0.25])
    plan = planned_timeline(SCHEDULE, timeline, range(5, 7), [4, 8])
    assert plan.batches == (3, 3) and plan.first_batch == 5 and plan.first_microbatch == 15
    shown = timeline.of_batches(5, 2)
    assert plan.rows == shown.rows
    assert abs(plan.makespan - shown.makespan) < 1e-9


def test_plan_and_measurement_agree_on_predictions():
    """What predicting and keeping gradients took is in the plan, stage by stage, and so the two are as long."""
    schedule = Schedule.preset("2bw", num_stages=2, predict=True, provisional_microbatches=1)
    costs = Costs(forward=[1.0, 1.5], backward=[2.0, 2.5], step=0.25, predict=[0.5, 0.75], hold=[0.125, 0.0625])
    timeline = simulate(schedule.build((3, 3, 3, 3), first_batch=4, first_microbatch=12), costs)
    found = measured_costs(timeline)
    assert (list(found.predict), list(found.hold), list(found.step)) == ([0.5, 0.75], [0.125, 0.0625], [0.25, 0.25])
    plan = planned_timeline(schedule, timeline, range(5, 7), [4, 8])
    shown = timeline.of_batches(5, 2)
    assert plan.rows == shown.rows
    assert abs(plan.makespan - shown.makespan) < 1e-9


def test_plan_and_measurement_agree_on_halves():
    """What I and W took is in the plan, stage by stage, and so the two are as long."""
    schedule = Schedule.preset("zb-h1", num_stages=2)
    costs = Costs(forward=[1.0, 1.5], backward=0.0, backward_input=[1.25, 1.0], backward_weight=[0.5, 0.75], step=0.25)
    timeline = simulate(schedule.build((3, 3, 3, 3), first_batch=4, first_microbatch=12), costs)
    plan = planned_timeline(schedule, timeline, range(5, 7), [4, 8])
    shown = timeline.of_batches(5, 2)
    assert plan.rows == shown.rows and shown.makespan > 2 * 3 * (1.0 + 1.25 + 0.5)
    assert abs(plan.makespan - shown.makespan) < 1e-9


def test_plan_and_measurement_agree_on_the_lanes():
    """What weights, gradients, inputs and updates took on their way is in the plan of a relay, stage by stage."""
    schedule = Schedule.preset("l2l", num_stages=4, num_virtual_stages=4, residency=Residency(2, "deferred", "host"))
    costs = Costs(fetch=[1.0, 2.0, 1.5, 1.0], store=[2.5, 0.5, 1.0, 1.5], update=[3.0, 1.0, 2.0, 5.0], offload=0.25,
                  reload=0.5)  # fmt: skip
    timeline = simulate(schedule.build((3, 3, 3, 3), first_batch=4, first_microbatch=12), costs)
    found = measured_costs(timeline)
    assert [list(each) for each in (found.fetch, found.store, found.update)] == [
        list(each) for each in (costs.fetch, costs.store, costs.update)
    ]
    assert (max(found.offload), max(found.reload)) == (0.25, 0.5)
    plan = planned_timeline(schedule, timeline, range(5, 7), [4, 8])
    shown = timeline.of_batches(5, 2)
    assert plan.rows == shown.rows
    assert abs(plan.makespan - shown.makespan) < 1e-9


@pytest.mark.parametrize("preset", ["flush", "zb-h1", "2bw"])
def test_plan_and_measurement_agree_where_ranks_were_lost(preset):
    """Copies of a stage with times of their own, shown from the middle of a stretch: the plan has the same rows, behind
    whatever fills the pipeline, and is as long."""
    left = without(Schedule.preset(preset, num_stages=2), 3, num_replicas=3, lost=[ReplicaRank(1, 1)]).schedule
    halves = {"backward_input": [1.25, 1.0, 1.5, 0.5, 1.0], "backward_weight": [0.5, 0.75, 0.25, 0.75, 1.0]}
    costs = Costs(forward=[1.0, 1.5, 0.75, 2.0, 1.25], step=0.25, **({"backward": 0.0} | halves if "zb" in preset else
                  {"backward": [2.0, 2.5, 1.5, 2.25, 1.75]}))  # fmt: skip
    timeline = simulate(left.build((9,) * 12, first_batch=4, first_microbatch=36), costs)
    plan = planned_timeline(left, timeline, range(12, 14), [4])
    shown = timeline.of_batches(12, 2)
    assert left.num_stages == 5 and plan.first_microbatch == 108 and plan.rows == shown.rows
    assert abs(plan.makespan - shown.makespan) < 1e-9


@pytest.mark.parametrize("pattern, fill, shown", [("aba", 0, 3), ("bbbaa", 3, 4)])
def test_plan_keeps_to_the_place_in_a_period(pattern, fill, shown):
    """Of a program whose batches are not alike, a batch is planned in the order in which it ran: of batches that go in
    turn through their microbatches from the first (a) or the last (b), and of a fill that does so otherwise."""
    rows: list[list[str]] = [[], []]
    for batch, name in enumerate(pattern):
        microbatches = [2 * batch, 2 * batch + 1][:: 1 if name == "a" else -1]
        rows[0] += [f"0{word}{each}" for word in "FB" for each in microbatches]
        rows[1] += [f"1{word}{each}" for each in microbatches for word in "FB"]
    text = f"# batches: {'2 ' * len(pattern)}\n# weights: flush\n" + "\n".join(map(",".join, rows)) + "\n"
    schedule = ProgramSchedule.of(Program.from_csv(text), fill=fill, period=len(pattern) - fill - 1)
    timeline = simulate(schedule.build((2,) * 8), Costs(forward=[1.0, 1.5], backward=[2.0, 2.5]))
    assert planned_timeline(schedule, timeline, range(shown, shown + 1), []).rows == timeline.of_batches(shown, 1).rows


def test_files_where_ranks_were_lost(tmp_path, monkeypatch):
    """Lanes have the numbers of the whole job with their places, in the picture and in the trace, below a title that
    says who is left; microbatches are those of the whole batch."""
    drawn = []
    monkeypatch.setattr(timeline_files, "draw_timeline", lambda *_, **options: drawn.append(options))
    left = without(Schedule.preset("flush", num_stages=2), 1, num_replicas=2, lost=[ReplicaRank(1, 0)]).schedule
    timeline = simulate(left.build((2, 2), first_batch=4, first_microbatch=8), Costs())
    ranks, places = (0, 2, 3), ("0.0", "0.1", "1.1")
    traces = [
        RankTrace(
            rank, ranks, left.rank_of_stage, (BatchExtent(4, 8, 2), BatchExtent(5, 10, 2)),
            tuple(TraceSpan(COMPUTE, span.instruction, span.start, span.end) for span in timeline.spans
                  if span.rank == number),
            edges=left.edges, copies=left.copies, place=place,
        )
        for number, (rank, place) in enumerate(zip(ranks, places, strict=True))
    ]  # fmt: skip
    write_pictures(left, traces, tmp_path, drains=[5], most=4, note="3 ranks of 4\nwithout rank 1")
    (options,) = drawn
    assert options["title"] == "1 iterations from 6 on, 3 ranks of 4\nwithout rank 1"
    assert options["names"] == ["rank 0 (0.0)", "rank 2 (0.1)", "rank 3 (1.1)"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0 (0.0)", 2: "rank 2 (0.1)", 3: "rank 3 (1.1)"}
    measured = Timeline.load(tmp_path / "measured.json")
    assert (measured.copies, measured.first_microbatch, measured.batches) == (left.copies, 8, (2, 2))
    assert {each.microbatch for row in measured.rows for each in row if each.kind.is_computation} == {8, 9, 10, 11}


def test_files_of_a_run(tmp_path):
    """A run with an evaluation and predicted weights leaves picture, trace and timeline."""
    folder = tmp_path / "timeline"
    train(
        2,
        "--pipeline-schedule 2bw --2bw-provisional uniform --2bw-provisional-microbatches 1 --eval-iters 1 "
        f"--eval-interval 4 --pipeline-timeline {folder}",
    )
    assert sorted(path.name for path in folder.iterdir()) == ["measured.json", "timeline.png", "trace.json"]
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    costs = measured_costs(Timeline.load(folder / "measured.json"))
    assert min(costs.predict) > 0 and min(costs.hold) > 0
