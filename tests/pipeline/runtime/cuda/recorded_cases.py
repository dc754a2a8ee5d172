"""Training on the stand-in for CUDA, in the processes of `tests.workers`."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.optimizer import get_megatron_optimizer
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.megatron.relay_update import MegatronRelayUpdate, RelayChunk
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate
from megatron.pipeline.runtime.transport.links import NcclLink
from megatron.pipeline.schedules import Schedule
from tests.pipeline.runtime import graph_cases
from tests.pipeline.runtime.cuda.recording import Recorder, recording
from tests.pipeline.runtime.cuda.taken_back import taken_back as without
from tests.pipeline.runtime.relay import relay_cases
from tests.pipeline.runtime.stages.megatron import megatron_cases, megatron_relay_cases
from tests.pipeline.runtime.stages.megatron.megatron_model import (
    SEQUENCE,
    Case,
    evaluation_data,
    forward_step,
    parallel,
    training_data,
)
from tests.pipeline.runtime.stages.module import module_cases, reference
from tests.pipeline.runtime.stages.module.reference import Training


@dataclass
class Account:
    """The account of one rank. `threads`: name -> the streams that the thread gave operations to."""

    findings: list[tuple[str, str]]
    threads: dict[str, set[str]]
    losses: list[float]

    @property
    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.findings}


def _account(recorder: Recorder, reports: list[BatchReport]) -> Account:
    return Account(recorder.findings, dict(recorder.threads), [next(iter(each.losses.values())) for each in reports])


def _train(
    recorder: Recorder,
    engine: PipelineEngine,
    sizes: Iterable[tuple[int, int]],
    *,
    drains: Sequence[int] = (),
    drained: Callable[[], None] = lambda: None,
) -> list[BatchReport]:
    """Train batches of so many (microbatches, samples); behind each of `drains` the pipeline drains, and `drained` is
    called."""
    reports = []
    for batch, size in enumerate(sizes):
        with recorder.training():
            reports += engine.run_batch(*size)
        if batch in drains:
            with recorder.training():
                reports += engine.drain()
            drained()
    with recorder.training():
        reports += engine.drain()
    return reports


def sizes_of(case: Case) -> list[tuple[int, int]]:
    infos = (megatron_cases.batch_info(case, batch) for batch in range(len(case.batches)))
    return [(each.num_microbatches, each.num_samples) for each in infos]


def train_gpt(
    *, seed: int = 0, backend: str = "nccl", moves: bool = False, taken_back: str | None = None, **options
) -> Account:
    """Train a tiny GPT on this rank; `moves`: with balanced activations."""
    case = Case(**options)
    with recording(seed=seed, backend=backend) as recorder, parallel(case), without(taken_back):
        memory = ActivationMemory() if moves else None
        stages, update = megatron_cases.build(case, memory)
        for stage in stages:
            _mark(recorder, stage.model.parameters(), stage.model.buffers)
        _mark(recorder, update.optimizer.get_parameters())
        engine = megatron_cases.engine_of(case, stages, update, backend=backend, activation_memory=memory)

        def evaluate_and_reload() -> None:
            engine.evaluate(2)
            _reload(update)

        reports = _train(recorder, engine, sizes_of(case), drains=case.drains, drained=evaluate_and_reload)
        recorder.find_held(pooled=pooled(engine, memory))
        engine.close()
        update.close()
        return _account(recorder, reports)


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
) -> Account:
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
        engine, sizes = pipeline.engine, [(m, m * reference.MICROBATCH_SIZE) for m in training.batches]
        reports = _train(recorder, engine, sizes, drains=drains)
        recorder.find_held(pooled=pooled(engine, pipeline.memory))
        dist.barrier()
        pipeline.close()
        return _account(recorder, reports)


def train_graph(
    shape: graph_cases.Shape, batches: Sequence[int], *, seed: int = 0, taken_back: str | None = None, **options
) -> Account:
    """Stages of a graph, which may share a weight: see `graph_cases`."""
    with recording(seed=seed) as recorder, without(taken_back):
        built = graph_cases.build(shape, backend="nccl", **options)
        for stage in built.stages:
            _mark(recorder, stage.module.parameters())
        engine = built.engine
        reports = _train(recorder, engine, [(m, m * graph_cases.SAMPLES) for m in batches])
        engine.evaluate(2)
        recorder.find_held(pooled=pooled(engine, None))
        built.close()
        return _account(recorder, reports)


def train_relay(training: Training, *, seed: int = 0, taken_back: str | None = None, **options) -> Account:
    """The same modules from the host: see `relay_cases`."""
    with recording(seed=seed) as recorder, without(taken_back):
        relay = relay_cases.Relay(training, backend="nccl", **options)
        weights, gradients = relay.update.weights, relay.update.gradients
        _mark(recorder, [*weights._arena.values(), *weights._nan.values()])
        _mark(recorder, [flat for buffer in gradients._free for flat in buffer.values()])
        engine = relay.engine
        reports = _train(recorder, engine, [(m, m * reference.MICROBATCH_SIZE) for m in training.batches])
        recorder.find_held(pooled=pooled(engine, None))
        dist.barrier()
        relay.close()
        return _account(recorder, reports)


def train_gpt_relay(
    *, residency: Residency, gathers: bool = False, seed: int = 0, taken_back: str | None = None, **options
) -> Account:
    """A tiny GPT whose stages of a layer each come from the host."""
    case = Case(**options)
    num_stages = case.layers
    schedule = Schedule.preset(
        "l2l", num_stages=num_stages, num_virtual_stages=num_stages // case.p, residency=residency,
        tied_embeddings=case.tied, data_parallel=case.d * case.t > 1,
    )  # fmt: skip
    with recording(seed=seed) as recorder, parallel(case), without(taken_back):
        own = schedule.stages_of(parallel_state.get_pipeline_model_parallel_rank())
        chunks = megatron_relay_cases.chunks_of(case, num_stages, RelayChunk, own)
        optimizer = get_megatron_optimizer(megatron_cases.optimizer_config(case), chunks)
        update = MegatronRelayUpdate(
            chunks, optimizer, megatron_cases.scheduler(case, optimizer), stages=own, residency=residency,
            gathers=gathers,
        )  # fmt: skip
        replica = parallel_state.get_data_parallel_rank()
        stages = [
            MegatronStage(
                chunk, forward_step(case), update, index=index, num_stages=num_stages, seq_length=SEQUENCE,
                micro_batch_size=case.micro_batch_size, data_iterator=training_data(case, replica),
                evaluation_iterator=evaluation_data(case, replica), recompute=schedule.recomputes(index),
            )
            for index, chunk in zip(own, chunks, strict=True)
        ]  # fmt: skip
        _mark(recorder, [*update.resident._arena.values(), *update.resident._nan.values()])
        _mark(recorder, [flat for buffer in update.gradients._free for flat in buffer.values()])
        _mark(recorder, *(stage.model.buffers for stage in stages))
        ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        engine = PipelineEngine(schedule, stages, update, ranks=ranks, backend="nccl", ledger=update.ledger)
        reports = _train(recorder, engine, sizes_of(case), drains=case.drains, drained=lambda: engine.evaluate(2))
        recorder.find_held(pooled=pooled(engine, None))
        engine.close()
        update.close()
        return _account(recorder, reports)


def watch_overdue(*, taken_back: str | None = None) -> Account:
    """A thread asks what is overdue, as the guard's does, while receives are waited for."""
    with recording() as recorder:
        pipeline = module_cases.Pipeline("flush", Training(batches=(4, 4)), backend="nccl")
        stop = threading.Event()

        def ask() -> None:
            while not stop.wait(0.001):
                assert pipeline.engine._channels.check_overdue() is None

        with without(taken_back):
            watcher = threading.Thread(target=ask)
            watcher.start()
            reports = []
            for _ in range(2):
                with recorder.training():
                    reports += pipeline.engine.run_batch(4, 8)
            stop.set()
            watcher.join()
        reports += pipeline.engine.drain()
        dist.barrier()
        pipeline.close()
        return _account(recorder, reports)


def _reload(update: MegatronWeightUpdate) -> None:
    """What a resume loads, which brings the loss scale back to the device."""
    update.optimizer.load_state_dict(copy.deepcopy(update.optimizer.state_dict()))
    update.load_state_dict(update.state_dict())


def pooled(engine: PipelineEngine, memory: ActivationMemory | None) -> list[torch.Tensor]:
    """What links and the pool of moves keep for the next transfer."""
    links = [link for link, _ in engine._channels._links.values() if isinstance(link, NcclLink)]
    moved = [buffer.memory for buffer in memory.pool._buffers] if memory else []
    return [*moved, *(buffer for link in links for buffer in link._buffers)]


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
