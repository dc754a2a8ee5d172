"""Two hundred batches of a balanced pipeline, and what the process holds meanwhile, for `tests.workers`."""

import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.emulated import EmulatedStage, EmulatedTimes, EmulatedUpdate
from megatron.pipeline.schedules import Schedule
from tests.pipeline.runtime.activations.balance_cases import ACTIVATION_BYTES
from tests.pipeline.runtime.stages.module import reference
from tests.pipeline.runtime.stages.module.module_cases import Pipeline
from tests.pipeline.runtime.stages.module.reference import Training


@dataclass
class Held:
    """What one process holds between two batches. `resident`: bytes of its memory."""

    resident: int
    files: int
    threads: int
    tensors: int
    buffers: int
    saved_bytes: int
    incomplete: int


def held_by(engine: PipelineEngine, memory: ActivationMemory) -> Held:
    dist.barrier()
    gc.collect()
    return Held(
        resident=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        files=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        tensors=sum(isinstance(each, torch.Tensor) for each in gc.get_objects()),
        buffers=memory.pool.num_buffers,
        saved_bytes=memory.current_bytes,
        incomplete=engine.num_unread_sends(),
    )


def emulated(num_batches: int, warmup: int) -> tuple[Held, Held]:
    """Stages that take no time. What this rank holds after the warm-up, and at the end."""
    rank, p = dist.get_rank(), dist.get_world_size()
    memory = ActivationMemory()
    stage = EmulatedStage(
        index=rank,
        num_stages=p,
        times=EmulatedTimes(0.0, 0.0),
        payload_bytes=1 << 12,
        activation_bytes=ACTIVATION_BYTES,
        activation_memory=memory,
    )
    engine = PipelineEngine(
        Schedule.preset("bpipe", num_stages=p),
        stage,
        EmulatedUpdate(job_group=dist.group.WORLD),
        activation_memory=memory,
    )
    found = _run(engine, memory, num_batches, warmup, 1)
    engine.close()
    return found


def real(num_batches: int, warmup: int) -> tuple[Held, Held]:
    """The same of stages that train the reference model."""
    pipeline = Pipeline("bpipe", Training(batches=(dist.get_world_size(),)), moves_activations=True)
    found = _run(pipeline.engine, pipeline.memory, num_batches, warmup, reference.MICROBATCH_SIZE)
    pipeline.close()
    return found


def _run(engine: PipelineEngine, memory: ActivationMemory, num_batches: int, warmup: int, size: int):
    p, found = dist.get_world_size(), []
    for end in (warmup, num_batches):
        while engine.next_batch < end:
            engine.run_batch(p, p * size)
        found.append(held_by(engine, memory))
    dist.barrier()
    return tuple(found)
