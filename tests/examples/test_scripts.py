"""The example scripts: sound shell, and command lines that the training program accepts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron import backend

backend.install()

from megatron.trainer.arguments import parse_args, validate_args
from megatron.trainer.dry_run.dry_run import run_dry
from tests.trainer.arguments import t5_command_line
from tests.trainer.arguments.bert_command_line import defaults
from tests.trainer.run.run_case import train

FULL = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for folder in ("examples", "tests", "tools") for path in (ROOT / folder).rglob("*.sh"))


@pytest.fixture
def recorded_arguments(tmp_path):
    """Run a script in `tmp_path` with a `python` that only writes its arguments down; returns those of the program."""

    def run(script: str, *arguments: str, program: str = "pretrain_gpt.py", **environment: str) -> list[str]:
        stub = tmp_path / "bin" / "python"
        stub.parent.mkdir(exist_ok=True)
        stub.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$RECORD"\n')
        stub.chmod(0o755)
        record = tmp_path / "arguments"
        path = f"{stub.parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "RECORD": str(record), **environment}
        subprocess.run(["bash", str(ROOT / script), *arguments], env=environment, cwd=tmp_path, check=True, timeout=60)
        argv = record.read_text().splitlines()
        return argv[argv.index(program) + 1 :]

    return run


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_is_sound_shell(path):
    """bash can parse every script of the project."""
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=60)


def test_a_script_installs_what_its_programs_ask_for():
    """Each extra that a program of examples/ names in its error is prepared by every script that runs the program."""
    asked = {
        program.name: set(re.findall(r"pip install \.\[(\w+)\]", program.read_text()))
        for program in (ROOT / "examples").rglob("*.py")
    }
    runs = 0
    for script in (ROOT / "examples").glob("*.sh"):
        text = script.read_text()
        prepared = {word for line in re.findall(r"prepare_environment (.*)", text) for word in line.split()}
        for name, extras in asked.items():
            if extras and f"examples/{name} " in text:
                runs += 1
                assert extras <= prepared, f"{script.name} runs {name} with {prepared}, and {name} asks for {extras}"
    assert runs >= 2


@pytest.mark.parametrize(
    "environment",
    [{}, {"TP": "2", "PP": "2", "SCHEDULE": "flush"}, {"GPUS_PER_NODE": "4"}, {"SCHEDULE": "interleaved", "VP": "3"}],
    ids=lambda e: str(e),
)
def test_one_node_script_parses(recorded_arguments, environment):
    """examples/pretrain_gpt_2bw.sh gives a command line that is accepted, at several degrees."""
    argv = recorded_arguments("examples/pretrain_gpt_2bw.sh", "ckpt", "vocab.json", "merges.txt", "text", **environment)
    args = parse_args(argv)
    validate_args(args, world_size=int(environment.get("GPUS_PER_NODE", 8)))
    assert args.pipeline_schedule == environment.get("SCHEDULE", "2bw")
    assert args.pipeline_model_parallel_size == int(environment.get("PP", 4))
    assert (args.virtual_pipeline_model_parallel_size or 1) == int(environment.get("VP", 1))


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"TP": "2", "PP": "2", "SCHEDULE": "flush", "PRECISION": ""},
        {"GPUS_PER_NODE": "4", "LAYERS": "32", "HIDDEN": "2048", "HEADS": "32", "SCHEDULE": "bpipe"},
    ],
    ids=lambda e: str(e),
)
def test_bert_script_parses(recorded_arguments, tmp_path, environment):
    """examples/pretrain_bert_2bw.sh gives a command line that is accepted, at several sizes and degrees. A path is
    looked for where the caller stands."""
    argv = recorded_arguments(
        "examples/pretrain_bert_2bw.sh", "ckpt", "vocab.txt", "text", program="pretrain_bert.py", **environment
    )
    args = parse_args(argv, defaults=defaults())
    validate_args(args, world_size=int(environment.get("GPUS_PER_NODE", 8)))
    assert args.pipeline_schedule == environment.get("SCHEDULE", "2bw")
    assert (args.vocab_file, args.save) == (str(tmp_path / "vocab.txt"), str(tmp_path / "ckpt"))
    assert (args.num_layers, args.bf16) == (int(environment.get("LAYERS", 24)), "PRECISION" not in environment)


def test_t5_script_parses(recorded_arguments):
    """examples/pretrain_t5_2bw.sh gives a command line that is accepted, of the size of Megatron-LM's example."""
    argv = recorded_arguments(
        "examples/pretrain_t5_2bw.sh", "ckpt", "vocab.txt", "text", program="pretrain_t5.py", PP="2", TP="2"
    )
    args = parse_args(argv, defaults=t5_command_line.defaults())
    validate_args(args, world_size=8)
    assert (args.num_layers, args.hidden_size, args.decoder_seq_length, args.bf16) == (24, 768, 128, True)


@pytest.mark.parametrize(
    "script, usage",
    [
        ("pretrain_gpt_2bw.sh", "CHECKPOINTS VOCAB_FILE MERGE_FILE DATA_PREFIX"),
        ("pretrain_bert_2bw.sh", "CHECKPOINTS VOCAB_FILE DATA_PREFIX"),
        ("pretrain_t5_2bw.sh", "CHECKPOINTS VOCAB_FILE DATA_PREFIX"),
    ],
)
def test_one_node_script_shows_its_usage(script, usage):
    """With too few arguments the script says what it wants, and fails, wherever it is called."""
    command = ["bash", script, *(["ckpt"] if "gpt" not in script else [])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT / "examples")
    assert result.returncode == 1 and usage in result.stderr


@pytest.mark.parametrize("output", ["my run", "/my run"])
def test_results_go_where_the_caller_stands(tmp_path, output):
    """The examples change to the project's folder, and read $OUTPUT after tools/environment.sh."""
    command = ["bash", "-euc", f'cd "{ROOT}"; . tools/environment.sh; echo "$OUTPUT"']
    environment = {**os.environ, "OUTPUT": output}
    said = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout == f"{tmp_path / output}\n"


MODELS = {
    "deepseek_v3": (1024, 683.7, "tensor 2 x pipeline 8 x data 64"),
    "gpt_oss_20b": (8, 20.91, "tensor 1 x pipeline 4 x data 2"),
    "llama3_70b": (64, 70.56, "tensor 4 x pipeline 4 x data 4"),
    "llama3_8b": (8, 8.03, "tensor 1 x pipeline 2 x data 4"),
    "mixtral_8x7b": (32, 46.7, "tensor 1 x pipeline 4 x data 8"),
    "qwen3_30b_a3b": (32, 30.57, "tensor 4 x pipeline 2 x data 4"),
    "t5_220m": (8, 0.2461, "tensor 1 x pipeline 2 x data 4"),
}
"""A model of examples/models -> GPUs, billions of parameters (of T5 with its tied embedding twice), and degrees."""


def test_every_model_is_tested():
    assert {path.stem for path in (ROOT / "examples" / "models").glob("*.sh")} == {*MODELS, "common"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=FULL if n in ("deepseek_v3", "llama3_70b") else ()) for n in MODELS]
)
def test_a_model_passes_its_dry_run(recorded_arguments, capsys, monkeypatch, name):
    """The job as written, and of twice as many GPUs, fits, and the model has the parameters that it is known for."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    num_gpus, billions, degrees = MODELS[name]
    program, of_program = (
        ("pretrain_t5.py", t5_command_line.defaults()) if name == "t5_220m" else ("pretrain_gpt.py", {})
    )
    script = f"examples/models/{name}.sh"
    argv = recorded_arguments(script, "--dry-run", program=program)
    status = run_dry(parse_args(argv, defaults=of_program), program)
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    assert re.search(rf"{num_gpus} GPUs on \d+ nodes?, {degrees}\n", out)
    assert float(re.search(r"model: (\S+) billion parameters", out)[1]) == pytest.approx(billions, rel=1e-3)
    assert re.search(r"^H100: fits; ", out, re.MULTILINE)
    more = recorded_arguments(script, "--dry-run", str(2 * num_gpus), program=program)
    assert more[more.index("--dry-run") + 1] == str(2 * num_gpus)


def check_small_run(folder: Path) -> None:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [each["lm_loss"] for each in records if "lm_loss" in each]
    assert len(losses) == 3 and max(losses) < 8 and (folder / "iter_0000003").is_dir()


def test_a_small_model_trains(recorded_arguments, tmp_path):
    """What SMALL=1 starts makes three iterations on two ranks, with layers, experts and attention of the kinds."""
    flags = recorded_arguments("examples/models/deepseek_v3.sh", SMALL="1", CHECKPOINTS=str(tmp_path))
    train(2, " ".join(flags), base="")
    check_small_run(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_a_script_trains_a_small_model(tmp_path, name):
    """The same of every model, in processes that the script starts."""
    environment = {"SMALL": "1", "CHECKPOINTS": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "models" / f"{name}.sh")], timeout=500, stdin=subprocess.DEVNULL,
        env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    check_small_run(tmp_path)


@pytest.mark.full
def test_bert_from_text_to_losses(tmp_path):
    """Without arguments the BERT script makes its data of the text that every machine has, trains and evaluates."""
    environment = {"OUTPUT": str(tmp_path), "PYTHONPATH": str(ROOT), "LAYERS": "2", "HIDDEN": "32", "ITERATIONS": "3"}
    environment |= {"MICRO_BATCH": "2", "GLOBAL_BATCH": "8"}
    # The interpreter of the tests comes first: from another one the script would install what it misses.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", str(ROOT / "examples/pretrain_bert_2bw.sh")], check=True, timeout=500, stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )  # fmt: skip
    records = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [each["iteration"] for each in records if {"lm_loss", "sop_loss"} <= each.keys()] == [1, 2, 3]
    assert records[-1]["validation_loss"] < 7 and (tmp_path / "checkpoints" / "iter_0000003").is_dir()


def run(output: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    words = {"ITERATIONS": "4", "SEEDS": "1", "RATES": "1e-3", "OUTPUT": str(output), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", str(ROOT / "examples" / "convergence_sweep.sh")], env={**os.environ, **words, **environment},
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=500,
    )  # fmt: skip


@pytest.mark.full
def test_replicas_share_the_batch(tmp_path):
    """Predictions from one replica and from all, on two stages with two replicas, beside flush; then nothing is
    left to train.
    """
    asked = {"REPLICAS": "2", "SCHEDULES": "flush provisional reduced"}
    done = run(tmp_path, **asked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stages read 3, 4 of 4 microbatches of each replica" in done.stdout
    assert "stages read 3, 4 of 4 microbatches, means over the replicas" in done.stdout
    names = {"flush_lr1e-3_seed1.jsonl", "provisional_lr1e-3_seed1.jsonl", "reduced_lr1e-3_seed1.jsonl"}
    assert {path.name for path in tmp_path.glob("*.jsonl")} == names and (tmp_path / "sweep.png").exists()
    assert "== " not in run(tmp_path, **asked).stdout


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [({"MODEL": "t5"}, "MODEL is t5"), ({"REPLICAS": "3"}, "REPLICAS is 3, which does not divide microbatches of 4")],
    ids=str,
)
def test_what_is_refused(tmp_path, environment, sentence):
    done = run(tmp_path, **environment)
    assert done.returncode == 1 and sentence in done.stderr and not any(tmp_path.iterdir())
