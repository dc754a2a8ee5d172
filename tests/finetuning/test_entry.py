"""The door: exit status and sentences, a run without a launcher, and one that torchrun starts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
import transformers
from scipy.io import wavfile

from megatron.finetuning.plan import make_plan, of_devices, run_dry
from megatron.finetuning.report import Report
from megatron.finetuning.samples import read_data
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.failure.errors import SameEverywhere
from megatron.trainer.report.metrics import read_metrics
from tests.finetuning import cases, tiny

ROOT = Path(__file__).resolve().parents[2]
CLASSES = "sequence-classification"


def start(*command: str, cwd: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=cwd, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_a_wrong_command_line_is_one_sentence(tmp_path):
    job = start(ROOT / "finetune.py", "--task", "causal-lm", cwd=tmp_path)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 2
    assert output.startswith("finetune.py: error: the following arguments are required: --model_name_or_path")
    assert output.count("\n") == 1


def test_a_dry_run_says_what_a_job_takes(tmp_path, capsys):
    cut = cases.partition(tmp_path, CLASSES, (0, 1, 1, 0))
    args = tiny.arguments(tmp_path, CLASSES, "--dry_run", "--devices", 2, "--partition", cut)
    run_dry(args)
    output = capsys.readouterr().out
    assert "BertForSequenceClassification: 4 stages on 2 ranks, ftpipe" in output
    assert "use weights that are up to 3 2 1 0 steps older" in output
    assert "simulated: " in output and " ms a microbatch, 1 of them a batch" in output
    assert "note:" not in output
    argv = ["--provisional_steps", "--gradient_accumulation_steps", 2]
    run_dry(tiny.arguments(tmp_path, CLASSES, "--dry_run", "--devices", 2, "--partition", cut, *argv))
    output = " ".join(capsys.readouterr().out.split())
    assert "up to 2 1 1 0 steps older than those of their backwards, and provisional from there" in output
    cut = cases.partition(tmp_path, CLASSES, (0, 1, 1, 0), "--bf16")
    run_dry(tiny.arguments(tmp_path, CLASSES, "--dry_run", "--devices", 2, "--partition", cut, "--bf16"))
    output = " ".join(capsys.readouterr().out.split())
    assert "note: a parameter takes 20 bytes with its optimizer, and the partition assumed 16; make" in output
    cut = cases.partition(tmp_path, CLASSES, (0, 1))
    argv = ["--dry_run", "--devices", 4, "--data_parallel_size", 2, "--partition", cut]
    run_dry(tiny.arguments(tmp_path, CLASSES, *argv))
    output = " ".join(capsys.readouterr().out.split())
    assert "2 replicas, each: BertForSequenceClassification: 2 stages on 2 ranks" in output
    assert "1 of them a batch on each of 2 replicas" in output
    with pytest.raises(SameEverywhere, match="is for 2 devices, and the job has 1 for each of 4 replicas; start as"):
        run_dry(tiny.arguments(tmp_path, CLASSES, *argv, "--data_parallel_size", 4))
    cut = cases.partition(tmp_path, CLASSES, (0,))
    run_dry(tiny.arguments(tmp_path, CLASSES, "--dry_run", "--devices", 1, "--partition", cut))
    assert "BertForSequenceClassification: 1 stage on 1 rank, ftpipe" in " ".join(capsys.readouterr().out.split())
    args.model_name_or_path = str(tmp_path / "nowhere")
    with pytest.raises(SameEverywhere, match="is no folder; download the model first"):
        run_dry(args)


@pytest.mark.full
def test_what_softens_staleness_takes_memory(tmp_path):
    """Bytes of a parameter with AdamW and FP32: 16, one set more where forwards are ahead, and for gap-aware steps the
    average, one for each step that is missing, and one. Stages 0 and 3 are on rank 0; the last is never stale.
    """
    cut = cases.partition(tmp_path, CLASSES, (0, 1, 1, 0))

    def bytes_of_ranks(*argv):
        args = tiny.arguments(tmp_path, CLASSES, "--dry_run", "--devices", 2, "--partition", cut, *argv)
        plan = make_plan(args, read_data(args))
        stages = [replace(stage, parameters=parameters[place]) for place, stage in enumerate(plan.partition.stages)]
        plan = replace(plan, partition=replace(plan.partition, stages=tuple(stages)))
        return [weights for _, weights, _, _ in of_devices(plan, args)]

    first, second, third, last = parameters = (100, 20, 3, 4000)
    plain = bytes_of_ranks()
    assert plain == [16 * (first + last), 16 * (second + third)]
    accumulated = "--gradient_accumulation_steps", 2
    for argv, (one, two, three) in (
        (["--weight_prediction"], (4, 4, 4)),
        (["--provisional_steps", *accumulated], (4, 4, 4)),
        (["--gap_aware"], (20, 16, 12)),
        (["--gap_aware", *accumulated], (16, 12, 12)),
    ):
        found = bytes_of_ranks(*argv)
        assert found == [plain[0] + one * first, plain[1] + two * second + three * third], argv


@pytest.mark.full
def test_a_run_without_a_launcher(tmp_path):
    """Profiles and cuts the model by itself; twice into one folder is refused, and so is another run's rest."""
    command = tiny.command(tmp_path, CLASSES, "--num_train_epochs", 1, "--save_steps", 4)
    validation = tiny.data_file(tmp_path, num_samples=7, seed=5)
    command += ["--validation_file", str(validation), "--metrics_file", str(tmp_path / "metrics.jsonl")]
    job = start(ROOT / "finetune.py", *command, cwd=tmp_path)
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output
    lines = read_metrics(str(tmp_path / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 7] and "eval_accuracy" in lines[-1]
    cases.loaded(tmp_path / "out", CLASSES)
    again = start(ROOT / "finetune.py", *command, cwd=tmp_path)
    output, _ = again.communicate(timeout=200)
    assert again.returncode == 2 and "has checkpoints of another run (checkpoint-7)" in output
    rest = start(ROOT / "finetune.py", *command, "--resume_from_checkpoint", "--seed", "7", cwd=tmp_path)
    output, _ = rest.communicate(timeout=200)
    assert rest.returncode == 2 and "was made with another seed (42) than this run's (7)" in output


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_job_that_is_ended(tmp_path, number):
    """SIGTERM to one rank saves and ends all; a killed rank is named by the others, within seconds."""
    cut = cases.partition(tmp_path, CLASSES, (0, 1, 0, 1))
    command = tiny.command(tmp_path, CLASSES, "--num_train_epochs", 4000, "--partition", cut)
    command += ["--metrics_file", str(tmp_path / "metrics.jsonl")]
    job = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, ROOT / "finetune.py", *command,
                cwd=tmp_path)  # fmt: skip
    deadline = time.monotonic() + 120
    while not (tmp_path / "metrics.jsonl").exists() or (tmp_path / "metrics.jsonl").stat().st_size < 2000:
        assert time.monotonic() < deadline and job.poll() is None, job.communicate()[0]
        time.sleep(0.1)
    children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), number)
    output, _ = job.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert job.returncode == 0, output
        assert "exiting on request after step" in output
        (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
        cases.loaded(checkpoint, CLASSES)
    else:
        assert job.returncode != 0 and "ended without an error message (killed, or crashed)" in output, output


def test_a_line_is_of_the_batches_since_the_last(tmp_path, capsys):
    """Their losses and the time that they took, wherever evaluations stand, and however late the reports come."""
    args = tiny.arguments(tmp_path, "sequence-classification", "--logging_steps", 2)
    report = Report(args, num_steps=5, steps_per_epoch=2, writes=True)
    for number, seconds in enumerate((0.1, 0.3, 0.5, 0.7, 0.25)):
        made = BatchReport(number, losses={"loss": 1.0 + number}, grad_norm=1.0, learning_rate=1.0)
        report.batch(made, seconds)
        if number == 2:
            report.evaluation(3, {"loss": 1.0}, 100.0)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    found = [re.search(r"step +(\d)/5 .* loss ([0-9.]+) .* ([0-9.]+) ms$", line).groups() for line in lines]
    assert found == [("2", "1.5000", "200.0"), ("4", "3.5000", "600.0"), ("5", "5.0000", "250.0")]


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "ranks", "epochs"), [("2bw", 2, 40), ("l2l", 1, 6), ("l2l", 2, 6)])
def test_a_killed_job_restarts_by_itself(tmp_path, schedule, ranks, epochs):
    """torchrun starts the job again after kill -9 of a rank, with a configuration file that says `resume: auto`: the
    metrics and the model of a run without an interruption, to the last bit. A second job with the file has no more to
    train.
    """
    command = tiny.command(tmp_path, CLASSES, dropout=0.1, num_samples=60)
    config = {name.removeprefix("--"): value for name, value in zip(command[::2], command[1::2], strict=True)}
    config |= {"pipeline_schedule": schedule, "gradient_accumulation_steps": 2, "save_steps": 10}
    config |= {"num_train_epochs": epochs, "resume": "auto", "save_total_limit": 2}
    if schedule != "l2l":
        config["partition"] = str(cases.partition(tmp_path, CLASSES, (0, 1), dropout=0.1))
    num_batches = 10 * epochs

    def job(name: str) -> subprocess.Popen:
        config["output_dir"] = str(tmp_path / name)
        config["metrics_file"] = str(tmp_path / f"{name}.jsonl")
        (tmp_path / f"{name}.yaml").write_text(json.dumps(config))
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "--max-restarts", 1]
        return start(*torchrun, ROOT / "finetune.py", tmp_path / f"{name}.yaml", cwd=tmp_path)

    def values(name: str) -> dict[int, tuple[float, float]]:
        lines = read_metrics(str(tmp_path / f"{name}.jsonl"))
        return {line["step"]: (line["loss"], line["learning_rate"]) for line in lines}

    whole = job("whole")
    output, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0 and "there is no checkpoint yet, so the run begins" in output, output
    killed, deadline = job("killed"), time.monotonic() + 200
    while not list((tmp_path / "killed").glob("checkpoint-*")):
        assert time.monotonic() < deadline and killed.poll() is None, killed.communicate()[0]
        time.sleep(0.02)
    children = subprocess.run(["pgrep", "-P", str(killed.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    output, _ = killed.communicate(timeout=300)
    assert killed.returncode == 0 and re.search(r"\n[1-9]\d* of \d+ batches to train", output), output
    found = re.findall(rf"(\d+) of {num_batches} batches to train", output)
    assert len(found) == 2 and 0 < int(found[1]) < int(found[0]) == num_batches
    assert values("killed") == values("whole") and len(values("whole")) == num_batches
    one, other = (cases.weights_of(tmp_path / name, CLASSES) for name in ("whole", "killed"))
    assert all(torch.equal(weights, other[name]) for name, weights in one.items())
    again = job("killed")
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0 and f"0 of {num_batches} batches to train" in output, output


@pytest.mark.full
def test_sound_from_files_to_a_model(tmp_path):
    """WAV files through the program: a stage that is cut here, an evaluation, and a model that
    transformers opens with its feature extractor."""
    samples = []
    for number in range(8):
        wave = numpy.random.default_rng(number).normal(0, 0.1, 200).astype(numpy.float32)
        wavfile.write(tmp_path / f"{number}.wav", 100, wave)
        samples.append({"audio": f"{number}.wav", "label": ("low", "high")[number % 2]})
    file = tmp_path / "sounds.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in samples))
    model = tiny.model_folder(tmp_path, "audio-classification")
    job = start(
        ROOT / "finetune.py", "--model_name_or_path", model, "--task", "audio-classification", "--train_file", file,
        "--validation_file", file, "--output_dir", tmp_path / "out", "--max_seconds", 2, "--num_train_epochs", 1,
        "--per_device_train_batch_size", 4, "--metrics_file", tmp_path / "metrics.jsonl", cwd=tmp_path,
    )  # fmt: skip
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 0, output
    lines = read_metrics(str(tmp_path / "metrics.jsonl"))
    assert len([line for line in lines if "loss" in line]) == 2
    found = transformers.AutoModelForAudioClassification.from_pretrained(tmp_path / "out").eval()
    extractor = transformers.AutoFeatureExtractor.from_pretrained(tmp_path / "out")
    waves = [wavfile.read(tmp_path / f"{number}.wav")[1] for number in range(8)]
    inputs = extractor(waves, sampling_rate=100, return_tensors="pt")
    labels = torch.tensor([found.config.label2id[each["label"]] for each in samples])
    with torch.no_grad():
        expected = found(**inputs, labels=labels)
    assert lines[-1]["eval_loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    assert lines[-1]["eval_accuracy"] == (expected.logits.argmax(-1) == labels).double().mean().item()
