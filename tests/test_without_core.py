"""Installed without the extra `core`: what needs megatron.core says so in one sentence, and the rest works."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.commands.search_argv import GPT
from tests.trainer.arguments.command_line import argv

ROOT = Path(__file__).resolve().parents[1]
SENTENCE = (
    "megatron.core is not installed, and training needs it; pip install '.[core]', or run from a "
    "Megatron-LM checkout through python -m megatron.pipeline.dropin\n"
)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder with all that is installed here but megatron-core."""
    folder = tmp_path_factory.mktemp("packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith("megatron") and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


def run(packages: Path, *command: str, **environment: str) -> subprocess.CompletedProcess:
    """A run of Python that finds these packages and the project's sources, and no others."""
    found = {"PYTHONPATH": f"{ROOT}{os.pathsep}{packages}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-S", *command], capture_output=True, text=True, timeout=250, cwd=packages.parent,
        env={**os.environ, **found, **environment},
    )  # fmt: skip


def pretrain(folder: Path) -> list[str]:
    return [str(ROOT / "pretrain_gpt.py"), *argv()]


def dry_run(folder: Path) -> list[str]:
    return [*pretrain(folder), "--dry-run", "1"]


def finetune(folder: Path) -> list[str]:
    return [
        str(ROOT / "finetune.py"), "--model_name_or_path", str(folder), "--task", "sequence-classification",
        "--train_file", str(folder / "text.jsonl"), "--do_train", "--output_dir", str(folder / "tuned"),
    ]  # fmt: skip


def preprocess(folder: Path) -> list[str]:
    (folder / "text.jsonl").write_text('{"text": "some"}\n')
    return [
        "-m", "megatron.commands", "preprocess_data", "--input", str(folder / "text.jsonl"), "--output-prefix",
        str(folder / "text"), "--tokenizer-type", "NullTokenizer", "--vocab-size", "64",
    ]  # fmt: skip


def profile(folder: Path) -> list[str]:
    return ["-m", "megatron.commands", "profile_model", "--output", str(folder / "profile.json"), *map(str, GPT)]


def measure(folder: Path) -> list[str]:
    return [
        "-m", "megatron.commands", "grid_search", "measure", "--output", str(folder / "measured"),
        "--configuration", "pipeline=1,tensor=1,data=1,schedule=flush,micro_batch_size=1,global_batch_size=8",
        *map(str, GPT),
    ]  # fmt: skip


def generate(folder: Path) -> list[str]:
    return ["-m", "megatron.commands", "text_generation", "--load", str(folder), "--prompt", "some"]


COMMANDS = {
    pretrain: (2, "pretrain_gpt.py: error: "),
    dry_run: (2, "pretrain_gpt.py: error: "),
    finetune: (2, "finetune.py: error: "),
    preprocess: (2, "preprocess_data.py: error: "),
    profile: (1, "error: "),
    measure: (1, "error: "),
    generate: (2, "text_generation.py: error: "),
}
"""Command -> its exit status, and how its sentence begins."""

FORKS = """
import json, os, runpy, sys, torch
for folder, words in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        os.dup2(os.open(f"{folder}.err", os.O_WRONLY | os.O_CREAT, 0o600), 2)
        sys.argv = words[words[0] == "-m":]
        (runpy.run_module if words[0] == "-m" else runpy.run_path)(sys.argv[0], run_name="__main__")
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs each command in a process of its own, which has torch already."""


@pytest.fixture(scope="module")
def ended(packages, tmp_path_factory):
    """Command -> its folder, its exit status and what it wrote to stderr."""
    folders = {command: tmp_path_factory.mktemp(command.__name__) for command in COMMANDS}
    todo = [(str(folder), command(folder)) for command, folder in folders.items()]
    done = run(packages, "-c", FORKS, json.dumps(todo))
    statuses = map(int, done.stdout.split())
    return {
        command: (folder, status, Path(f"{folder}.err").read_text())
        for (command, folder), status in zip(folders.items(), statuses, strict=True)
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_what_needs_it_says_so(ended, command):
    """In one sentence, before anything is written or started."""
    (status, begins), (folder, found, said) = COMMANDS[command], ended[command]
    assert (found, said.splitlines(keepends=True)[-1:]) == (status, [begins + SENTENCE]), said
    assert "Traceback" not in said
    assert {path.name for path in folder.rglob("*") if path.is_file()} <= {"text.jsonl"}


@pytest.mark.full
def test_what_needs_none_works(packages):
    """A pipeline of plain torch trains, and a schedule is proved."""
    port = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run(packages, str(ROOT / "examples" / "library" / "train.py"), "--steps", "3", **port)
    assert done.returncode == 0 and "step 3: loss " in done.stdout, done
    done = run(packages, "-m", "megatron.commands", "schedule", "check", "--schedule", "2bw")
    assert done.returncode == 0 and done.stdout.startswith("correct\n"), done
