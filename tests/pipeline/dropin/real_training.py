"""Runs of a real checkout of Megatron-LM, named by MEGATRON_LM, and what they leave to compare."""

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint

from tests.pipeline.dropin.fake_training import ROOT, environment

CHECKOUT = os.environ.get("MEGATRON_LM")
PATIENCE = 400  # seconds for a job

needs_checkout = pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM names no checkout of Megatron-LM")


def _version_of_checkout() -> tuple[int, ...]:
    """Of its megatron.core; () where there is no checkout."""
    if CHECKOUT is None:
        return ()
    text = (Path(CHECKOUT) / "megatron" / "core" / "package_info.py").read_text()
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)$", text, flags=re.MULTILINE))
    return tuple(int(numbers[name]) for name in ("MAJOR", "MINOR", "PATCH"))


beside_own_program = pytest.mark.skipif(
    ".".join(map(str, _version_of_checkout())) != importlib.metadata.version("megatron-core"),
    reason="this project's own programs run on another megatron.core, with other mock data and checkpoints",
)

VOCABULARY = 128 if _version_of_checkout() >= (0, 16) else 4200
"""Mock data of core 0.15 and older have tokens up to 4096, whatever the vocabulary."""

MODEL = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion"
)
RUN = shlex.split(
    "--micro-batch-size 2 --lr 1e-3 --min-lr 1e-4 --lr-decay-style linear --clip-grad 1.0 "
    "--log-interval 1 --eval-iters 1 --eval-interval 1000"
)


@dataclass(frozen=True)
class Scalars:
    """By iteration, as TensorBoard has them: FP32."""

    losses: dict[int, float]
    norms: dict[int, float]
    scales: dict[int, float]


@dataclass(frozen=True)
class RealRun:
    """One job that has ended. `save`: where its checkpoints are, by iteration."""

    output: str
    scalars: Scalars
    save: Path

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the last checkpoint, by its key: weights, optimizer's state, versions."""
        iteration = int((self.save / "latest_checkpointed_iteration.txt").read_text())
        return checkpoint_tensors(self.save / f"iter_{iteration:07d}")


def command_of(
    folder: Path, flags: str, *, ranks: int, iterations: int = 10, schedule: str | None = None, own: bool = False
) -> list[str]:
    """Of a job that saves and writes for TensorBoard in `folder`: in the checkout, natively where no schedule is named,
    or by this project's `own` program.
    """
    save, board = folder / "save", folder / "board"
    program = [str(ROOT / "pretrain_gpt.py")] if own else ["-m", "megatron.pipeline.dropin", "pretrain_gpt.py"]
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", *program, *MODEL, *RUN,
        f"--save={save}", f"--tensorboard-dir={board}", "--tensorboard-log-interval=1",
        *flags.split(),
    ]  # fmt: skip
    if "--rampup-batch-size" in flags:  # which goes by samples
        command += [f"--train-samples={iterations * 10}", "--lr-decay-samples=300"]
    else:
        command += [f"--train-iters={iterations}", "--lr-decay-iters=20"]
    for name, value in (("--hidden-dropout", 0), ("--attention-dropout", 0), ("--global-batch-size", 16),
                        ("--save-interval", 1000)):  # fmt: skip
        command += [f"{name}={value}"] if name not in flags else []
    if schedule is not None:
        command += [f"--pipeline-schedule={schedule}"]
        command += ["--rerun-mode=disabled"] if schedule == "2bw" and not own and "--rerun-mode" not in flags else []
    return command


def train(folder: Path, flags: str, *, ends: bool = True, **options: Any) -> RealRun:
    """Run the job of `command_of` to its end; `ends`: in order, else it is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    ended = subprocess.run(
        command_of(folder, flags, **options), cwd=folder if options.get("own") else CHECKOUT, timeout=PATIENCE,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(),
    )  # fmt: skip
    (folder / "output.txt").write_text(ended.stdout)
    assert (ended.returncode == 0) is ends, ended.stdout[-6000:]
    return RealRun(ended.stdout, read_scalars(folder / "board") if ends else Scalars({}, {}, {}), folder / "save")


def read_scalars(board: Path) -> Scalars:
    """What the job wrote for TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(board), size_guidance={"scalars": 0})
    events.Reload()
    names = events.Tags()["scalars"]

    def series(name: str) -> dict[int, float]:
        return {event.step: event.value for event in events.Scalars(name)} if name in names else {}

    return Scalars(series("lm loss"), series("grad-norm"), series("loss-scale"))


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a torch_dist checkpoint, by its key."""
    reader = torch_checkpoint.FileSystemReader(str(folder))
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if hasattr(entry, "size")
    }
    torch_checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


def different(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Keys that one lacks, or under which they have other bits."""
    return sorted(
        key
        for key in first.keys() | second.keys()
        if key not in first or key not in second or not torch.equal(first[key], second[key])
    )
