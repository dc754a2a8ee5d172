"""The script that a search writes for its best: it starts the user's job, and the training program accepts it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron.commands import grid_search as tool
from megatron.pipeline.placement.topology import load_topology
from megatron.trainer.plan.command import SEARCHED
from tests.commands.in_process import ROOT, runner
from tests.commands.search_argv import CLUSTER, GPT, QUICK, SCRIPT

SUBCOMMAND = ("search",)


def stubbed(script: Path, folder: Path, *argv: str, **environment: str) -> list[str]:
    """What a script would start: the words of its `python`."""
    stub = folder / "python"
    stub.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$RECORD"\n')
    stub.chmod(0o755)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(folder / "record"), **environment}
    done = subprocess.run(
        ["bash", script.name, *argv], env=variables, cwd=script.parent, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return (folder / "record").read_text().splitlines()


MODELS = {
    "gpt": (
        [*GPT, "--cluster", "A100-40", "--nodes", 2, "--untie-embeddings-and-output-weights", "--swiglu"], "A100-40",
    ),
    "bert": (["--architecture", "bert", *GPT, "--cluster", "V100-16", "--nodes", 2], "V100-16"),
    "interleaved": ([*GPT, *CLUSTER, "--schedules", "interleaved", "--pipeline", 4], "V100-16"),
    "balanced": (
        ["--num-layers", 64, "--hidden-size", 6144, "--num-attention-heads", 48, "--seq-length", 2048, "--vocab-size",
         50257, "--global-batch-size", 64, "--cluster", "A100-80", "--nodes", 4, "--schedules", "2bw+balance",
         "--transformer-impl", "local"],
        "A100-80",
    ),
    "cpu": (
        ["--num-layers", 8, "--hidden-size", 256, "--num-attention-heads", 8, "--seq-length", 128, "--vocab-size", 1000,
         "--global-batch-size", 16, "--cluster", "cpu"],
        "2.0",
    ),
    "ramp-up": ([*GPT, *CLUSTER, "--rampup-batch-size", 16, 16, 1000, "--schedules", "flush,interleaved"], "V100-16"),
}  # fmt: skip


FULL = ("bert", "interleaved", "balanced", "cpu", "ramp-up")


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in FULL)) for n in MODELS])
def test_the_script_of_the_best_passes_a_dry_run(run, tmp_path, name, capsys, monkeypatch):
    """The training program accepts the best's script, for its GPUs, and says of its memory what the search said."""
    from megatron.trainer.arguments import parse_args
    from megatron.trainer.dry_run.dry_run import run_dry

    argv, gpu = MODELS[name]
    status, out, _ = run(*argv, "--simulate", 1, "--json", "--output", tmp_path / "plan")
    best = json.loads(out)["best"][0]
    assert status == 0
    script = tmp_path / "plan" / "best.sh"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    started = stubbed(script, tmp_path, "--dry-run", "--dry-run-json", str(tmp_path / "dry.json"))
    architecture = "bert" if name == "bert" else "gpt"
    program, defaults = SEARCHED[architecture]
    assert started[0] == program
    monkeypatch.chdir(ROOT)
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    assert run_dry(parse_args(started[1:], defaults=defaults), program) == 0, capsys.readouterr().err
    dry = json.loads((tmp_path / "dry.json").read_text())
    assert dry["placement"]["degrees"] == {key: best[key] for key in ("tensor", "pipeline", "data")}
    assert dry["verdict"]["word"] == best["verdict"]
    assert max(rank["total_bytes"] for rank in dry["memory"]) / 2**30 == pytest.approx(best["memory_gib"], rel=1e-9)
    assert dry["schedule"] == best["schedule"].removesuffix("+balance")
    assert gpu == started[started.index("--dry-run-gpu") + 1]


def test_the_script_starts_the_job(run, tmp_path):
    """By itself and through a launcher of examples/cluster it starts the same command, with the environment's data."""
    run(*CLUSTER, *GPT, *QUICK, "--output", tmp_path / "plan")
    script, data = (
        tmp_path / "plan" / "best.sh",
        {"DATA_PATH": "d", "VOCAB_FILE": "v", "MERGE_FILE": "m", "CHECKPOINTS": "c"},
    )
    argv = stubbed(script, tmp_path, "--seed", "7", **data)
    assert argv[:2] == ["-m", "torch.distributed.run"] and argv[-2:] == ["--seed", "7"]
    copy = tmp_path / "launch.sh"
    copy.write_text(f'cd /\nexec bash {ROOT}/examples/cluster/one_node.sh {script} "$@"\n')
    assert stubbed(copy, tmp_path, "--seed", "7", **data) == argv
    changed = stubbed(script, tmp_path, MICRO_BATCH="1", DISTRIBUTED_OPTIMIZER="0", **data)
    assert changed[changed.index("--micro-batch-size") + 1] == "1" and "--use-distributed-optimizer" not in changed


def test_scripts_of_a_sweep_read_topologies_of_their_nodes(capsys, tmp_path):
    """Of an optimized rank order: each number of GPUs has a file of its own."""
    plan, argv = tmp_path / "plan", [*GPT, *CLUSTER, "--schedules", "flush", "--tensor", 1, "--pipeline", 4]
    argv += ["--rank-mappings", "optimized", "--simulate", 1, "--gpus", "16,32", "--output", plan]
    status, _, err = runner(tool, capsys)("sweep", *argv)
    assert status == 0 and "2 x topology_N_gpus.yaml" in err
    data = {"DATA_PATH": "d", "VOCAB_FILE": "v", "MERGE_FILE": "m", "CHECKPOINTS": "c", "MASTER_ADDR": "node0"}
    for num_gpus in (16, 32):
        script = plan / f"best_{num_gpus}_gpus_1024_tokens.sh"
        started = stubbed(script, tmp_path, NNODES=str(num_gpus // 8), NODE_RANK="0", **data)
        assert started[started.index("--rank-mapping") + 1] == "optimized"
        topology = load_topology(started[started.index("--rank-topology") + 1])
        assert [node.gpus for node in topology.nodes] == [8] * (num_gpus // 8)


def test_the_script_knows_what_the_user_said(run, tmp_path, monkeypatch):
    """Data, tokenizer, checkpoints and what is logged come from the search's flags, paths seen from where it ran; what
    the environment sets goes before them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.bin").touch()
    places = ["--data-path", "5e-1", "a", "0.5", "/b", "--split", "90,10,0", "--tokenizer-type", "GPT2BPETokenizer",
              "--vocab-file", "v.json", "--merge-file", "m.txt", "--save", "it's \"saved\"", "--load", "it's \"saved\"",
              "--log-interval", 5, "--tensorboard-dir", "board", "--eod-mask-loss"]  # fmt: skip
    run(*CLUSTER, *GPT, *QUICK, *places, "--output", "plan")
    script = tmp_path / "plan" / "best.sh"
    assert "#   bash THIS_FILE\n" in script.read_text()  # nothing is wanted of the environment
    argv = stubbed(script, tmp_path)
    here = f"{tmp_path}/"

    def last(flag: str, count: int = 1) -> list[str]:
        index = len(argv) - argv[::-1].index(flag)
        return argv[index : index + count]

    assert last("--data-path", 4) == ["5e-1", f"{here}a", "0.5", "/b"]
    assert last("--vocab-file") + last("--merge-file") == [f"{here}v.json", f"{here}m.txt"]
    assert last("--save") == last("--load") == [f'{here}it\'s "saved"']
    assert last("--split") + last("--log-interval") == ["90,10,0", "5"]
    assert last("--tensorboard-dir") == [f"{here}board"] and "--eod-mask-loss" in argv
    environment = {"DATA_PATH": "/d", "TOKENIZER_MODEL": "/t", "CHECKPOINTS": "/c"}
    argv = stubbed(script, tmp_path, **environment)
    assert last("--data-path") + last("--tokenizer-model") + last("--save") == ["/d", "/t", "/c"]
    assert f"{here}a" not in argv and "GPT2BPETokenizer" not in argv


def test_the_script_takes_data_that_are_no_files(run, tmp_path):
    """--mock-data and a tokenizer without files; the rest is asked of the environment."""
    run(*CLUSTER, *GPT, *QUICK, "--mock-data", "--tokenizer-type", "NullTokenizer", "--output", tmp_path / "plan")
    script = tmp_path / "plan" / "best.sh"
    assert "#   CHECKPOINTS=... bash THIS_FILE\n" in script.read_text()
    argv = stubbed(script, tmp_path, CHECKPOINTS="/c")
    assert "--mock-data" in argv and "--data-path" not in argv and "--vocab-file" not in argv
    assert argv[argv.index("--tokenizer-type") + 1] == "NullTokenizer"


@pytest.mark.full
@pytest.mark.parametrize("variable", ["DATA_PATH", "DATA", "4"])
def test_what_refers_to_a_variable_is_left_to_the_environment(run, tmp_path, variable):
    """The user's own script may take its places from variables or parameters, of any name; of other flags that do so
    the head says that they are left out."""
    train = tmp_path / "train.sh"
    flags = "--data-path 0.5 ${DATA}/a 0.5 /b --num-workers 3 --save $1/run --tensorboard-dir ${DATA}/tb".replace(
        "{DATA}", "{" + variable + "}"
    )
    train.write_text(SCRIPT.replace("--data-path $DATA", flags).replace("vocab.txt", "${4}/vocab.txt"))
    run(*CLUSTER, *QUICK, "--model-script", train, "--output", tmp_path / "plan")
    script = tmp_path / "plan" / "best.sh"
    text = script.read_text()
    assert "#   DATA_PATH=... VOCAB_FILE=... CHECKPOINTS=... bash THIS_FILE\n" in text
    assert "did not know: --tensorboard-dir $" in text and text.count("/tb") == 1
    argv = stubbed(script, tmp_path, DATA_PATH="/d", VOCAB_FILE="/v", CHECKPOINTS="/c")
    assert argv[argv.index("--data-path") + 1] == "/d" and argv[argv.index("--num-workers") + 1] == "3"
    assert not any("$" in word for word in argv)


def test_what_the_environment_says_leaves_the_rest(run, tmp_path):
    """Other data, or another vocabulary, are read as the user's were: split, masks and kind of tokenizer stay."""
    argv = ["--architecture", "bert", *GPT, "--data-path", "/a", "--split", "90,10,0", "--num-workers", 7,
             "--tokenizer-type", "BertWordPieceCase", "--vocab-file", "/u", "--save", "/s"]  # fmt: skip
    run(*CLUSTER, *QUICK, *argv, "--output", tmp_path / "plan")
    script = tmp_path / "plan" / "best.sh"
    for environment in ({}, {"DATA_PATH": "/d"}, {"VOCAB_FILE": "/v"}):
        started = stubbed(script, tmp_path, **environment)
        assert started[started.index("--data-path") + 1] == environment.get("DATA_PATH", "/a")
        assert started[started.index("--vocab-file") + 1] == environment.get("VOCAB_FILE", "/u")
        assert {"90,10,0", "7", "BertWordPieceCase"} <= set(started)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["2bw", "l2l"])
def test_the_best_trains(run, tmp_path, schedule):
    """From a search to a checkpoint, without a word between: two ranks of a CPU. l2l is offered for a device too small
    for anything else, on a host that says what it has.
    """
    argv = ["--num-layers", 4, "--hidden-size", 64, "--num-attention-heads", 4, "--seq-length", 64, "--vocab-size",
             500, "--global-batch-size", 16, "--mock-data", "--tokenizer-type", "NullTokenizer", "--num-workers", 0,
             "--train-iters", 4, "--eval-iters", 0, "--save", tmp_path / "saved"]  # fmt: skip
    cluster = ["--cluster", "cpu", "--gpus-per-node", 2, "--schedules", "2bw"]
    if schedule == "l2l":
        file = tmp_path / "host.yaml"
        file.write_text(
            "nodes: 1\ngpus_per_node: 2\ngpu: cpu\nmemory_gib: 0.002\nhost_memory_gib: 8\nhost_bandwidth: 5\n"
            "host_optimizer_ns: 2\nbandwidth: {within_node: 5}\n"
        )
        cluster = ["--cluster", file, "--schedules", "flush,interleaved,l2l"]
    status, out, err = run(*cluster, *argv, "--output", tmp_path / "plan")
    assert status == 0, err
    assert ("fits only with l2l" in out) == (schedule == "l2l")
    done = subprocess.run(
        ["bash", tmp_path / "plan" / "best.sh"], env={**os.environ, "OMP_NUM_THREADS": "1", "PIPELINE_HOME": str(ROOT)},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    assert f"SCHEDULE:-{schedule}}}" in (tmp_path / "plan" / "best.sh").read_text()


@pytest.mark.full
def test_a_search_without_a_result_leaves_no_script(run, tmp_path):
    """An earlier search's best is not the best of this one."""
    assert run(*CLUSTER, *GPT, *QUICK, "--output", tmp_path)[0] == 0
    status, _, err = run(*CLUSTER, *GPT, *QUICK, "--hidden-size", 16384, "--output", tmp_path)
    assert status == 1 and "can run" in err and "report.html" in err
    assert not (tmp_path / "best.sh").exists()
    (tmp_path / "best.sh").write_text("mine")
    assert run(*CLUSTER, *GPT, *QUICK, "--hidden-size", 16384, "--output", tmp_path)[0] == 1
    assert (tmp_path / "best.sh").read_text() == "mine"


def test_the_script_trains_with_a_program_that_is_faster_than_named_schedules(run, tmp_path, monkeypatch):
    """Five layers of a rank do not divide into two stages of a named V; the program has stages of two and of three."""
    from megatron.trainer.arguments import parse_args
    from megatron.trainer.dry_run.dry_run import check_job

    plan = tmp_path / "plan"
    argv = ["--num-layers", 40, "--hidden-size", 5120, "--num-attention-heads", 40, "--seq-length", 4096,
            "--vocab-size", 128000, "--global-batch-size", 16, "--cluster", "A100-80", "--nodes", 1, "--tensor", 1,
            "--pipeline", 8, "--schedules", "flush,zb-h1,zbv,interleaved", "--auto", 1, "--json"]  # fmt: skip
    status, out, _ = run(*argv, "--output", plan)
    assert status == 0
    (note,) = (each for each in json.loads(out)["notes"] if "a program made for" in each)
    assert "p=8" in note and "faster than the best named schedule" in note
    words = stubbed(plan / "best.sh", tmp_path, "--dry-run")
    assert words[words.index("--pipeline-program") + 1].endswith("/auto.csv")
    assert not {"--pipeline-schedule", "--num-virtual-stages-per-pipeline-rank"} & {*words}
    monkeypatch.chdir(plan)
    result = check_job(parse_args(words[1:]))
    assert result.verdict.fits and result.args.schedule.rank_of_stage == (*range(8), *reversed(range(8)))
    status, out, _ = run(*argv, "--microbatches", 16, "--output", plan)
    notes = " ".join(json.loads(out)["notes"]) if status == 0 else ""
    assert "a program made for" not in notes and not (plan / "auto.csv").exists()
    status, _, error = run(*argv, "--objective", "memory")
    assert status == 1 and "--auto looks for faster programs" in error
    without = argv[: argv.index("--auto")]
    status, _, error = run(*without, "--auto-moves", "host")
    assert status == 1 and "--auto-moves host is for programs; add --auto SECONDS" in error


def test_a_program_recomputes_microbatches_where_a_device_asks_for_it(run, tmp_path, monkeypatch):
    """Named schedules fit if every layer recomputes. In the program one stage recomputes some microbatches, and the
    script says so; its dry run finds that it fits."""
    from megatron.trainer.arguments import parse_args
    from megatron.trainer.dry_run.dry_run import check_job

    plan = tmp_path / "plan"
    argv = ["--num-layers", 36, "--hidden-size", 5120, "--num-attention-heads", 40, "--seq-length", 4096,
            "--vocab-size", 128000, "--global-batch-size", 12, "--cluster", "A100-80", "--nodes", 1,
            "--gpus-per-node", 4, "--tensor", 1, "--pipeline", 4, "--schedules", "flush,zbv", "--auto", 2,
            "--json"]  # fmt: skip
    status, out, _ = run(*argv, "--output", plan)
    assert status == 0
    (note,) = (each for each in json.loads(out)["notes"] if "a program made for" in each)
    assert "faster than the best named schedule" in note and "; it recomputes microbatches of the stages " in note
    words = stubbed(plan / "best.sh", tmp_path, "--dry-run")
    assert "--pipeline-recompute" in words and not {"--recompute-granularity"} & {*words}
    monkeypatch.chdir(plan)
    result = check_job(parse_args(words[1:]))
    assert result.verdict.fits and result.args.schedule.recompute
