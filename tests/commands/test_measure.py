"""`grid_search.py measure`: real runs of small models, from a search's file to a table and a picture."""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.commands import grid_search as tool
from megatron.commands.grid_search.trial_results import predicted_seconds, read_entries
from tests.planner import profiles
from tests.trainer.run.run_case import BASE, data_flags


def flags(extra: str = "") -> list[str]:
    return f"{BASE} --global-batch-size 8 {data_flags()} {extra}".split()


def write_search(path, *records):
    common = {"status": "kept", "micro_batch_size": 1, "global_batch_size": 4, "schedule": "flush", "verdict": "fits"}
    path.write_text("".join(json.dumps(common | record) + "\n" for record in records))
    return path


@pytest.mark.full
def test_real_runs_are_measured_beside_predictions(run, tmp_path):
    """The best of a search trains on two stages; one that training refuses is classified; a second call runs nothing
    again and draws the picture."""
    search = write_search(
        tmp_path / "found.jsonl",
        {"pipeline": 2, "schedule": "2bw", "iteration_seconds": 0.5},
        {"tensor": 3, "iteration_seconds": 0.6},
        {"pipeline": 4, "status": "rejected", "reason": "stage 0 misses 3.1 GiB"},
        {"iteration_seconds": 0.7},
    )
    output, picture = tmp_path / "runs", tmp_path / "picture.png"
    arguments = ["measure", "--output", output, "--search", search, "--best", 2, "--iterations", 4, "--warmup", 2,
                 "--processes", 3, "--timeout", 500]  # fmt: skip
    status, out, err = run(*arguments, "--json", *flags())
    first, second = map(json.loads, out.splitlines())
    assert (first["status"], first["num_iterations"], first["predicted_seconds"]) == ("done", 2, 0.5), err
    assert 0 < first["low"] <= first["seconds"] <= first["high"]
    assert second["status"] == "error" and "--num-attention-heads 4 is not divisible" in second["sentence"]
    assert status == 1 and "1/2 t1-p2-d1-v1-b1-B4-none-2bw: running" in err
    assert sorted(os.listdir(first["directory"])) == ["log.txt", "metrics.jsonl", "run.sh"]
    status, out, err = run(*arguments, "--picture", picture, *flags())
    assert "running" not in err and picture.stat().st_size > 5000
    assert "predicted too long by" in out and "error: --num-attention-heads" in out
    status, _, err = run(*arguments, *flags("--hidden-size 64"))
    assert status == 1 and "--hidden-size 32 and not 64; give another --output" in err


def test_a_profile_predicts(run, tmp_path):
    """With --write-scripts nothing runs; a profile of other flags, but for the number of layers, or of other threads
    is refused with the difference; other software is told."""
    path = tmp_path / "profile.json"
    profiles.profile().save(path)
    arguments = ["measure", "--output", tmp_path / "runs", "--predict-from", path, "--configuration",
                 "pipeline=2,micro_batch_size=2,global_batch_size=16,schedule=2bw", "--threads", 1]  # fmt: skip
    status, _, err = run(*arguments, "--write-scripts", 2, *flags())
    assert status == 1 and "taken with other flags: --hidden-size 64 and not 32, no --" in err
    status, _, err = run(*arguments, "--threads", 2, "--write-scripts", 2, *profiles.profile().flags)
    assert status == 1 and "taken with 1 threads a process, not 2; give --threads 1" in err
    status, _, err = run(*arguments[:-3], "tensor=2,micro_batch_size=9,global_batch_size=9", "--threads", 1,
                         "--write-scripts", 2, *profiles.profile().flags)  # fmt: skip
    assert status == 1 and "t2-p1-d1-v1-b9-B9-none-flush cannot be predicted: microbatches of 9" in err
    status, out, err = run(*arguments, "--write-scripts", 2, *profiles.profile().flags, "--num-layers", 8)
    assert status == 0 and "was taken with torch 2.13, and here is" in err, err
    (script,) = out.split()
    subprocess.run(["bash", "-n", script], check=True)
    status, out, err = run(*arguments, "--collect", "--json", *profiles.profile().flags)
    assert (status, out) == (0, "") and "t1-p2-d1-v1-b2-B16-none-2bw has not trained to its end" in err


def test_a_search_with_a_profile_is_what_measure_takes(run, tmp_path):
    """The profile's times rank; its vocabulary is the tokenizer's, which adds to --vocab-size; what it does not hold is
    rejected with the flag that adds it; the best, whatever its schedule, becomes the command of a run."""
    path, plan = tmp_path / "profile.json", tmp_path / "plan"
    model = [
        *["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"],
        *["--max-position-embeddings", "32", "--vocab-size", "128", "--tokenizer-type", "NullTokenizer"],
        *["--mock-data", "--lr", "1e-3"],
    ]
    made = profiles.profile(flags=tuple(model), model=replace(profiles.MODEL, vocabulary_size=256))
    made.save(path)
    status, _, err = run(
        "search", "--predict-from", path, "--cluster", "cpu", "--nodes", 1, "--gpus-per-node", 2, "--output", plan,
        "--global-batch-size", 16, "--microbatches", "1,2,8", *model,
    )  # fmt: skip
    assert status == 0, err
    records = [json.loads(line) for line in (plan / "configurations.jsonl").read_text().splitlines()]
    kept = [record for record in records if record["status"] == "kept"]
    reasons = " ".join(record["reason"] for record in records if record["status"] == "rejected")
    assert "without --sequence-parallel" in reasons and "microbatches of 8" in reasons
    best = kept[0]
    found = predicted_seconds(made, read_entries(plan / "configurations.jsonl")[0].configuration, num_layers=4)
    assert best["iteration_seconds"] == pytest.approx(found)
    status, out, err = run(
        "measure", "--output", tmp_path / "runs", "--search", plan / "configurations.jsonl", "--all",
        "--write-scripts", 2, *model,
    )  # fmt: skip
    assert status == 0 and len(out.split()) == len(kept), err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 1, "nothing to run; give --search FILE or --configuration"),
        (["--configuration", "colour=red"], 2, "'colour' is no field"),
        (["--configuration", "micro_batch_size=2"], 2, "global_batch_size"),
        (["--configuration", "micro_batch_size=3,global_batch_size=4"], 2, "does not divide"),
        (["--configuration", "micro_batch_size=1,global_batch_size=4,balance=1"], 2, "balance is true or false"),
        (["--configuration", "micro_batch_size=1,global_batch_size=64,data=64", "--processes", "2"], 1,
         "needs 64 processes, and this machine takes 2; write scripts"),
        (["--configuration", "micro_batch_size=1,global_batch_size=4", "--warmup", "10"], 1, "are warm-up"),
        (["--search", "nowhere.jsonl"], 2, "nowhere.jsonl"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(run, tmp_path, arguments, status, message):
    found, _, err = run("measure", "--output", tmp_path / "runs", *arguments, *flags())
    assert found == status and message in err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("runs", [False, pytest.param(True, marks=pytest.mark.full)])
def test_shared_experts_and_sequences_are_measured(run, tmp_path, runs):
    """The degrees of context and expert parallelism are flags of the command, and such runs train."""
    degrees = {"data=2,expert=2": "--expert-model-parallel-size 2", "context=2": "--context-parallel-size 2"}
    configurations = [
        word for each in degrees
        for word in ("--configuration", f"pipeline=2,micro_batch_size=1,global_batch_size=8,schedule=2bw,{each}")
    ]  # fmt: skip
    experts = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --disable-bias-linear"
    arguments = ["measure", "--output", tmp_path / "runs", "--iterations", 2, "--warmup", 1, *configurations]
    how = ["--json", "--processes", 4] if runs else ["--write-scripts", 4]
    status, out, err = run(*arguments, *how, *flags(f"{experts} --position-embedding-type rope"))
    assert status == 0, err
    scripts = [json.loads(line)["directory"] + "/run.sh" if runs else line for line in out.splitlines()]
    for script, flag in zip(scripts, degrees.values(), strict=True):
        assert f" {flag} " in Path(script).read_text()


def test_missing_flags_are_told_before_the_first_run(run, tmp_path):
    """All of them in one sentence, and nothing is run; scripts are written with a note on each."""
    arguments = ["measure", "--output", tmp_path / "runs", "--configuration", "micro_batch_size=1,global_batch_size=4",
                 "--num-layers", 2, "--hidden-size", 8, "--num-attention-heads", 2]  # fmt: skip
    status, _, err = run(*arguments)
    assert status == 1 and not (tmp_path / "runs").exists()
    (line,) = err.splitlines()
    assert line.startswith("error: no run could start: --seq-length, --max-position-embeddings are needed; --lr is ")
    assert "no data: give --data-path" in line and "--tokenizer-type is needed" in line
    status, _, err = run(*arguments, "--write-scripts", 1)
    assert status == 0 and err.count("note: runs will refuse their flags: ") == 4


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_leaves_through_what_ends_processes(capsys, name):
    """With the status of a shell; nothing interrupts that, and the handlers of before come back."""
    number, ended = signal.Signals[name], []
    outer = signal.signal(number, signal.SIG_DFL)  # these tests may run under nohup
    try:
        with pytest.raises(SystemExit) as end, tool.command_line.unwinding("the same command goes on"):
            try:
                os.kill(os.getpid(), number)
                time.sleep(10)
            finally:
                os.kill(os.getpid(), number)
                ended.append(True)
        assert (end.value.code, ended, signal.getsignal(number)) == (128 + number, [True], signal.SIG_DFL)
    finally:
        signal.signal(number, outer)
    assert capsys.readouterr().err == f"ended by {name}; the same command goes on\n"


def test_a_signal_that_is_ignored_stays_so():
    """As nohup asks for."""
    outer = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with tool.command_line.unwinding("the same command goes on"):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, outer)
