"""Training on the stand-in for CUDA, in the processes of `tests.workers`."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from tests.pipeline.runtime import megatron_cases, module_cases, reference
from tests.pipeline.runtime.megatron_model import Case, parallel
from tests.pipeline.runtime.recording import Recorder, recording
from tests.pipeline.runtime.reference import Training
from tests.pipeline.runtime.taken_back import taken_back as without

Findings = list[tuple[str, str]]


def train_gpt(
    *, seed: int = 0, backend: str = "nccl", taken_back: str | None = None, **options
) -> tuple[Findings, int, list[float]]:
    """Train a tiny GPT on this rank: findings, noted operations, losses."""
    case = Case(**options)
    with recording(seed=seed, backend=backend) as recorder, parallel(case), without(taken_back):
        stages, update = megatron_cases.build(case)
        for stage in stages:
            _mark(recorder, stage.model.parameters(), stage.model.buffers)
        _mark(recorder, update.optimizer.get_parameters())
        engine = megatron_cases.engine_of(case, stages, update, backend=backend)
        reports = []
        for batch in range(len(case.batches)):
            info = megatron_cases.batch_info(case, batch)
            with recorder.training():
                reports += engine.run_batch(info.num_microbatches, info.num_samples)
            if batch in case.drains:
                with recorder.training():
                    reports += engine.drain()
                engine.evaluate(2)
        with recorder.training():
            reports += engine.drain()
        recorder.find_held()
        engine.close()
        update.close()
        return recorder.findings, recorder.counts["operations"], [report.losses["lm loss"] for report in reports]


def train_module(
    preset: str,
    training: Training,
    *,
    seed: int = 0,
    backend: str = "nccl",
    drains: tuple[int, ...] = (),
    slow_host: bool = False,
    taken_back: str | None = None,
    **options,
) -> tuple[Findings, int, list[float]]:
    """The same with the reference's plain modules, which move activations where the preset says so. `slow_host`: the
    computing thread does nothing for a while when a backward has returned, and that of the moves ahead of each.
    """
    with recording(seed=seed, backend=backend) as recorder, without(taken_back):
        pipeline = module_cases.Pipeline(preset, training, backend=backend, **options)
        for stage in pipeline.stages:
            _mark(recorder, stage.module.parameters())
            if slow_host:
                stage.backward = _then_pausing(stage.backward, 0.03)
        if slow_host:
            queue = pipeline.engine._transfers._queue
            queue._carry_out = _after_pausing(queue._carry_out, 0.01)
        engine, reports = pipeline.engine, []
        for batch, num_microbatches in enumerate(training.batches):
            with recorder.training():
                reports += engine.run_batch(num_microbatches, num_microbatches * reference.MICROBATCH_SIZE)
                if batch in drains:
                    reports += engine.drain()
        with recorder.training():
            reports += engine.drain()
        pool = pipeline.memory.pool._buffers if pipeline.memory else ()
        recorder.find_held(pooled=[buffer.memory for buffer in pool])
        dist.barrier()
        pipeline.close()
        return recorder.findings, recorder.counts["operations"], [report.losses["loss"] for report in reports]


def _then_pausing(call, seconds: float):
    def pausing(*args):
        result = call(*args)
        time.sleep(seconds)
        return result

    return pausing


def _after_pausing(call, seconds: float):
    def pausing(*args):
        time.sleep(seconds)
        return call(*args)

    return pausing


def _mark(recorder: Recorder, *groups) -> None:
    for tensors in groups:
        for tensor in tensors() if callable(tensors) else tensors:
            if isinstance(tensor, torch.Tensor):
                recorder.mark_on_device(tensor)
