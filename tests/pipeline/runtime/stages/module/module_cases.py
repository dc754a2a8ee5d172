"""What the ranks of the module pipeline tests run, in the processes of `tests.workers`."""

import copy
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.contract import trace
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.contract.trace import CudaClock, Tracer
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.relay.resident_weights import StageWeights
from megatron.pipeline.runtime.stages.module.reduction import TiedParameter
from megatron.pipeline.runtime.stages.module.stage import ModuleStage
from megatron.pipeline.runtime.stages.module.update import ModuleUpdate
from megatron.pipeline.runtime.update.versions import WeightVersions
from megatron.pipeline.runtime.update.weight_prediction import PredictedVersions
from megatron.pipeline.schedules import Schedule
from tests.pipeline.runtime.stages.module import provisional_reference, reference
from tests.pipeline.runtime.stages.module.reference import Training


@dataclass
class RankOutcome:
    """One rank's view of a run."""

    reports: list[BatchReport]
    parameters: dict[str, Tensor]  # newest version, by name in the whole model
    peak_saved: dict[int, int]  # by stage
    peak_versions: int
    num_slots: int
    num_unread_sends: int
    num_saved_at_end: int
    evaluations: list[dict] = field(default_factory=list)
    executed: list[list[str]] = field(default_factory=list)  # instructions of the compute and the chain track
    traces: list[trace.RankTrace] | None = None
    predictions: list[dict[str, Tensor]] = field(default_factory=list)  # after each drain


WINDOWS = {
    "flush": lambda p, s: 1,
    "2bw": lambda p, s: 2,
    "3bw": lambda p, s: 3,
    "4bw": lambda p, s: 4,
    "stash": lambda p, s: p - s,
}
GRADIENT_BUFFERS = {"flush": 1, "3bw": 3, "4bw": 4}  # others: 2


def make_stage(
    schedule: Schedule,
    training: Training,
    module: torch.nn.Module,
    versions: WeightVersions | StageWeights,
    *,
    stage: int,
    replica: int,
    device: torch.device,
    activation_memory: ActivationMemory | None = None,
) -> ModuleStage:
    """A stage that runs its slice of the reference model."""
    p = schedule.num_stages
    spec = TensorSpec((reference.MICROBATCH_SIZE, reference.WIDTH))

    def source(microbatch):
        poisoned = microbatch.index == training.poisoned_microbatch
        return reference.data(microbatch.index, replica, poisoned=poisoned)[0].to(device)

    def loss(output, microbatch):
        targets = reference.data(microbatch.index, replica)[1].to(device)
        return (reference.sum_of if training.sums else reference.loss_of)(output, targets)

    return ModuleStage(
        module,
        index=stage,
        num_stages=p,
        versions=versions,
        source=source if stage == 0 else None,
        loss=loss if stage == p - 1 else None,
        input_spec=None if stage == 0 else spec,
        output_spec=None if stage == p - 1 else spec,
        recompute=schedule.recomputes(stage),
        device=device,
        activation_memory=activation_memory,
    )


class Groups:
    """Where this rank stands, and the groups that it is in; replicas are blocks of p successive ranks.

    `num_ranks`: p; `rank`: in the pipeline. `replicas`: the group of the same rank of all replicas, None with one.
    """

    def __init__(self, training: Training) -> None:
        world = dist.get_world_size()
        p = self.num_ranks = world // training.num_replicas
        self.replica, self.rank = divmod(dist.get_rank(), p)
        self.groups = []
        self.job = self._group(range(world))
        several = [self._group(range(s, world, p)) for s in range(p)] if training.num_replicas > 1 else None
        self.replicas = several[self.rank] if several else None

    def tied(self, schedule: Schedule, parameters: Mapping[str, Tensor]) -> TiedParameter | None:
        """The tied weights of `reference` that are on this rank. Every rank calls it."""
        p, ends = self.num_ranks, sorted({schedule.rank_of_stage[0], schedule.rank_of_stage[-1]})
        groups = [self._group([first + end for end in ends]) for first in range(0, dist.get_world_size(), p)]
        names = tuple(name for name in (reference.FIRST_WEIGHT, reference.LAST_WEIGHT) if name in parameters)
        if not names:
            return None
        is_first = reference.FIRST_WEIGHT in names
        return TiedParameter(names, groups[self.replica] if len(ends) > 1 else None, counts_in_norm=is_first)

    def _group(self, ranks):
        group = dist.new_group(list(ranks))
        self.groups.append(group)
        return group

    def destroy(self) -> None:
        for group in self.groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


def modules_of(schedule: Schedule, training: Training, rank: int) -> dict[int, torch.nn.Module]:
    """stage -> its slice of the reference model, for the stages of a rank; a tied weight of its own for the last."""
    model = reference.build_model(training.dropout, tied=training.tied, same_dropout=training.same_dropout)
    slices = reference.split(model, schedule.num_stages)
    slices[-1] = copy.deepcopy(slices[-1])
    return {stage: slices[stage] for stage in schedule.stages_of(rank)}


class Pipeline(Groups):
    """Engine, stages and update of this rank. `stage` is the lowest."""

    def __init__(
        self,
        preset: str,
        training: Training,
        *,
        tracing: bool = False,
        timeout: timedelta = timedelta(seconds=20),
        device: str = "cpu",
        backend: str = "gloo",
        num_virtual_stages: int = 1,
        moves_activations: bool = False,
        **schedule_options,
    ) -> None:
        super().__init__(training)
        p = self.num_ranks
        self.schedule = Schedule.preset(
            preset,
            num_stages=p * num_virtual_stages,
            num_virtual_stages=num_virtual_stages,
            data_parallel=training.num_replicas > 1,
            tied_embeddings=training.tied,
            **schedule_options,
        )
        self.num_stages = self.schedule.num_stages
        self.memory = ActivationMemory(device) if moves_activations else None
        modules = modules_of(self.schedule, training, self.rank)
        modules = {stage: module.to(device) for stage, module in modules.items()}
        parameters = {name: each for module in modules.values() for name, each in module.named_parameters()}
        if self.schedule.weights.predicts:
            versions = PredictedVersions(parameters)
        else:
            versions = WeightVersions(parameters, window=WINDOWS[self.schedule.weights.name](p, min(modules)))
        self.stages = [
            make_stage(
                self.schedule,
                training,
                module,
                versions,
                stage=stage,
                replica=self.replica,
                device=torch.device(device),
                activation_memory=self.memory,
            )
            for stage, module in modules.items()
        ]
        self.stage = self.stages[0]
        optimizer = reference.make_optimizer(parameters.values(), training)
        self.update = ModuleUpdate(
            parameters,
            versions=versions,
            optimizer=optimizer,
            scheduler=reference.make_scheduler(optimizer, training),
            clip_grad=training.clip_grad,
            num_grad_buffers=GRADIENT_BUFFERS.get(self.schedule.weights.name, 2),
            data_parallel_group=self.replicas,
            counts_in_norm=self.replica == 0,
            job_group=self.job,
            tied=self.tied(self.schedule, parameters) if training.tied else None,
            reduce_partial=self.schedule.reduce_partial,
            provisional_microbatches=self.schedule.provisional_microbatches,
            device=device,
        )
        if training.sums:
            self.update.mean_count = provisional_reference.EXPECTED
        self.engine = PipelineEngine(
            self.schedule,
            self.stages,
            self.update,
            ranks=range(self.replica * p, (self.replica + 1) * p),
            timeout=timeout,
            backend=backend,
            device=device,
            tracer=Tracer(num_batches=64, clock=None if device == "cpu" else CudaClock()) if tracing else None,
            activation_memory=self.memory,
        )

    def close(self) -> None:
        self.engine.close()
        self.destroy()


def run(preset: str, training: Training, *, drains: tuple[int, ...] = (), evaluate: int = 0, tracing: bool = False,
        look_at_predictions: bool = False, **schedule_options) -> RankOutcome:  # fmt: skip
    """Train; after each batch in `drains` drain the pipeline, and evaluate on `evaluate` microbatches if not 0."""
    pipeline = Pipeline(preset, training, tracing=tracing, **schedule_options)
    engine, reports, evaluations, predictions = pipeline.engine, [], [], []
    versions = pipeline.update.versions
    for batch, num_microbatches in enumerate(training.batches):
        reports += engine.run_batch(num_microbatches, num_microbatches * reference.MICROBATCH_SIZE)
        if batch in drains:
            reports += engine.drain()
            if look_at_predictions:
                predictions.append({name: each.clone() for name, each in versions.tensors(versions.newest).items()})
            if evaluate:
                evaluations.append(engine.evaluate(evaluate))
    reports += engine.drain()
    dist.barrier()
    pipeline.close()
    return RankOutcome(
        reports=reports,
        parameters={name: tensor.cpu().clone() for name, tensor in versions.newest_tensors().items()},
        peak_saved=engine.saved.peaks,
        peak_versions=versions.peak_live,
        num_slots=versions.num_slots,
        num_unread_sends=engine.num_unread_sends(),
        num_saved_at_end=sum(len(stage.activations) for stage in pipeline.stages),
        evaluations=evaluations,
        executed=[[str(span.instruction) for span in engine.trace().spans if span.track == track]
                  for track in ("compute", "chain")] if tracing else [],
        traces=trace.gather_traces(engine.trace()) if tracing else None,
        predictions=predictions,
    )  # fmt: skip


def hold_of_a_sent_output() -> tuple[bool, bool]:
    """On rank 0: whether the storage of a sent output is alive while nobody has read it, and after it was read."""
    pipeline = Pipeline("flush", Training(batches=(2,)))
    rank, executor = dist.get_rank(), pipeline.engine._executor
    executor.add_batch(BatchInfo(0, 2, 2), 0)
    if rank == 0:
        pipeline.stage.module.append(torch.nn.Linear(reference.WIDTH, reference.WIDTH))  # does not save its output
        storage = []
        forward = pipeline.stage.forward

        def remember(microbatch, input):
            output = forward(microbatch, input)
            storage.append(StorageWeakRef(output.untyped_storage()))
            return output

        pipeline.stage.forward = remember
        executor.run([Instruction.parse(text) for text in ("0F0@0", "0SEND_F0")])
        before = not storage[0].expired()
        dist.barrier()
        executor.run([Instruction.parse(text) for text in ("0RECV_B0", "0B0@0")])
        deadline = time.monotonic() + 10.0
        while not storage[0].expired() and time.monotonic() < deadline:
            time.sleep(0.01)  # the link's thread drops it
        after = not storage[0].expired()
        result = before, after
    else:
        dist.barrier()
        executor.run([Instruction.parse(text) for text in ("1RECV_F0", "1F0@0", "1B0@0", "1SEND_B0")])
        result = None
    dist.barrier()
    pipeline.close()
    return result


def stop_requests_by_batch(num_batches: int, stop_request_at: int) -> list[int]:
    """Each rank sets a bit of its own before batch `stop_request_at`; the stop requests that the reports bring."""
    pipeline = Pipeline("2bw", Training(batches=(2,) * num_batches))
    reports = []
    for batch in range(num_batches):
        if batch == stop_request_at:
            pipeline.engine.stop_requests |= 1 << 2 * dist.get_rank()
        reports += pipeline.engine.run_batch(2, 2)
    reports += pipeline.engine.drain()
    dist.barrier()
    pipeline.close()
    return [report.stop_requests for report in reports]


def message_of_unknown_instruction() -> str:
    pipeline = Pipeline("flush", Training(batches=(1,)))
    executor = pipeline.engine._executor
    executor.add_batch(BatchInfo(0, 1, 1), 0)
    try:
        executor.run([Instruction.parse(text) for text in ("0F0@0", "0EVICT1")])
        message = "ran"
    except NotImplementedError as error:
        message = f"{error}; executed before it: {len(pipeline.stage.activations)}"
    pipeline.close()
    return message


def reports_with_a_late_norm(num_batches: int) -> list[int]:
    """PipeDream with two replicas, where the first norm waits for the second step; the batches that were reported."""
    pipeline = Pipeline("pipedream", Training(batches=(1,) * num_batches, num_replicas=2))
    update, stepped = pipeline.update, threading.Event()
    step, reduce_norm = update.step, update.reduce_norm

    def announced_step(version):
        report = step(version)
        if version == 2:
            stepped.set()
        return report

    def late_reduce_norm(version, stop_requests, losses):
        if version == 1 and not stepped.wait(20):
            raise TimeoutError("the second step waits for the first norm")
        reduce_norm(version, stop_requests, losses)

    update.step, update.reduce_norm = announced_step, late_reduce_norm
    reports = [report for _ in range(num_batches) for report in pipeline.engine.run_batch(1, 1)]
    reports += pipeline.engine.drain()
    dist.barrier()
    pipeline.close()
    return [report.batch for report in reports]


def run_on_cuda(preset: str, training: Training, backend: str) -> RankOutcome:
    """`run`, traced, each rank on a GPU of its own over NCCL, or all on the first one over gloo."""
    device = f"cuda:{dist.get_rank() if backend == 'nccl' else 0}"
    torch.cuda.set_device(device)
    return run(preset, training, drains=(2,), evaluate=2, tracing=True, device=device, backend=backend)
