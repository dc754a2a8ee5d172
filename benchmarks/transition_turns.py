"""The processes of `transition.py`, which change a run's degrees through memory and through a checkpoint.

The old run stays unchanged. Every turn builds a new run, loads its state, takes a digest of it for the comparison of
all turns, and drops it.
"""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.pipeline.runtime.failure.agreement import control_group
from megatron.trainer.arguments import parse_args
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.changes.change import destroy_groups, restore_groups, set_groups_aside
from megatron.trainer.changes.state_in_memory import hand_over, hold_run
from megatron.trainer.checkpoint.checkpoint import CheckpointPosition, RunParts, load_checkpoint, save_checkpoint
from megatron.trainer.checkpoint.writer import CheckpointWriter
from megatron.trainer.data.tokenizer import build_tokenizer, padded_vocab_size
from megatron.trainer.programs.pretrain_gpt import program
from megatron.trainer.run.pretraining import complete
from megatron.trainer.start_up import initialize
from megatron.trainer.start_up.run import setup_model_and_optimizer

if TYPE_CHECKING:
    from benchmarks.transition import Job

ITERATION = 10


def arguments(job: Job, num_stages: int) -> TrainConfig:
    args = parse_args(f"{job.flags} --pipeline-model-parallel-size {num_stages}".split())
    args, _ = complete(args)
    return replace(args, padded_vocab_size=padded_vocab_size(args, build_tokenizer(args)))


def hold_versions(parts: RunParts) -> None:
    """Give a new run the weight versions of a run that is drained after `ITERATION` batches."""
    oldest, *others = parts.update.weights.entry_versions(ITERATION)
    parts.update.versions.reset(oldest)
    for version in others:
        parts.update.versions.prepare(version)


@torch.no_grad()
def randomize(parts: RunParts) -> int:
    """Fill the optimizer's state with random numbers that depend only on the stage, so that replicas are equal.

    Returns the number of bytes of the rank's state.
    """
    state = hold_run(parts, iteration=ITERATION)
    generator = torch.Generator().manual_seed(parallel_state.get_pipeline_model_parallel_rank())
    tensors = [each.data for each in nested_values(state) if isinstance(getattr(each, "data", None), torch.Tensor)]
    for tensor in tensors:
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def digest(parts: RunParts) -> str:
    """The digest of all tensors of the rank's state."""
    found = hashlib.blake2b()
    for each in nested_values(hold_run(parts, iteration=ITERATION)):
        if isinstance(getattr(each, "data", None), torch.Tensor):
            found.update(each.data.detach().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


class Clock:
    """A clock of named phases: a call runs a phase, and adds its seconds on the slowest rank to `seconds`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, phase: str, function: Callable[[], object]) -> object:
        dist.barrier(group=control_group())
        start = time.perf_counter()
        result = function()
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=control_group())
        self.seconds[phase] = seconds.item()
        return result


def turn(job: Job, args: TrainConfig, parts: RunParts, *, through_memory: bool) -> dict:
    """Change to the new degrees, and back. Returns the seconds of each phase, the bytes sent, and the new state's
    digest."""
    clock, path = Clock(), job.directory
    if through_memory:
        state = clock("describe", lambda: hold_run(parts, iteration=ITERATION))
    else:
        writer = CheckpointWriter(path)
        clock("save", lambda: save_checkpoint(writer, parts, args=args, position=CheckpointPosition(ITERATION)))
        writer.close()
    before = set_groups_aside()
    new_args = arguments(job, job.stages[1])
    new_args = clock("groups", lambda: initialize.set_up(new_args))
    new = clock("build", lambda: setup_model_and_optimizer(new_args, program()))
    sent = 0
    if through_memory:
        sent = clock("hand over", lambda: hand_over(state, new, iteration=ITERATION)).bytes_sent
    else:
        clock("load", lambda: load_checkpoint(new, args=replace(new_args, load=path)))
    found = digest(new)
    new.update.close()
    new = None
    gc.collect()
    destroy_groups(set_groups_aside())
    restore_groups(before)
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier(group=control_group())
    return {"seconds": clock.seconds, "sent": _total(sent), "digest": found}


def bare(num_bytes: int) -> dict[str, float]:
    """Measure the seconds of the parts of a hand-over: transfer, copies into and out of messages, and checksums.

    The ranks send `num_bytes` in total round a ring, with an equal part from each rank.
    """
    rank, ranks, clock = dist.get_rank(), dist.get_world_size(), Clock()
    size = max(1, num_bytes // ranks)
    out, into = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    spare = torch.ones(size, dtype=torch.uint8)

    def wire() -> None:
        arriving = dist.irecv(into, group=control_group(), group_src=(rank - 1) % ranks)
        leaving = dist.isend(out, group=control_group(), group_dst=(rank + 1) % ranks)
        arriving.wait()
        leaving.wait()

    clock("wire", wire)
    clock("copies", lambda: (spare.copy_(out), out.copy_(spare)))
    clock("checksums", lambda: (zlib.crc32(out.numpy()), zlib.crc32(into.numpy())))
    return clock.seconds


def _total(number: float) -> int:
    total = torch.tensor([number], dtype=torch.int64)
    dist.all_reduce(total, group=control_group())
    return int(total.item())


def take_turns(job: Job) -> dict:
    """Run all turns of a job on this rank. Returns the same on all ranks, except the digests.

    Precondition: the default process group is initialized.
    """
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(job.world_size), LOCAL_RANK=str(dist.get_rank()))
    args = arguments(job, job.stages[0])
    args = initialize.set_up(args)
    parts = setup_model_and_optimizer(args, program())
    hold_versions(parts)
    state_bytes = _total(randomize(parts))
    turns: list[dict] = []
    for repeat in range(job.repeats + 1):
        for through_memory in (True, False):
            found = turn(job, args, parts, through_memory=through_memory)
            turns.append({"memory": through_memory, "warm": repeat > 0, **found})
    assert len({each["digest"] for each in turns}) == 1, "memory and checkpoint have filled the run differently"
    bare_seconds = [bare(turns[0]["sent"]) for _ in range(job.repeats + 1)][1:]
    parameters = _total(sum(each.numel() for chunk in parts.chunks for each in chunk.parameters()))
    dist.barrier()
    initialize.shut_down()
    return {
        "job": asdict(job),
        "state_bytes": state_bytes,
        "parameters": parameters,
        "bare": bare_seconds,
        "turns": [each for each in turns if each["warm"]],
    }
