"""The simulator beside real runs, without a clock: what ran is the program, and nothing beats its costs."""

import pytest

from benchmarks import gpu, simulator_accuracy
from megatron.commands import schedule
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.simulate.timeline import Timeline
from papers.bpipe import balance_cost
from tests.benchmarks.test_emulated import rows_of
from tests.commands.in_process import runner

SCHEDULES = "gpipe flush 2bw pipedream interleaved zb-h1 zbv bpipe 2bw-balanced 2bw-recompute without"
FORWARD = 0.004 / 2  # seconds of a mean virtual stage in the quick form


@pytest.mark.full
def test_a_run_is_the_simulated_one_and_takes_no_less(tmp_path):
    """Balanced interleaving on uneven stages and slow links: the run executes the simulated program, takes no less
    time than simulated, and both timelines are drawn.
    """
    (row,) = rows_of("simulator_accuracy", f"--smoke --pictures {tmp_path}", tmp_path)
    assert row["case"] == "interleaved, balance, uneven, slow links"
    check_row(row)
    assert row["error_batch"] == row["simulated_batch"] / row["measured_batch"] - 1
    assert 0 < row["busy"] <= 1
    assert len(list(tmp_path.glob("*.png"))) == 1
    (path,) = tmp_path.glob("*measured.json")
    check_links(Timeline.load(path))


@pytest.mark.full
def test_every_schedule_runs_as_simulated(tmp_path):
    """The same for all schedules of the benchmark."""
    rows = rows_of("simulator_accuracy", f"--smoke --only {SCHEDULES}", tmp_path)
    assert len(rows) == len(SCHEDULES.split())
    for row in rows:
        check_row(row)


def check_row(row):
    assert row["executed_is_program"]
    assert row["measured_run"] >= row["simulated_run"] * 0.999


def check_links(measured):
    """A tensor over edge 0 takes 0.3 forwards and arrives 0.2 later; the computation that needs it starts after that,
    and the next one on the edge is not earlier than the first has let go.
    """
    spans = {
        (span.instruction.kind, span.instruction.stage, span.instruction.microbatch): span for span in measured.spans
    }
    free_at = 0.0
    for microbatch in sorted({microbatch for _, _, microbatch in spans if microbatch is not None}):
        made, needed = spans[Kind.FORWARD, 0, microbatch], spans[Kind.FORWARD, 1, microbatch]
        free_at = max(free_at, made.end) + 0.3 * FORWARD
        assert needed.start >= free_at + 0.2 * FORWARD - 2e-5


@pytest.mark.full
def test_one_command_draws_a_run_below_its_plan(tmp_path, capsys):
    """A plan that is given as a measurement makes the same picture twice: same cells, borders, steps and scale."""
    from megatron.pipeline.draw import draw_timeline

    run = runner(schedule, capsys)
    program = ["--schedule", "bpipe", "--microbatches", "8", "--evict", "0.5"]
    assert run("simulate", *program, "--json", tmp_path / "run.json")[0] == 0
    assert run("draw", *program, "--measured", tmp_path / "run.json", "--output", tmp_path / "both.svg")[0] == 0
    assert (tmp_path / "both.svg").stat().st_size > 10_000
    measured = Timeline.load(tmp_path / "run.json")
    figure = draw_timeline([measured.named("planned"), measured.shifted(7.0).named("measured")], lanes=True)
    first, second = (contents(axes) for axes in figure.axes)
    assert first == second


def contents(axes):
    shapes = [
        (each.get_gid(), [path.vertices.round(6).tolist() for path in each.get_paths()]) for each in axes.collections
    ]
    lines = [(line.get_gid(), line.get_xydata().round(6).tolist()) for line in axes.lines]
    return shapes, lines, [(text.get_text(), text.get_gid()) for text in axes.texts], axes.get_xlim()


@pytest.mark.parametrize(
    ("benchmark", "arguments", "reason"),
    [
        (simulator_accuracy, "--stages 2", "nothing to balance"),
        (simulator_accuracy, "--batches 2", "nothing is steady"),
        (simulator_accuracy, "--stretch 0", "more than 0"),
        (gpu, "--stages 0", "--stages is 0; give 1 to 64"),
        (gpu, "--stages 4 --microbatches 2 8", "2bw takes at least as many as the 4 stages"),
        (gpu, "--heads 3", "--hidden-size is 2048; give a multiple of the 3"),
        (gpu, "--rounds 0", "at least 1"),
        (gpu, "--schedules gpipe", "invalid choice"),
        (balance_cost, "--stages 2", "nothing to balance"),
        (balance_cost, "--microbatches 4", "at least p each"),
        (balance_cost, "--stretch 0", "more than 0"),
    ],
)
def test_settings_out_of_range_are_refused(benchmark, arguments, reason, capsys):
    """A wrong setting ends in one sentence, on any machine."""
    with pytest.raises(SystemExit, match="2"):
        benchmark.parse(arguments.split())
    assert reason in capsys.readouterr().err
