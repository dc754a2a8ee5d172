"""What the processes of `ftpipe.py` run: contenders on emulated stages of a graph, one after another, in turns."""

import gc
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.emulated.graph_stage import EmulatedGraphStage, EmulatedStageUpdates
from megatron.pipeline.runtime.stages.emulated.stage import EmulatedTimes
from megatron.pipeline.schedules import Schedule


@dataclass(frozen=True)
class Contender:
    """A schedule, seconds of a forward of each of its stages (a backward takes twice that), and how many microbatches
    a batch has, of how many batches the clock shall run, and how many come before it.
    """

    name: str
    schedule: Schedule
    forward: tuple[float, ...]
    num_microbatches: int
    num_batches: int
    num_before: int


@dataclass(frozen=True)
class Job:
    contenders: tuple[Contender, ...]
    payload_bytes: int
    repeats: int

    @property
    def world_size(self) -> int:
        return self.contenders[0].schedule.num_ranks


def measure(contender: Contender, payload_bytes: int) -> float:
    """Seconds of a batch on this rank, between its starts of two batches; what fills and drains is outside."""
    schedule, rank = contender.schedule, dist.get_rank()
    graph = schedule.graph
    stages = [
        EmulatedGraphStage(
            index=stage, graph=graph, payload_bytes=payload_bytes,
            times=EmulatedTimes(contender.forward[stage], 2 * contender.forward[stage]),
        )
        for stage in schedule.stages_of(rank)
    ]  # fmt: skip
    job = dist.new_group(list(range(dist.get_world_size())))
    update = EmulatedStageUpdates(job_group=job)
    engine = PipelineEngine(schedule, stages, update, timeout=timedelta(seconds=60))
    dist.barrier()
    m = contender.num_microbatches
    for _ in range(contender.num_before):
        engine.run_batch(m, m)
    start = time.perf_counter()
    for _ in range(contender.num_batches):
        engine.run_batch(m, m)
    seconds = (time.perf_counter() - start) / contender.num_batches
    engine.drain()
    dist.barrier()
    engine.close()
    dist.destroy_process_group(job)
    return seconds


def run(job: Job) -> dict[str, list[float]]:
    """In the process of one rank: by contender, the seconds of each repeat on the slowest rank."""
    gc.collect()
    gc.freeze()  # as in training
    found: dict[str, list[float]] = {contender.name: [] for contender in job.contenders}
    for _ in range(job.repeats):
        for contender in job.contenders:
            seconds = torch.tensor([measure(contender, job.payload_bytes)], dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            found[contender.name].append(seconds.item())
    return found
