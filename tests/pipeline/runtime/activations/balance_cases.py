"""Whole pipelines whose saved activations are balanced, in the processes of `tests.workers`."""

import gc
import os
import random
import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.contract.trace import COMPUTE, MOVES, Tracer
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.failure.connections import break_connections, open_connections
from megatron.pipeline.runtime.stages.emulated import EmulatedStage, EmulatedTimes, EmulatedUpdate, sleep_for
from megatron.pipeline.schedules import Schedule
from tests.pipeline.runtime.stages.module import reference
from tests.pipeline.runtime.stages.module.module_cases import Pipeline
from tests.pipeline.runtime.stages.module.reference import Training

ACTIVATION_BYTES = 1 << 18


@dataclass
class Balanced:
    """One rank's view of a run. `num_buffers`: in the pool after each batch that was drained."""

    peak_saved: dict[int, int]  # by stage
    peak_on_rank: int
    peak_bytes: int | None
    num_buffers: list[int]
    num_incomplete: int
    reports: list[BatchReport] | None = None
    gradients: list[Tensor] | None = None  # of each batch, flat
    parameters: dict[str, Tensor] | None = None
    microbatch_bytes: int = 0  # the most that one takes on any rank, saved or moved
    executed: list[str] | None = None
    moves: list[str] | None = None


def outcome_of(engine: PipelineEngine, memory: ActivationMemory | None, num_buffers: list[int]) -> Balanced:
    return Balanced(
        peak_saved=engine.saved.peaks,
        peak_on_rank=engine.saved.peak_on_rank,
        peak_bytes=None if memory is None else memory.peak_bytes,
        num_buffers=num_buffers,
        num_incomplete=engine.num_unread_sends(),
    )


def train(preset: str, training: Training, *, moves: bool, drains: tuple[int, ...] = (), **options) -> Balanced:
    """Train the reference model; `moves`: with an `ActivationMemory`."""
    pipeline = Pipeline(preset, training, moves_activations=moves, **options)
    engine, update, memory = pipeline.engine, pipeline.update, pipeline.memory
    gradients, reports, num_buffers, sizes = [], [], [], [0]
    step = update.step

    def remembering_step(version):
        gradients.append(torch.cat(update._batches[version].buffer.flat).cpu())
        return step(version)

    def remember_sizes(stage):
        forward = stage.forward

        def measured_forward(microbatch, input):
            output = forward(microbatch, input)
            sizes.append(stage.saved_bytes(microbatch))
            return output

        stage.forward = measured_forward

    update.step = remembering_step
    for stage in pipeline.stages if moves else ():
        remember_sizes(stage)
    for batch, num_microbatches in enumerate(training.batches):
        reports += engine.run_batch(num_microbatches, num_microbatches * reference.MICROBATCH_SIZE)
        if batch in drains:
            reports += engine.drain()
            num_buffers.append(memory.pool.num_buffers if memory else 0)
    reports += engine.drain()
    dist.barrier()
    if moves:
        layouts = [stage._captured.layout for stage in pipeline.stages]
        sizes += [layout.buffer_bytes for layout in layouts if layout is not None]
        assert memory.current_bytes == 0
    pipeline.close()
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, max(sizes))
    outcome = outcome_of(engine, memory, num_buffers)
    outcome.reports, outcome.gradients, outcome.microbatch_bytes = reports, gradients, max(gathered)
    newest = update.versions.tensors(update.versions.newest)
    outcome.parameters = {name: tensor.cpu().clone() for name, tensor in newest.items()}
    return outcome


def train_on_cuda(**options) -> Balanced:
    """All ranks on the first GPU."""
    torch.cuda.set_device("cuda:0")
    return train(device="cuda:0", **options)


class UnevenStage(EmulatedStage):
    """Every forward and backward takes a time of its own, so that the ranks drift."""

    def __init__(self, *, index: int, seed: int, longest: float, **options) -> None:
        super().__init__(index=index, times=EmulatedTimes(0.0, 0.0), **options)
        self._random = random.Random(f"{seed} {index}")
        self._longest = longest

    def forward(self, microbatch, input):
        sleep_for(self._random.choice((0.0, 0.3, 1.0)) * self._longest)
        return super().forward(microbatch, input)

    def backward(self, microbatch, output_grad):
        sleep_for(self._random.choice((0.0, 0.3, 1.0)) * self._longest)
        return super().backward(microbatch, output_grad)


def emulate(
    preset: str, batches: tuple[int, ...], *, seed: int, longest: float, num_virtual_stages: int = 1, **options
) -> Balanced:
    """Stages that sleep, and move `ACTIVATION_BYTES` that are numbered by microbatch; drained after every batch but
    the first.
    """
    rank, p = dist.get_rank(), dist.get_world_size()
    num_stages = p * num_virtual_stages
    memory = ActivationMemory()
    stages = [
        UnevenStage(
            index=stage,
            seed=seed,
            longest=longest,
            num_stages=num_stages,
            payload_bytes=1 << 12,
            activation_bytes=ACTIVATION_BYTES,
            activation_memory=memory,
        )
        for stage in range(rank, num_stages, p)
    ]
    engine = PipelineEngine(
        Schedule.preset(preset, num_stages=num_stages, num_virtual_stages=num_virtual_stages, **options),
        stages,
        EmulatedUpdate(job_group=dist.group.WORLD),
        tracer=Tracer(num_batches=len(batches)),
        activation_memory=memory,
    )
    num_buffers = []
    for batch, num_microbatches in enumerate(batches):
        engine.run_batch(num_microbatches, num_microbatches)
        if batch:
            engine.drain()
            num_buffers.append(memory.pool.num_buffers)
    dist.barrier()
    outcome = outcome_of(engine, memory, num_buffers)
    assert memory.current_bytes == 0
    spans = engine.trace().spans
    outcome.executed = [str(span.instruction) for span in spans if span.track == COMPUTE]
    outcome.moves = [str(span.instruction) for span in spans if span.track == MOVES]
    engine.close()
    return outcome


def abandon(preset: str, training: Training, *, rounds: int) -> list[tuple[int, int]]:
    """Give up a pipeline in the middle of its second batch, `rounds` times: the last rank computes nothing, so the
    others wait for it, and under bpipe the rank that is its pair waits in a move. Returns the numbers of threads and of
    open files behind each. As in training, what has reference cycles is not collected.
    """
    kept, counts = open_connections(), []
    for _ in range(rounds):
        pipeline = Pipeline(preset, training, moves_activations=True)
        pipeline.engine.run_batch(training.batches[0], training.batches[0] * reference.MICROBATCH_SIZE)
        pipeline.engine.drain()
        gc.freeze()
        errors: list[Exception] = []
        waits = threading.Thread(target=_run_batch, args=(pipeline.engine, training.batches[1], errors))
        if dist.get_rank() < dist.get_world_size() - 1:
            waits.start()
            time.sleep(1.0)
            assert not errors
        dist.barrier()
        break_connections(kept=kept)
        if waits.ident is not None:
            waits.join(30.0)
            assert len(errors) == 1 and not waits.is_alive(), errors
        pipeline.engine.abandon(30.0)
        del pipeline, errors, waits
        gc.collect()
        dist.barrier()
        counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    gc.unfreeze()
    return counts


def _run_batch(engine: PipelineEngine, size: int, errors: list[Exception]) -> None:
    try:
        engine.run_batch(size, size * reference.MICROBATCH_SIZE)
    except Exception as error:
        errors.append(error)
