"""What the ranks of the emulated stages' tests run."""

import torch.distributed as dist

from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.contract.trace import COMPUTE, Tracer
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.emulated import (
    EmulatedReduction,
    EmulatedStage,
    EmulatedTimes,
    EmulatedUpdate,
)
from megatron.pipeline.schedules import Schedule


def run(preset: str, batches: tuple[int, ...], forward: float, backward: float):
    """(text and seconds of every executed instruction, reports); every group of the chain joins both ranks."""
    rank, p = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(p))) for _ in range(3)]
    engine = PipelineEngine(
        Schedule.preset(preset, num_stages=p, data_parallel=True, tied_embeddings=preset != "pipedream"),
        EmulatedStage(index=rank, num_stages=p, times=EmulatedTimes(forward, backward), payload_bytes=1 << 16),
        EmulatedUpdate(
            grad=EmulatedReduction(1 << 16, groups[0], seconds=0.002),
            embed=EmulatedReduction(1 << 10, groups[1]),
            job_group=groups[2],
            step_seconds=0.001,
        ),
        tracer=Tracer(),
    )
    reports: list[BatchReport] = []
    for num_microbatches in batches:
        reports += engine.run_batch(num_microbatches, num_microbatches)
    reports += engine.drain()
    spans = [(str(span.instruction), span.end - span.start) for span in engine.trace().spans if span.track == COMPUTE]
    dist.barrier()
    engine.close()
    for group in groups:
        dist.destroy_process_group(group)
    return spans, reports
