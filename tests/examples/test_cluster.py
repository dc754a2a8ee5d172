"""The cluster scripts: every job passes a dry run, and every launcher starts the very job that the dry run checked."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron import backend

backend.install()

from megatron.trainer.arguments import parse_args
from megatron.trainer.dry_run.dry_run import run_dry
from tests.trainer.arguments.bert_command_line import defaults

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("one_node", "torchrun", "slurm")
MODELS = {  # GPUs, schedule, t, p, and the paper's number of parameters in billions
    "gpt3_13b": (8, "bpipe", 1, 8, 13),
    "gpt3_96b": (32, "bpipe", 4, 8, 96),
    "gpt3_134b": (48, "bpipe", 4, 12, 134),
    "gpt_2.2b": (8, "2bw", 1, 8, 2.2),
    "bert_2.2b": (8, "2bw", 1, 8, 2.2),
}
DATA = {name: f"/data/{name.lower()}" for name in ("DATA_PATH", "VOCAB_FILE", "MERGE_FILE", "CHECKPOINTS")}
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_NNODES": "4", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_NODELIST": "gpu[3-6]",
    "SLURM_SUBMIT_DIR": str(ROOT),
}  # fmt: skip
STUBS = {  # a python that writes down how it was started, a srun that starts the second of 32 tasks, and scontrol
    "python": "for name in RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT; do\n"
    'echo "$name=${!name:-}"; done > "$RECORD"\nprintf "%s\\n" "$@" >> "$RECORD"',
    "srun": 'shift\nexport SLURM_PROCID=9 SLURM_NTASKS=32 SLURM_LOCALID=1\nexec "$@"',
    "scontrol": "echo gpu3\necho gpu4",
}


@pytest.fixture
def launch(tmp_path):
    """Run a script among the stubs; returns its result, and what python was started with: environment and words."""
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    record = tmp_path / "record"
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}

    def run(launcher: str, *argv: str, **environment: str) -> tuple[subprocess.CompletedProcess, dict, list[str]]:
        record.unlink(missing_ok=True)
        environment = {**kept, "PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(record), **environment}
        command = ["bash", str(ROOT / "examples" / "cluster" / f"{launcher}.sh"), *argv]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        lines = record.read_text().splitlines() if record.exists() else []
        return done, dict(line.split("=", 1) for line in lines[:5]), lines[5:]

    return run


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_passes_a_dry_run(launch, model, tmp_path, monkeypatch, capsys):
    """Without data and without a cluster: the job is right, fits the paper's GPUs, and is the paper's."""
    gpus, schedule, tensor, pipeline, billions = MODELS[model]
    done, _, argv = launch("torchrun", model, "--dry-run", "--dry-run-json", str(tmp_path / "dry.json"))
    program = "pretrain_bert.py" if model.startswith("bert") else "pretrain_gpt.py"
    assert done.returncode == 0 and argv[0] == program
    monkeypatch.chdir(ROOT)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    args = parse_args(argv[1:], defaults=defaults() if model.startswith("bert") else None)
    assert run_dry(args, program) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "dry.json").read_text())
    assert (found["world_size"], found["schedule"]) == (gpus, schedule)
    assert found["placement"]["degrees"] == {"tensor": tensor, "pipeline": pipeline, "data": 1}
    parameters = sum(rank["num_parameters"] for rank in found["memory"]) * tensor
    assert parameters / 1e9 == pytest.approx(billions, rel=0.04)
    assert found["verdict"]["word"] in ("fits", "borderline")
    if schedule == "bpipe":
        assert any(found["program"]["evicted_microbatches"])
        assert not any(pair["num_crossing"] for pair in found["placement"]["pairs"] if pair["moves_activations"])
    assert all(f"${name}" in " ".join(found["warnings"]) for name in ("DATA_PATH", "VOCAB_FILE", "CHECKPOINTS"))


@pytest.mark.parametrize("model, without_balance", [("gpt3_96b", "flush"), ("gpt3_134b", "flush")])
def test_balance_is_what_makes_them_fit(launch, model, without_balance, monkeypatch, capsys):
    """As in the paper, the two larger models run out of memory without balanced activations."""
    _, _, argv = launch("torchrun", model, "--dry-run", SCHEDULE=without_balance)
    monkeypatch.chdir(ROOT)
    assert run_dry(parse_args(argv[1:]), "pretrain_gpt.py") == 1
    assert "stage 0 misses" in capsys.readouterr().err


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_start_what_was_checked(launch, launcher):
    """The command line of the job is that of its dry run, but for the flags of the dry run."""
    cluster = SLURM if launcher == "slurm" else {"MASTER_ADDR": "gpu3"}
    checked, _, dry = launch(launcher, "gpt3_13b", "--dry-run", "--seed", "7", **DATA)
    started, _, argv = launch(launcher, "gpt3_13b", "--seed", "7", **DATA, **cluster)
    assert checked.returncode == started.returncode == 0, started.stderr
    job = argv[argv.index("pretrain_gpt.py") :]
    assert job[-2:] == ["--seed", "7"] and "/data/data_path" in job and not any("dry-run" in word for word in job)
    assert dry[: len(job)] == job and dry[len(job)] == "--dry-run"
    parse_args(job[1:])


def test_torchrun_meets_at_the_master(launch):
    """Every node starts its share and meets the others at MASTER_ADDR; without one, it says so."""
    _, _, argv = launch("torchrun", "gpt3_96b", **DATA, MASTER_ADDR="gpu3")
    assert argv[: argv.index("pretrain_gpt.py")] == [
        "-m", "torch.distributed.run", "--nnodes", "4", "--nproc-per-node", "8", "--rdzv-backend", "c10d", "--rdzv-id",
        "gpt3_96b", "--rdzv-endpoint", "gpu3:29500",
    ]  # fmt: skip
    done, _, argv = launch("torchrun", "gpt3_96b", **DATA)
    assert done.returncode != 0 and "MASTER_ADDR: is not set" in done.stderr and not argv


def test_slurm_gives_each_task_its_rank(launch):
    """A task knows its rank, its GPU and where to meet, without torchrun; outside a job the script says what to do."""
    _, environment, argv = launch("slurm", "gpt3_96b", **DATA, **SLURM)
    assert argv[0] == "pretrain_gpt.py"
    assert environment == {
        "RANK": "9", "WORLD_SIZE": "32", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu3", "MASTER_PORT": "20007"
    }  # fmt: skip
    done, _, argv = launch("slurm", "gpt3_96b", **DATA)
    assert done.returncode != 0 and "sbatch --nodes 4" in done.stderr and not argv


@pytest.mark.parametrize("missing", DATA)
def test_what_is_not_set_is_named(launch, missing):
    """Without its data a job ends at once, and says which variable names them."""
    environment = {name: value for name, value in DATA.items() if name != missing}
    done, _, argv = launch("one_node", "gpt3_13b", **environment)
    assert done.returncode == 2 and f"{missing} is not set: " in done.stderr and not argv


def test_unknown_names(launch):
    """A model or a scope that there is not is named, with those that there are."""
    done, _, _ = launch("one_node", "gpt5")
    assert done.returncode == 2 and all(model in done.stderr for model in MODELS)
    done, _, _ = launch("one_node", "gpt3", "--dry-run")
    assert done.returncode == 2
    done, _, _ = launch("one_node", "gpt3_13b", "--dry-run", RECOMPUTE="everything")
    assert done.returncode == 2 and "set it to none, attention, layer or stage" in done.stderr


def test_settings_of_the_environment(launch):
    """Degrees, scope, schedule, topology and another tokenizer come from the environment; more nodes, more replicas."""
    _, _, argv = launch(
        "torchrun", "gpt3_13b", "--dry-run", NNODES="2", TP="2", RECOMPUTE="layer", SCHEDULE="flush", GPU="H100",
        TOPOLOGY="cluster.yaml", TOKENIZER_MODEL="tokenizer.json",
    )  # fmt: skip
    args = parse_args(argv[1:])
    assert (args.dry_run, args.dry_run_gpu, args.tensor_model_parallel_size) == (16, "H100", 2)
    assert (args.recompute_method, args.pipeline_schedule, args.sequence_parallel) == ("uniform", "flush", True)
    assert (args.rank_topology, args.tokenizer_model) == ("cluster.yaml", "tokenizer.json")
