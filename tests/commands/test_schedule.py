"""tools/schedule.py: what it prints, writes and proves, and with which status it ends (times and pictures:
test_schedule_times.py)."""

import os
import re
import subprocess
import sys

import pytest

from megatron.commands import schedule as tool  # noqa: F401  of the fixture `run`
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule, read_schedule
from tests.commands.in_process import ROOT, without
from tests.pipeline.brought_programs import RHYTHM, TORCH, written
from tests.planner import made_up

TOOL = ROOT / "tools" / "schedule.py"

TWO_BW = ["--schedule", "2bw", "--stages", "4", "--microbatches", "4", "--batches", "3"]


def build(name="2bw", num_stages=4, batches=(4, 4, 4), **flags):
    return Schedule.preset(name, num_stages=num_stages, **flags).build(batches)


def test_show_prints_the_program(run):
    """One line per rank, with the instructions of the very program that would run."""
    status, out, _ = run("show", *TWO_BW)
    assert status == 0
    assert out.splitlines() == [f"rank {rank}: " + "  ".join(map(str, row)) for rank, row in enumerate(build().rows)]


@pytest.mark.parametrize(
    ("options", "flags", "batches"),
    [
        ("--recompute", {"recompute": True}, (4, 4, 4)),
        ("--tied-embeddings --data-parallel", {"tied_embeddings": True, "data_parallel": True}, (4, 4, 4)),
        ("--extra-warmup --microbatches 7", {"extra_warmup": True}, (7, 7, 7)),
        ("--microbatches 4,6,9", {}, (4, 6, 9)),
        ("--batches 2", {}, (4, 4)),
        ("--balance --microbatches 6", {"balance": True}, (6, 6, 6)),
        ("--provisional", {"predict": True}, (4, 4, 4)),
        (
            "--provisional-microbatches 2 --tied-embeddings",
            {"predict": True, "provisional_microbatches": 2, "tied_embeddings": True},
            (5, 5, 5),  # as few as the first stage has two of when the next batch begins
        ),
        (
            "--provisional --data-parallel --reduce-partial",
            {"predict": True, "data_parallel": True, "reduce_partial": True},
            (4, 4, 4),
        ),
    ],
)
def test_csv_is_the_program(run, tmp_path, options, flags, batches):
    """--csv writes the whole program, flags and ramp-up included, and reads back equal."""
    path = tmp_path / "program.csv"
    assert run("show", "--schedule", "2bw", *options.split(), "--csv", path)[0] == 0
    assert Program.from_csv(path.read_text()) == build(batches=batches, **flags)
    assert run("check", path)[0] == 0


def test_torch_csv_loads_again(run, tmp_path):
    """What is written for torch is a compute-only program here, which is checked, timed and drawn."""
    path = tmp_path / "torch.csv"
    assert run("show", "--schedule", "flush", "--stages", "2", "--batches", "1", "--torch-csv", path)[0] == 0
    assert path.read_text().splitlines() == ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]
    assert "compute-only" in run("check", path)[1]
    assert "9" in run("simulate", path)[1].splitlines()[0]
    assert run("draw", path, "--output", tmp_path / "torch.png")[0] == 0
    assert run("show", "--schedule", "flush", "--torch-csv", "-")[1].startswith("0F0,0F1")


def test_check_reports_what_it_proved(run):
    """A preset is proved as it is, and for any number of batches."""
    status, out, _ = run("check", *TWO_BW)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert (status, lines[0]) == (0, "correct")
    assert f"instructions {build().num_instructions}" in lines
    assert "peak saved microbatches 4, 3, 2, 1" in lines
    assert "live weight versions 2, 2, 2, 2" in lines
    assert lines[-1].startswith("proved for every number of batches")


def test_check_counts_what_is_stashed(run):
    """With --stash host as many tensors between stages are on the device at any depth, and it is shown and timed."""
    options = ("--schedule", "l2l", "--stages", "1", "--microbatches", "4", "--stash", "host")
    for v in (6, 12):
        status, out, _ = run("check", *options, "--virtual-stages", v)
        lines = [" ".join(line.split()) for line in out.splitlines()]
        assert status == 0 and "tensors between stages, on the device 7" in lines
        assert f"inputs to the host and back 0, {'12, ' * (v - 2)}0" in lines
    times = ("--fetch", "2", "--offload", "1", "--virtual-stages", "4", "--batches", "1")
    shown = run("show", *options, "--virtual-stages", "4", "--batches", "1")[1].split()
    assert shown.count("2OFFLOAD3") == shown.count("2RELOAD3") == 1
    found = dict(line.rsplit("  ", 1) for line in run("simulate", *options, *times)[1].splitlines())
    lanes = {name.strip(): value.strip() for name, value in found.items()}
    assert lanes["rank 0: host to device, device to host, host optimizer"] == "20, 8, 0"


def test_a_wrong_prediction_ends_with_status_1(run, tmp_path):
    """A prediction one backward early is refused, with what it reads."""
    path = tmp_path / "wrong.csv"
    path.write_text(build(predict=True).to_csv().replace("1B1@0,1SEND_B1,1PREDICT@1", "1PREDICT@1,1B1@0,1SEND_B1", 1))
    status, _, err = run("check", path)
    assert status == 1
    assert err.startswith("error: rank 1") and "1PREDICT@1: it reads 2 backwards of batch 0, and 1 stands before" in err


def test_check_says_what_moves(run):
    """How many microbatches each stage evicts, or that there is nothing to balance."""
    bpipe = ["--schedule", "bpipe", "--microbatches", "8", "--batches", "1"]
    assert "evicted microbatches     3, 0, 0, 0\n" in run("check", *bpipe, "--stages", "4")[1]
    out = run("check", *bpipe, "--stages", "3")[1]
    assert "nothing to balance" in out and "evicted" not in out
    assert "nothing to balance" not in run("check", "--schedule", "flush", "--stages", "3")[1]
    status, _, err = run("check", "--schedule", "gpipe", "--balance")
    assert status == 1 and "there is nothing to balance; drop balance, or use order 1f1b" in err


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        (
            "2bw --hardware-queues 32 --tensor 2 --data 2",
            0,
            "proved with 32 hardware queues for these 3 batches: every",
        ),
        ("flush --hardware-queues 1 --tensor 2 --data 2", 0, "proved with 1 hardware queue for these 3 batches: every"),
        ("2bw --stages 1 --hardware-queues 1 --data 2", 0, "not proved with 1 hardware queue: of 4 orders"),
        ("2bw --hardware-queues 8 --tensor 2", 1, "deadlock with 8 hardware queues for 10 streams"),
        ("2bw --stages 1 --hardware-queues 1 --data 2 --distributed-optimizer", 1, "deadlock with one hardware queue"),
    ],
)
def test_check_says_whether_hardware_queues_suffice(run, options, status, sentence):
    """One sentence with the verdict; a deadlock is told as any other, with status 1."""
    found, out, error = run("check", "--schedule", *options.split())
    assert found == status
    assert sentence in (out.splitlines()[-1] if status == 0 else error)


def test_check_takes_a_file_for_its_hardware_queues(run, tmp_path):
    """A program of one's own is proved alike; replicas need reductions in it."""
    path = tmp_path / "program.csv"
    path.write_text(build("flush", data_parallel=True).to_csv())
    assert "proved with 1 hardware queue" in run("check", path, "--hardware-queues", 1, "--data", 2)[1]
    path.write_text(build("flush").to_csv())
    assert "no REDUCE_GRAD for 2 data" in run("check", path, "--hardware-queues", 1, "--data", 2)[2]


@pytest.mark.parametrize("name", ["gpipe", "flush", "2bw", "pipedream", "bpipe"])
def test_every_preset_is_right_by_default(run, name):
    """Without further options each preset is proved, timed and drawn as text."""
    assert run("check", "--schedule", name)[0] == 0
    assert run("simulate", "--schedule", name)[0] == 0
    assert "|B0---" in run("draw", "--schedule", name, "--text")[1]


def test_a_wrong_program_ends_with_status_1(run, tmp_path):
    """A program that breaks a claim: rank, position, instruction and reason on standard error, status 1."""
    path = tmp_path / "wrong.csv"
    path.write_text(build().to_csv().replace("1F5@0", "1F6@0", 1))
    for command in (["check"], ["simulate"], ["draw", "--output", tmp_path / "wrong.png"]):
        status, out, err = run(*command, path)
        assert (status, out) == (1, "")
        assert err.startswith("error: rank 1, position 26, 1F6@0: ")
    assert not (tmp_path / "wrong.png").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0,0B0\n0F1garbage\n", "row 1 (line 2), column 1: '0F1garbage' is not an instruction"),
        ("0F0,0B0,\n\n0F1\n", "row 2"),
        ("", "no instructions"),
        ("# weights: 3bw\n0F0,0B0\n", "line 1: weights: '3bw' is not"),
    ],
)
def test_a_bad_file_is_explained(run, tmp_path, text, reason):
    """What cannot be read is named with file, row and column."""
    path = tmp_path / "bad.csv"
    path.write_text(text)
    status, _, err = run("check", path)
    assert status == 1
    assert err.startswith(f"error: {path}: ")
    assert reason in err


def test_binary_and_missing_files(run, tmp_path):
    """A picture is no program, and a file that is not there is named."""
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\xff\xfe")
    assert run("check", tmp_path / "picture.csv")[0] == 1
    status, _, err = run("check", tmp_path / "missing.csv")
    assert (status, err) == (2, f"error: {tmp_path / 'missing.csv'}: No such file or directory\n")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("check", "name either a CSV file or a --schedule"),
        ("check a.csv --schedule 2bw", "name either a CSV file or a --schedule"),
        ("check a.csv --recompute", "--recompute has no effect on a CSV file"),
        ("check a.csv --stages 4", "--stages has no effect on a CSV file"),
        ("check --schedule 2bw --weights flush", "--weights has no effect on this preset"),
        ("check --schedule 2bw --tensor 2", "--tensor has no effect on the program; add --hardware-qu"),
        ("check --schedule 2bw --microbatches 4,8 --batches 2", "--batches has no effect"),
        ("check --schedule 2bw --microbatches 4,x", "'x' is no positive whole number"),
        ("check --schedule 2bw --stages 0", "'0' is no positive whole number"),
        ("check --schedule 3bw", "invalid choice: '3bw'"),
        ("draw --schedule 2bw --forward -1", "'-1' is no finite number"),
        ("draw --schedule 2bw --latency inf", "'inf' is no finite number"),
        ("draw --schedule 2bw --width 0", "'0' is no finite number above 0"),
        ("draw --schedule 2bw", "draw needs --output FILE.png (or .svg), or --text"),
        ("draw --schedule 2bw --text --lanes", "--lanes has no effect on text; add --output FILE"),
        ("draw --schedule 2bw --text --no-saved", "--saved has no effect on text; add --output FILE"),
        ("draw --schedule 2bw --output x.png --columns 9", "--columns has no effect on a picture"),
        ("show --schedule 2bw --evict 1", "--evict has no effect on the rows; add --timeline"),
        (
            "simulate --schedule flush --reduce-grad 1",
            "--reduce-grad has no effect on a program without it; add --data-parallel",
        ),
        ("draw --schedule 2bw --text --recompute-time 2", "without it; add --recompute"),
        ("simulate --schedule 2bw --reduce-embed 1", "without it; add --tied-embeddings"),
        ("simulate --schedule 2bw --load 1", "--load has no effect on a program without it; add --bal"),
        (
            "check --schedule flush --provisional",
            "--provisional predicts the weights of 2bw, not of flush; give --schedule 2bw, or leave it out",
        ),
        (
            "check --schedule pipedream --provisional-microbatches 1",
            "--provisional-microbatches predicts the weights of 2bw, not of pipedream; give --schedule 2bw",
        ),
        (
            "check --schedule 2bw --provisional --provisional-microbatches 1",
            "argument --provisional-microbatches: not allowed with argument --provisional",
        ),
        ("check a.csv --provisional", "--provisional has no effect on a CSV file"),
        ("check a.csv --reduce-partial", "--reduce-partial has no effect on a CSV file"),
        (
            "check --schedule 2bw --reduce-partial --data-parallel",
            "--reduce-partial has no effect on a program without predictions; add --provisional",
        ),
        (
            "check --schedule 2bw --reduce-partial --provisional",
            "--reduce-partial has no effect on a program without replicas; add --data-parallel",
        ),
        ("simulate --schedule 2bw --predict 1", "--predict has no effect on a program without it; add --provisional"),
        (
            "simulate --schedule 2bw --provisional --hold 1",
            "--hold has no effect on a program without it; add --provisional-microbatches",
        ),
        ("show --schedule 2bw --csv - --one-based", "--one-based has no effect on the rows"),
    ],
)
def test_wrong_command_lines_end_with_status_2(run, arguments, reason):
    """One sentence for each; nothing that would be ignored is accepted."""
    status, _, err = run(*arguments.split())
    assert status == 2
    assert reason in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("check --schedule 2bw --microbatches 3", "at least 4"),
        (
            "check --schedule 2bw --provisional-microbatches 2 --microbatches 4",
            "error: --provisional-microbatches 2: with batches of 4 the first stage has done 1 when the next batch "
            "begins; give 0 to 1, or larger batches",
        ),
        ("draw --schedule 2bw --output x.txt", "no image"),
        ("simulate --schedule 2bw --forward 1,2,3", "forward has 3 numbers"),
        ("simulate --schedule bpipe --evict 1e308", "more than a number can hold; give smaller costs"),
        ("check --schedule bpipe --stages 99999999999999999999", "more than the 2e+07 that a machine holds"),
        ("check --schedule flush --microbatches 9999999", "give fewer of either"),
        ("check --schedule interleaved --batches 9999999 --balance", "give fewer of either"),
    ],
)
def test_choices_that_do_not_work_end_with_status_1(run, arguments, reason):
    """Schedules, costs and formats that cannot be, with the reason."""
    status, _, err = run(*arguments.split())
    assert (status, err.count("\n")) == (1, 1)
    assert reason in err


def test_every_version_of_a_made_up_schedule_is_shown_by_default(run, tmp_path):
    """Batches enough for a version that is not the first; microbatches as few as the order takes; where stages are."""
    with made_up.registered():
        status, out, _ = run("show", "--schedule", "triple", "--stages", "2")
        assert status == 0 and "0F7@1" in out
        assert run("check", "--schedule", "triple-pairs", "--stages", "3")[0] == 0
        status, out, _ = run("draw", "--schedule", "v-gpipe", "--stages", "2", "--output", tmp_path / "v.svg")
        assert status == 0
    assert (
        "<!-- v-gpipe: 2 ranks of 2 stages placed v, batches of 2 microbatches -->" in (tmp_path / "v.svg").read_text()
    )


def test_weights_and_batches_of_a_compute_only_file(run, tmp_path):
    """A file of torch says nothing of batches and weights; the options do."""
    path = tmp_path / "torch.csv"
    run("show", *TWO_BW, "--torch-csv", path)
    assert "4, 4, 4" in run("check", path, "--microbatches", "4,4,4", "--weights", "2bw")[1]
    assert Program.from_csv(path.read_text(), weights=TWO_BW, batches=(4, 4, 4)).batches == (4, 4, 4)


@pytest.mark.alone
def test_it_starts_without_torch_in_a_second(tmp_path):
    """From any directory, not installed: it imports neither torch nor matplotlib nor megatron.core, and is quick."""
    before = os.times()
    assert without("matplotlib,numpy", TOOL, "check", "--schedule", "2bw", cwd=tmp_path).startswith("correct")
    after = os.times()
    assert after.children_user - before.children_user + after.children_system - before.children_system < 1.0


def test_a_closed_pipe_is_no_error():
    """`schedule.py show ... | head -1` ends quietly."""
    command = f"{sys.executable} {TOOL} show --schedule 2bw --stages 16 --microbatches 64 | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "rank 0: 0F", "")


@pytest.mark.parametrize("command", ["", "show", "check", "simulate", "draw"])
def test_help(run, command):
    """Every command explains itself."""
    status, out, _ = run(*([command] if command else []), "--help")
    assert status == 0
    assert "usage:" in out
    assert "--schedule" in out


def test_interleaved_has_several_stages_on_a_rank(run, tmp_path):
    """--stages counts ranks, and each has --virtual-stages of the model; the check counts what a rank saves."""
    path = tmp_path / "program.csv"
    options = ["--schedule", "interleaved", "--stages", "2", "--virtual-stages", "3", "--microbatches", "4"]
    assert run("show", *options, "--csv", path)[0] == 0
    assert Program.from_csv(path.read_text()) == build("interleaved", 6, num_virtual_stages=3)
    out = run("check", *options)[1]
    assert re.search(r"ranks, stages +2, 6\n", out)
    assert re.search(r"peak saved microbatches +4, 4, 3, 2, 2, 1\n +of all stages of a rank +7, 5\n", out)
    assert "proved for every number of batches" in out
    assert run("check", path)[0] == 0
    assert run("draw", *options, "--output", tmp_path / "interleaved.png")[0] == 0
    assert re.search("ranks, stages +4, 8\n", run("check", "--schedule", "interleaved")[1])
    assert re.search(r"rank 0: the same, over its stages +7\n", run("simulate", *options)[1])
    assert re.search(r"makespan +21\n", run("simulate", *options, "--microbatches", "2", "--batches", "1")[1])


def test_check_says_whether_a_run_could_train_with_a_file(run, tmp_path):
    """Fill, period, hash and what would be added; or why no run can go on with it."""
    path = written(tmp_path, RHYTHM)
    status, out, _ = run("check", path)
    assert status == 0 and "fill, period     1 batch, 2 batches" in out
    assert f"sha256           {read_schedule(path).sha256}" in out and "of them added" in out
    status, out, _ = run("check", written(tmp_path, build(batches=(4, 6)).to_csv()))
    assert status == 0 and "no run can train with it: rank 0, position" in out and "differ in size" in out
    status, out, _ = run("check", written(tmp_path, build(batches=(4, 4)).to_csv()))
    assert status == 0 and "0 batches, 2 batches, and drains with each" in out


def test_files_for_a_job(run, tmp_path):
    """What `show` writes says for which degrees it is, and trains there alone; completed rows are those that run."""
    job, whole = tmp_path / "job.csv", tmp_path / "whole.csv"
    assert run("show", *TWO_BW, "--recompute", "--tensor", "2", "--data", "4", "--csv", job)[0] == 0
    schedule = read_schedule(job, tensor=2, data=4, data_parallel=True, recompute=True)
    assert schedule.build((4,) * 3).rows == build(recompute=True, data_parallel=True).rows
    with pytest.raises(ValueError, match="the job has 8"):
        read_schedule(job, data=8)
    assert run("show", written(tmp_path, TORCH), "--complete", "--csv", whole)[0] == 0
    assert Program.from_csv(whole.read_text()) == read_schedule(tmp_path / "program.csv").program
    status, _, err = run("show", *TWO_BW, "--data", "4")
    assert status == 2 and "--data has no effect on the rows; add --csv FILE" in err
    status, _, err = run("show", *TWO_BW, "--complete")
    assert status == 2 and "--complete" in err
