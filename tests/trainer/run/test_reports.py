"""What a run prints and records."""

import importlib.machinery
import importlib.util
import json
import math
import re
import sys
import types
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron import backend
from megatron.elastic.stages import Arrangement
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.trainer.plan.arrangement import Change, Outlook
from megatron.trainer.report.log import Reporter
from megatron.trainer.report.log_line import LogInterval, Progress, log_line
from megatron.trainer.report.metrics import MetricsFile, flops_per_sample, read_metrics
from megatron.trainer.report.profiler import Profiler
from tests import workers
from tests.full_disk import largest_file
from tests.trainer.arguments.command_line import arguments
from tests.trainer.run.run_case import data_flags, train_case


def report(iteration: int, loss: float, **changes) -> BatchReport:
    values = {"losses": {"lm loss": loss}, "grad_norm": 1.0, "learning_rate": 1e-3, "num_samples": 16}
    return BatchReport(batch=iteration - 1, **{**values, **changes})


def peaks() -> LogInterval:
    """Two batches whose counted peaks differ."""
    interval = LogInterval()
    for each in ((5 * 2**19, 2**20), (2**20, 2**22)):
        interval.add(report(1, 5.0), Progress(1, 16, 16, 0.1), seq_length=32, saved_activation_bytes=each)
    return interval


def test_log_line_is_megatrons():
    """The line that Megatron-LM's users know, with tokens per second at its end."""
    interval = LogInterval()
    for iteration in range(1, 11):
        progress = Progress(iteration, 16 * iteration, 16, 0.1)
        interval.add(report(iteration, 5.0), progress, seq_length=32)
    line = log_line(report(10, 5.0), progress, interval, train_iters=100, now=0.0)
    assert re.sub(r"\[.{19}\]", "[2026-11-20 23:00:00]", line) == (
        " [2026-11-20 23:00:00] iteration       10/     100 | consumed samples:          160 | "
        "elapsed time per iteration (ms): 100.0 | learning rate: 1.000000E-03 | global batch size:    16 | "
        "lm loss: 5.000000E+00 | loss scale: 1.0 | grad norm: 1.000 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 | tokens per second: 5120.0 |"
    )
    counted = log_line(report(10, 5.0), progress, peaks(), train_iters=100)
    assert "grad norm: 1.000 | saved activations (MiB): 2.5 4.0 | number of skipped" in counted
    with_flops = log_line(report(10, 5.0), progress, interval, train_iters=100, flops=1e9)
    assert "| throughput per GPU (TFLOP/s/GPU): 5.1 | learning rate" in with_flops


def test_interval_leaves_out_what_is_no_loss():
    """Skipped and NaN batches are counted and not averaged."""
    interval = LogInterval()
    for loss, changes in ((4.0, {}), (math.inf, {"skipped": True}), (math.nan, {"nan": True}), (6.0, {})):
        interval.add(report(1, loss, **changes), Progress(1, 16, 16, 1.0), seq_length=1)
    assert interval.means() == {"lm loss": 5.0}
    assert math.isnan(LogInterval().means()["lm loss"])
    assert (interval.skipped, interval.nan, interval.iterations) == (1, 1, 4)


def test_metrics_file_is_whole_lines(tmp_path):
    """Values keep full precision, what is not finite is null, a torn line of a killed run hurts nobody."""
    path = tmp_path / "new" / "metrics.jsonl"
    first = MetricsFile(str(path))
    first.write(iteration=1, lm_loss=1 / 3, grad_norm=math.inf)
    first.close()
    with open(path, "a") as stream:
        stream.write('{"iteration": 2, "lm_lo')
    second = MetricsFile(str(path))
    second.write(iteration=2, lm_loss=0.25)
    second.close()
    assert read_metrics(str(path)) == [
        {"iteration": 1, "lm_loss": 1 / 3, "grad_norm": None}, {"iteration": 2, "lm_loss": 0.25},
    ]  # fmt: skip
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"--metrics-file .* cannot be written"):
        MetricsFile(str(tmp_path / "folder"))


def test_metrics_file_on_a_full_disk(tmp_path, caplog):
    """One warning with the reason; the file has whole lines all the time, and once there is room again all of them."""
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(str(path))
    metrics.write(iteration=1, text="a" * 50)
    with largest_file(path.stat().st_size + 30):  # a part of the next line fits
        for iteration in (2, 3):
            metrics.write(iteration=iteration, text="b" * 50)
            assert path.read_text().endswith("\n") and len(read_metrics(str(path))) == 1
        assert [record.getMessage() for record in caplog.records] == [
            f"--metrics-file {path} cannot be written: File too large; training goes on, and its lines are kept until "
            "it can be"
        ]
    metrics.write(iteration=4)
    assert caplog.messages[-1] == f"--metrics-file {path} is written again"
    assert [record["iteration"] for record in read_metrics(str(path))] == [1, 2, 3, 4]
    metrics.close()
    assert len(caplog.records) == 2


def test_metrics_that_are_never_written(caplog):
    """At the end their number is told."""
    metrics = MetricsFile("/dev/full")
    metrics.write(iteration=1)
    metrics.write(iteration=2)
    metrics.close()
    assert caplog.messages == [
        "--metrics-file /dev/full cannot be written: No space left on device; training goes on, and its lines are kept "
        "until it can be",
        "--metrics-file /dev/full lacks its last 2 lines",
    ]


def test_nothing_that_a_run_says_ends_it(tmp_path, caplog, monkeypatch):
    """A full disk under the log, TensorBoard and progress.txt: a warning each."""
    writes = reporter(tmp_path, f"--tensorboard-dir {tmp_path}/board --log-progress --save {tmp_path}")
    (tmp_path / "progress.txt").symlink_to("/dev/full")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(writes._board, "add_scalar", mock.Mock(side_effect=OSError(28, "No space left on device")))
        for iteration in (1, 2):
            writes.iteration(report(iteration, 1.0), Progress(iteration, 16, 16, 1.0))
            writes.progress("saved")
        writes.evaluation("validation", 2, {"lm loss": 1.0}, seconds=1.0)
        writes.close()
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
    told = [message.partition(" cannot be written: No space left on device; training goes on")[0]
            for message in caplog.messages]  # fmt: skip
    assert sorted(told) == sorted([f"--tensorboard-dir {tmp_path}/board", "progress.txt (--log-progress)", "the log"])
    assert len(read_metrics(f"{tmp_path}/metrics.jsonl")) == 3


def reporter(tmp_path, flags: str = "", *, world_size: int = 1) -> Reporter:
    """The reporter of the rank that writes."""
    args = arguments(f"--metrics-file {tmp_path}/metrics.jsonl --log-interval 2 {flags}", world_size=world_size)
    return Reporter(replace(args, padded_vocab_size=128, rank=world_size - 1))


def test_reporter_writes_everywhere(tmp_path, capsys):
    """One batch goes to the metrics file and TensorBoard at once, and to the terminal at its interval."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tmp_path / "board"
    reports = reporter(tmp_path, f"--tensorboard-dir {board} --log-validation-ppl-to-tensorboard")
    for iteration in (1, 2):
        reports.iteration(report(iteration, 4.0), Progress(iteration, 8 * iteration, 8, 0.5))
    reports.evaluation("validation", 2, {"lm loss": 3.0}, seconds=1.0)
    reports.close()
    lines = capsys.readouterr().out.splitlines()
    assert sum("iteration        2/" in line for line in lines) == 1 and not any(
        "iteration        1/" in x for x in lines
    )
    assert any("validation loss at iteration 2 | lm loss value: 3.000000E+00 | lm loss PPL: 2.00" in x for x in lines)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["lm_loss"] == 4.0 and records[0]["tokens_per_second"] == 8 * 32 / 0.5
    assert records[2]["validation_loss"] == 3.0 and records[2]["validation_ppl"] == pytest.approx(math.exp(3))
    events = EventAccumulator(str(board)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"lm loss", "lm loss vs samples", "learning-rate", "grad-norm", "lm loss validation ppl"} <= tags


def test_a_pipeline_that_changes(tmp_path, capsys):
    """The file says how the run began, and of each change what came of it and what was expected; TensorBoard has the
    numbers of the change. No reader of changes takes the beginning for one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tmp_path / "board"
    flags = "--untie-embeddings-and-output-weights --freeze-training --freeze-interval 4"
    reports = reporter(tmp_path, f"{flags} --tensorboard-dir {board}", world_size=2)
    before, after = Arrangement(2, 1, 1, (2, 2)), Arrangement(1, 2, 1, (4,), num_frozen=3)
    reports.args = replace(reports.args, arrangement=before)
    for iteration in (5, 6):  # of a run that goes on
        reports.iteration(report(iteration, 4.0), Progress(iteration, 8 * iteration, 8, 0.5))
    change = Change(before, after, num_layers=4, num_bytes=2000, bytes_moved=500, seconds=0.25)
    reports.change(6, change, Outlook(before=0.5, after=0.375))
    reports.args = replace(reports.args, arrangement=after)
    reports.iteration(report(7, 4.0), Progress(7, 56, 8, 0.5))
    reports.close()
    shapes = [
        {"frozen_layers": 0, "pipeline_ranks": 2, "replicas": 1, "microbatch_samples": 1, "layers_of_rank": [2, 2]},
        {"frozen_layers": 3, "pipeline_ranks": 1, "replicas": 2, "microbatch_samples": 1, "layers_of_rank": [4]},
    ]
    took = {
        "change_seconds": 0.25, "change_bytes": 2000, "change_bytes_moved": 500, "seconds_before": 0.5,
        "seconds_predicted": 0.375,
    }  # fmt: skip
    first, *batches, changed, last = read_metrics(f"{tmp_path}/metrics.jsonl")
    initial = {f"initial_{name}": value for name, value in shapes[0].items()}
    assert first == {"iteration": 4, "initial_samples": 32, **initial}
    assert changed == {"iteration": 6, **shapes[1], **took}
    assert [each["iteration"] for each in (*batches, last)] == [5, 6, 7]
    events = EventAccumulator(str(board)).Reload()
    for name, value in {**shapes[1], **took}.items():
        if name != "layers_of_rank":
            (found,) = events.Scalars(name.replace("_", "-"))
            assert (found.step, found.value) == (6, value)
    assert "pipeline changed at iteration 6 | frozen layers: 3 of 4 (before 0) |" in capsys.readouterr().out


def test_rank_metrics_are_reported_by_pipeline_rank(tmp_path, capsys):
    """The fullest of the tensor and data ranks of a pipeline rank counts; TensorBoard has the fullest of all."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tmp_path / "board"
    reports = reporter(
        tmp_path, f"--pipeline-model-parallel-size 2 --tensorboard-dir {board} --log-memory-to-tensorboard",
        world_size=4,
    )  # fmt: skip
    measured = {"saved_activation_bytes": (3.0, 7.0, 2.0, 1.0), "peak_allocated_bytes": (1.0, 2.0, 3.0, 9.0)}
    for iteration in (1, 2):
        reports.iteration(report(iteration, 4.0, rank_metrics=measured), Progress(iteration, 8 * iteration, 8, 0.5))
    reports.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert (record["saved_activation_bytes"], record["peak_allocated_bytes"]) == ([7, 2], [2, 9])
    assert "saved activations (MiB): 0.0 0.0 |" in capsys.readouterr().out
    assert EventAccumulator(str(board)).Reload().Scalars("saved-activation-bytes-max")[0].value == 7.0


def test_peak_memory_is_of_the_run_where_a_relay_begins_it_anew(tmp_path, monkeypatch):
    """On CUDA, where the peaks of batches and what has come since are all that torch's allocator can say."""
    monkeypatch.setattr(backend, "peak_memory_bytes", lambda: 4)
    reports = reporter(tmp_path, "--pipeline-model-parallel-size 2", world_size=2)
    for iteration, own in ((1, 9.0), (2, 7.0)):
        measured = {"device_peak_bytes": (20.0, own)}
        reports.iteration(report(iteration, 4.0, rank_metrics=measured), Progress(iteration, 8 * iteration, 8, 0.5))
    reports.close()
    assert [each["peak_memory_bytes"] for each in read_metrics(f"{tmp_path}/metrics.jsonl")] == [9, 9]


def test_only_the_last_rank_writes(tmp_path, capsys):
    """On other ranks a reporter is silent and opens no file."""
    args = arguments(f"--metrics-file {tmp_path}/metrics.jsonl", world_size=1)
    silent = Reporter(replace(args, padded_vocab_size=128, world_size=2, rank=0))
    silent.iteration(report(100, 4.0), Progress(100, 800, 8, 0.5))
    silent.close()
    assert capsys.readouterr().out == "" and not (tmp_path / "metrics.jsonl").exists()


def test_another_rank_takes_over_from_a_lost_writer(tmp_path, capsys):
    """Where the last rank is lost, the last of those that are left writes: first what the lost one may not have written
    any more, once, and then each batch. Others, and one that has written before, go on as they were."""
    args = replace(arguments(f"--metrics-file {tmp_path}/metrics.jsonl", world_size=1), padded_vocab_size=128)
    reports = [Reporter(replace(args, world_size=3, rank=rank)) for rank in range(3)]

    def told(*iterations: int) -> list[int]:
        for each, iteration in ((each, iteration) for iteration in iterations for each in reports):
            each.iteration(report(iteration, 4.0 + iteration), Progress(iteration, 8 * iteration, 8, 0.5))
        return [record["iteration"] for record in read_metrics(f"{tmp_path}/metrics.jsonl")]

    assert told(1, 2, 3) == [1, 2, 3]
    lost = reports.pop()
    for rank, each in enumerate(reports):
        each.args = replace(each.args, world_size=2, rank=rank)
        each.take_over()
    assert told() == [1, 2, 3, 2, 3]
    assert told(4) == [1, 2, 3, 2, 3, 4]
    for each in reports:
        each.take_over()
    assert told(5) == [1, 2, 3, 2, 3, 4, 5]
    losses = {record["iteration"]: record["lm_loss"] for record in read_metrics(f"{tmp_path}/metrics.jsonl")}
    assert losses == {iteration: 4.0 + iteration for iteration in range(1, 6)}
    reports[1].say("said once")
    reports[0].say("not said")
    assert capsys.readouterr().out.splitlines()[-1] == "said once"
    for each in (*reports, lost):
        each.close()


def test_weights_and_biases(tmp_path, monkeypatch):
    """With --wandb-project the run is announced, each batch and evaluation is logged at its iteration, and it ends."""
    calls = []
    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    fake.init = lambda **options: calls.append(("init", options))
    fake.log = lambda values, step: calls.append(("log", step, values))
    fake.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    reports = reporter(tmp_path, f"--wandb-project p --wandb-exp-name n --wandb-save-dir {tmp_path}/w")
    reports.iteration(report(1, 4.0), Progress(1, 8, 8, 0.5))
    reports.evaluation("validation", 1, {"lm loss": 3.0}, seconds=1.0)
    reports.close()
    (_, options), (_, step, values), evaluation, end = calls
    assert (options["project"], options["name"], options["entity"]) == ("p", "n", None)
    assert options["config"]["num_layers"] == 4 and (tmp_path / "w").is_dir()
    assert step == 1 and values["lm loss"] == 4.0 and values["learning-rate"] == 1e-3
    assert evaluation == ("log", 1, {"lm loss validation": 3.0}) and end == ("finish",)


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_what_weights_and_biases_raises_ends_no_run(tmp_path, monkeypatch, caplog, where):
    """A full disk, or a service that cannot be reached: one warning, and training goes on."""
    fake = mock.Mock(__spec__=importlib.machinery.ModuleSpec("wandb", None))
    for name, error in (("init", RuntimeError("no answer")), ("log", OSError(28, "No space left on device")),
                        ("finish", RuntimeError("no answer"))):  # fmt: skip
        if name == where:
            getattr(fake, name).side_effect = error
    monkeypatch.setitem(sys.modules, "wandb", fake)
    reports = reporter(tmp_path, f"--wandb-project p --wandb-exp-name n --wandb-save-dir {tmp_path}/w")
    for iteration in (1, 2):
        reports.iteration(report(iteration, 4.0), Progress(iteration, 8, 8, 0.5))
    reports.evaluation("validation", 2, {"lm loss": 3.0}, seconds=1.0)
    reports.close()
    assert (
        caplog.messages[0].lower().startswith("--wandb-project p cannot be written: no")
        and "goes on" in caplog.messages[0]
    )
    assert all("is written again" in message for message in caplog.messages[1:])
    assert fake.log.call_count == (0 if where == "init" else 3)


def test_tensorboard_on_a_disk_that_is_full_from_the_start(tmp_path, monkeypatch, caplog):
    """A warning; a path that is no directory is refused."""
    import torch.utils.tensorboard

    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(torch.utils.tensorboard, "SummaryWriter", full)
    reports = reporter(tmp_path, f"--tensorboard-dir {tmp_path}/board")
    reports.iteration(report(1, 4.0), Progress(1, 8, 8, 0.5))
    reports.close()
    assert caplog.messages == [
        f"--tensorboard-dir {tmp_path}/board cannot be written: No space left on device; training goes on, without it "
        "from now on"
    ]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--tensorboard-dir .*/file/board cannot be written: Not a directory"):
        reporter(tmp_path, f"--tensorboard-dir {tmp_path}/file/board")


@pytest.mark.parametrize(
    ("flags", "package"),
    [("--tensorboard-dir board", "tensorboard"), ("--wandb-project p --wandb-exp-name n", "wandb")],
)
def test_without_the_package_the_run_goes_on(tmp_path, monkeypatch, capsys, flags, package):
    """The rank that would record says once what is missing and how to get it; the others say nothing."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    reports = reporter(tmp_path, flags)
    reports.iteration(report(1, 4.0), Progress(1, 8, 8, 0.5))
    reports.evaluation("validation", 1, {"lm loss": 3.0}, seconds=1.0)
    reports.close()
    out = capsys.readouterr().out
    said = f"warning: {' '.join(flags.split()[:2])} has no effect: the package {package} is not installed here; pip"
    assert out.count(said) == 1 and (tmp_path / "metrics.jsonl").read_text().count("lm_loss") == 1
    args = arguments(flags, world_size=2)
    Reporter(replace(args, padded_vocab_size=128, rank=0)).close()
    assert capsys.readouterr().out == ""


def test_flops_of_gpt3():
    """The 175B model's count agrees with the closed form 72 b s l h^2 (1 + s/6h + V/12lh) (Korthikanti et al. 2022)."""
    layers, hidden, sequence, vocab = 96, 12288, 2048, 51200
    flags = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads 96 --seq-length {sequence}"
    args = replace(arguments(f"{flags} --max-position-embeddings {sequence}"), padded_vocab_size=vocab)
    closed = 72 * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocab / (12 * layers * hidden))
    assert flops_per_sample(args) == pytest.approx(closed, rel=1e-9)


def profiled(folder, *, rank: int, iterations: int) -> list[str]:
    """Names of the recorded events of a run that multiplies in each iteration, iteration i under its own label."""
    args = SimpleNamespace(
        profile=True,
        profile_ranks=[1],
        rank=rank,
        profile_step_start=2,
        profile_step_end=4,
        use_pytorch_profiler=True,
        tensorboard_dir=str(folder),
    )
    profiler = Profiler(args)
    for iteration in range(iterations):
        profiler.before(iteration)
        with torch.profiler.record_function(f"iteration {iteration}"):
            torch.ones(2, 2) @ torch.ones(2, 2)
        profiler.after(iteration + 1)
    profiler.close()
    files = list(folder.rglob("*.json"))
    assert len(files) <= 1
    return [event["name"] for file in files for event in json.loads(file.read_text())["traceEvents"]]


@pytest.mark.parametrize("iterations", [6, 3])
def test_the_iterations_asked_for(tmp_path, iterations):
    """Start is included and end is not; a run that ends before still writes what it has."""
    names = {name for name in profiled(tmp_path, rank=1, iterations=iterations) if name.startswith("iteration")}
    assert names == {f"iteration {iteration}" for iteration in range(2, min(4, iterations))}


def test_other_ranks_record_nothing(tmp_path):
    """A rank that is not in --profile-ranks writes no file."""
    assert profiled(tmp_path, rank=0, iterations=6) == []


def closed_without_a_run(folder: str) -> int:
    closed: list[Reporter] = []
    close = mock.patch.object(Reporter, "close", autospec=True, side_effect=closed.append)
    with close, pytest.raises(ValueError, match="holds no checkpoint"):
        train_case(f"{data_flags()} --load {folder} --exit-on-missing-checkpoint")
    return len(closed)


def test_a_run_that_cannot_be_built_closes_its_log(tmp_path):
    """What it has announced to a board ends there, since the ranks may build another run in the same process."""
    assert workers.run(1, f"{__name__}:closed_without_a_run", folder=str(tmp_path)) == [1]
