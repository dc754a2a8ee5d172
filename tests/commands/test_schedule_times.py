"""tools/schedule.py: the times that it simulates, and the pictures that it draws of them."""

import re

import pytest

from megatron.commands import schedule as tool  # noqa: F401  of the fixture `run`
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.timeline import Timeline
from tests.planner import made_up

TWO_BW = ["--schedule", "2bw", "--stages", "4", "--microbatches", "4", "--batches", "3"]


def test_draw_shows_what_is_saved_where_activations_move(run, tmp_path):
    """Below the timeline of Figure 4 stands the count of each stage, unless it is refused; else it is asked for."""
    for name, flag, shown in (("bpipe", "", True), ("bpipe", "--no-saved", False), ("flush", "", False)):
        argv = ["draw", "--schedule", name, "--batches", "1", "--microbatches", "8", *flag.split()]
        assert run(*argv, "--output", tmp_path / "x.svg")[0] == 0
        assert ('"saved"' in (tmp_path / "x.svg").read_text()) == shown


def test_a_move_that_is_late_takes_time(run):
    """--evict and --load are costs of the simulation: within a forward they are hidden, beyond it they are not."""
    bpipe = ["simulate", "--schedule", "bpipe", "--microbatches", "8", "--batches", "1"]
    spans = [run(*bpipe, "--evict", evict, "--load", load)[1].split()[1] for evict, load in ((0, 0), (1, 1), (1, 1.5))]
    assert spans[:2] == ["33", "33"] and float(spans[2]) > 33


def test_predictions_take_time(run, tmp_path):
    """--predict and --hold are costs of the simulation, of each batch on each stage; a prediction is a step by default.
    The picture marks them and its title says so.
    """
    uniform = [*TWO_BW[:2], "--stages", "1", "--microbatches", "4", "--provisional-microbatches", "1"]
    for costs, seconds in (
        ([], 12),
        (["--step", "1"], 14),
        (["--step", "1", "--predict", "0.5", "--hold", "0.25"], 13.75),
    ):
        out = run("simulate", *uniform, "--batches", "4", *costs)[1]
        assert re.search(rf"time per batch, steady +{seconds}\n", out)
    status, _, _ = run("draw", *TWO_BW, "--provisional", "--output", tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert status == 0 and "<!-- 2bw: 4 stages, batches of 4 microbatches, provisional -->" in text
    assert text.count('id="predict label"') == 12 and 'id="predict"' in text
    assert "~3" in run("draw", *TWO_BW, "--provisional", "--text")[1]


def test_simulate_prints_and_writes_the_timeline(run, tmp_path):
    """Makespan and steady time of the closed form, and a file that `draw --measured` reads."""
    status, out, _ = run("simulate", *TWO_BW, "--json", tmp_path / "t.json")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert status == 0
    assert lines[0] == "makespan 45"
    assert "time per batch, steady 12" in lines
    assert "steady" not in run("simulate", "--schedule", "2bw", "--microbatches", "4,6,9")[1]  # a ramp-up never is
    assert re.search(r"steady +3\n", run("simulate", "--schedule", "pipedream")[1])  # f + b, without the fill
    assert "steady" not in run("simulate", "--schedule", "pipedream", "--batches", "5")[1]
    assert (
        Timeline.load(tmp_path / "t.json").to_dict()
        == simulate(Schedule.preset("2bw", num_stages=4).build((4, 4, 4))).to_dict()
    )
    slow = run("simulate", *TWO_BW, "--backward", "2,2,2,4", "--transfer", "0.1", "--latency", "0.1", "--step", "1")
    assert slow[0] == 0
    assert float(slow[1].split()[1]) > 45


def test_simulate_says_what_bounds_the_run(run):
    """The critical path with the share of each kind, and memory by rank where sizes are given."""
    flush = ["simulate", "--schedule", "flush", "--stages", "2", "--microbatches", "2", "--batches", "1"]
    out = run(*flush, "--latency", "0.5", "--critical-path", "--activations-size", "4", "--weights-size", "3")[1]
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "rank 0: peak memory 11 at 1 (weights 3, activations 8)" in lines
    path = lines.index("critical path, 10: F 3 (30.0%), SEND_F 0.5 (5.0%), B 6 (60.0%), SEND_B 0.5 (5.0%)")
    assert lines[path + 1 :] == [
        "0 1 rank 0 0F0@0",
        "1 1.5 rank 0 0SEND_F0",
        "1.5 7.5 rank 1 1F0@0 1B0@0 1F1@0 1B1@0",
        "7.5 8 rank 1 1SEND_B1",
        "8 10 rank 0 0B1@0",
    ]
    plain = run(*flush)[1]
    assert "critical" not in plain and "memory" not in plain


def test_kept_ties_take_memory(run):
    """What a prediction keeps of tied embeddings counts at both ends, and says nothing where nothing is kept."""
    sizes = ["--gradients-size", "10", "--tied-gradients-size", "3"]
    command = ["simulate", "--schedule", "2bw", "--stages", "3", "--predict", "1"]
    lines = run(*command, "--provisional", "--tied-embeddings", *sizes)[1].splitlines()
    peaks = [line.split("peak memory")[1].split()[0] for line in lines if "peak memory" in line]
    assert peaks == ["23", "20", "23"]
    for given, missing in (("--provisional", "--tied-embeddings"), ("--tied-embeddings", "--provisional")):
        status, _, err = run(*command[:-2], given, *sizes)
        assert status == 2 and f"without it; add {missing}" in err


def test_a_transfer_may_hold_its_sender(run):
    """--no-overlap: what is sent takes its time on the rank, too."""
    spans = [
        float(run("simulate", *TWO_BW, "--transfer", "0.2", *flag)[1].split()[1]) for flag in ([], ["--no-overlap"])
    ]
    assert spans[0] < spans[1]


def test_draw_marks_the_path_and_the_memory(run, tmp_path):
    """In the picture, where they are asked for."""
    for flags, marks in (([], []), (["--critical-path", "--weights-size", "1"], ["critical", "memory weights"])):
        assert run("draw", *TWO_BW, "--output", tmp_path / "x.svg", *flags)[0] == 0
        drawn = (tmp_path / "x.svg").read_text()
        assert [mark for mark in ("critical", "memory weights") if f'"{mark}"' in drawn] == marks


@pytest.mark.full
def test_draw_writes_pictures(run, tmp_path):
    """PNG and SVG by suffix, the plan above measured runs."""
    run("simulate", *TWO_BW, "--forward", "1.2", "--json", tmp_path / "measured.json")
    for name in ("plan.png", "plan.svg"):
        status, out, _ = run(
            "draw", *TWO_BW, "--output", tmp_path / name, "--measured", tmp_path / "measured.json", "--saved"
        )
        assert (status, out) == (0, f"wrote {tmp_path / name}\n")
        assert (tmp_path / name).stat().st_size > 10_000
    assert "measured (measured.json)" in (tmp_path / "plan.svg").read_text()
    (tmp_path / "measured.json").write_text("{}")
    status, _, err = run("draw", *TWO_BW, "--output", tmp_path / "x.png", "--measured", tmp_path / "measured.json")
    assert status == 1
    assert "measured.json is no timeline: a timeline has format" in err


def test_a_v_of_a_file_is_drawn(run, tmp_path):
    """Two ranks whose stages go there and back again: all is drawn, with transfers both ways and the path marked."""
    path = tmp_path / "v.csv"
    with made_up.registered():
        path.write_text(Schedule.preset("v-gpipe", num_stages=4, num_virtual_stages=2).build((2,)).to_csv())
    assert "# rank_of_stage: 0 1 1 0" in path.read_text()
    options = ["--transfer", "0.2", "--lanes", "--saved", "--critical-path", "--weights-size", "1"]
    status, out, err = run("draw", path, "--output", tmp_path / "v.svg", *options)
    assert (status, out, err) == (0, f"wrote {tmp_path / 'v.svg'}\n", "")
    drawn = (tmp_path / "v.svg").read_text()
    assert all(f"<!-- {words} -->" in drawn for words in ("v.csv", "rank 0", "rank 1", "transfer", "critical path"))
    status, out, _ = run("draw", path, "--text")
    assert status == 0 and out.startswith("rank 0 |0F0|0F1.") and "|3F0|3F1|3B0" in out.splitlines()[0]


L2L = ["--schedule", "l2l", "--stages", "1", "--virtual-stages", "6", "--microbatches", "4"]


def test_l2l_is_shown_proved_timed_and_drawn(run, tmp_path):
    """With its own choices and costs: what is fetched, how busy the lanes are, and panels of them."""
    shown = run("show", *L2L, "--host-update", "eager", "--resident-stages", "3", "--csv", tmp_path / "l2l.csv")
    assert shown[0] == 0 and "# residency: 3 eager" in (tmp_path / "l2l.csv").read_text()
    out = " ".join(run("check", *L2L)[1].split())
    assert (
        "resident stages 2 fetches a batch 10 tensors between stages, on the device 21 proved for every number" in out
    )
    assert "tensors between a rank's stages 4" in out
    assert "fetches a batch 9" in " ".join(run("check", tmp_path / "l2l.csv")[1].split())
    costs = ["--fetch", "1", "--store", "1", "--update", "2"]
    out = " ".join(run("simulate", *L2L, *costs, "--batches", "1", "--host-update", "eager")[1].split())
    # 1 fetch before, 5 * 4 + 6 * 12 of computation, 1 store and 2 of update behind
    assert "makespan 92 " in out and "last update ends 95" in out
    assert "rank 0: host to device, device to host, host optimizer 10, 6, 12" in out
    status, _, _ = run("draw", *L2L, *costs, "--lanes", "--saved", "--output", tmp_path / "l2l.svg")
    picture = (tmp_path / "l2l.svg").read_text()
    assert status == 0 and "host optimizer" in picture and '"resident"' in picture
    assert "host to device |0" in run("draw", *L2L, "--batches", "1", "--fetch", "1", "--text")[1]


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        ("check --schedule 2bw --resident-stages 3", 2, "--resident-stages has no effect on weights on the device"),
        ("check --schedule flush --host-update eager", 2, "--host-update has no effect on weights on the device"),
        ("simulate --schedule 2bw --fetch 1", 2, "--fetch has no effect on weights on the device"),
        ("check --schedule l2l --hardware-queues 8", 1, "what lanes between device and host launch is not modelled"),
        ("check --schedule flush --virtual-stages 2", 1, "1f1b has one stage on each rank, not 2"),
        ("check --schedule l2l --microbatch-group-size 4", 1, "relay takes a whole batch as one group"),
    ],
)
def test_what_says_nothing_is_refused(run, arguments: str, status: int, sentence: str):
    """Choices and costs of weights on the host, and what does not go with them."""
    found, _, err = run(*arguments.split())
    assert (found, sentence in err) == (status, True)


PICTURE = ["draw", "--schedule", "gpipe", "--stages", "2", "--microbatches", "2", "--output", "x.png"]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--width 1e9", "a picture 1e+09 inches wide cannot be drawn; give 2.15 to 400"),
        ("--width 1e308", "cannot be drawn; give 2.15 to 400 inches"),
        ("--width 1e-320", "cannot be drawn; give 2.15 to 400 inches"),
        ("--time-scale 1e308", "multiplied by 1e+308 are more than a number can hold"),
        ("--stages 1024 --microbatches 1 --batches 1", "rows of 1024 ranks are"),
    ],
)
def test_numbers_beyond_an_image(run, tmp_path, monkeypatch, arguments, reason):
    """Numbers that no image holds: one sentence, and no file."""
    monkeypatch.chdir(tmp_path)
    status, out, err = run(*PICTURE, *arguments.split())
    assert (status, out) == (1, "") and err.startswith("error: ") and err.count("\n") == 1
    assert reason in err and not list(tmp_path.iterdir())
