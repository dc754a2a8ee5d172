"""What the ranks of the tests of frozen prefixes run, and one process that says what they must reproduce."""

import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.contract.trace import MOVES, Tracer
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.module.stage import ModuleStage
from megatron.pipeline.runtime.stages.module.update import FrozenUpdate, ModuleUpdate
from megatron.pipeline.runtime.update.versions import WeightVersions
from megatron.pipeline.schedules import Schedule
from tests.pipeline.runtime.stages.module import reference
from tests.pipeline.runtime.stages.module.module_cases import GRADIENT_BUFFERS, WINDOWS, Groups
from tests.pipeline.runtime.stages.module.reference import Training


@dataclass
class RankOutcome:
    """One rank's view of a run. `most_unread`: the most outputs that a frozen stage had unread at once. `moves`: those
    that it carried out. `num_buffers`: of those for them.
    """

    reports: list[BatchReport]
    parameters: dict[str, Tensor]
    evaluations: list[dict]
    peak_saved: dict[int, int]
    most_unread: int
    peak_saved_on_rank: int
    moves: list[str]
    num_buffers: int


def split(model: nn.Sequential, num_stages: int) -> list[nn.Sequential]:
    """Contiguous parts, as equal as they can be; the first ones are the larger ones."""
    borders = [-(-len(model) * stage // num_stages) for stage in range(num_stages + 1)]
    return [model[begin:end] for begin, end in pairwise(borders)]


def run(preset: str, training: Training, *, num_frozen: int, rank_of_stage: tuple[int, ...], recompute: bool = False,
        balance: bool = False, drains: tuple[int, ...] = (), slow: float = 0.0) -> RankOutcome:  # fmt: skip
    """Train; drain and evaluate behind the batches in `drains`. `slow`: seconds that the last stage sleeps in each
    forward.
    """
    groups = Groups(training)
    schedule = Schedule.preset(
        preset, num_stages=len(rank_of_stage), num_frozen=num_frozen, rank_of_stage=rank_of_stage,
        recompute=recompute, balance=balance, data_parallel=training.num_replicas > 1,
    )  # fmt: skip
    memory = ActivationMemory() if schedule.balance else None
    own, last = schedule.stages_of(groups.rank), schedule.num_stages - 1
    slices = split(reference.build_model(training.dropout), schedule.num_stages)
    parameters = {name: each for stage in own for name, each in slices[stage].named_parameters()}
    trained = {name: each for stage in own if stage >= num_frozen for name, each in slices[stage].named_parameters()}
    versions, spec = None, TensorSpec((reference.MICROBATCH_SIZE, reference.WIDTH))
    if trained:
        window = WINDOWS[schedule.weights.name](schedule.num_stages, own[-1])
        versions = WeightVersions(trained, window=window)
        optimizer = reference.make_optimizer(trained.values(), training)
        update = ModuleUpdate(
            trained, versions=versions, optimizer=optimizer, scheduler=reference.make_scheduler(optimizer, training),
            clip_grad=training.clip_grad, num_grad_buffers=GRADIENT_BUFFERS.get(schedule.weights.name, 2),
            data_parallel_group=groups.replicas, counts_in_norm=groups.replica == 0, job_group=groups.job,
        )  # fmt: skip
    else:
        update = FrozenUpdate(job_group=groups.job)

    def source(microbatch):
        return reference.data(microbatch.index, groups.replica)[0]

    def loss(output, microbatch):
        time.sleep(slow)
        return reference.loss_of(output, reference.data(microbatch.index, groups.replica)[1])

    stages = [
        ModuleStage(
            slices[stage], index=stage, num_stages=schedule.num_stages,
            versions=versions if stage >= num_frozen else None, source=source if stage == 0 else None,
            loss=loss if stage == last else None, input_spec=None if stage == 0 else spec,
            output_spec=None if stage == last else spec, recompute=schedule.recomputes(stage),
            input_needs_gradient=stage > num_frozen, activation_memory=memory if stage >= num_frozen else None,
        )
        for stage in own
    ]  # fmt: skip
    p = groups.num_ranks
    engine = PipelineEngine(
        schedule, stages, update, ranks=range(groups.replica * p, (groups.replica + 1) * p),
        timeout=timedelta(seconds=20), activation_memory=memory, tracer=Tracer(num_batches=len(training.batches)),
    )  # fmt: skip
    most_unread = _watch(engine)
    reports, evaluations = [], []
    for batch, num_microbatches in enumerate(training.batches):
        reports += engine.run_batch(num_microbatches, num_microbatches * reference.MICROBATCH_SIZE)
        if batch in drains:
            reports += engine.drain()
            update.show_newest()  # as a checkpoint does
            evaluations.append(engine.evaluate(3))
    reports += engine.drain()
    dist.barrier()
    newest = versions.newest_tensors() if versions is not None else {}
    final = {name: newest.get(name, each).detach().clone() for name, each in parameters.items()}
    assert memory is None or memory.current_bytes == 0
    moves = [str(span.instruction) for span in engine.trace().spans if span.track == MOVES]
    engine.close()
    groups.destroy()
    return RankOutcome(
        reports, final, evaluations, engine.saved.peaks, most_unread[0],
        engine.saved.peak_on_rank, moves, memory.pool.num_buffers if memory else 0,
    )  # fmt: skip


def _watch(engine: PipelineEngine) -> list[int]:
    """The most sends that were unread right behind one, kept up to date."""
    channels, most = engine._channels, [0]
    post_send = channels.post_send

    def counted(*arguments, **options):
        post_send(*arguments, **options)
        most[0] = max(most[0], channels.num_unread_sends())

    channels.post_send = counted
    return most


def reference_with_frozen(training: Training, *, delay: int, num_stages: int, num_frozen: int) -> reference.Outcome:
    """Plain torch on one process: the parameters of the prefix need no gradient, and it is in eval mode."""
    model = reference.build_model(training.dropout)
    slices = split(model, num_stages)
    prefix = [each for stage in range(num_frozen) for each in slices[stage].parameters()]
    for each in prefix:
        each.requires_grad_(False)
    for stage in range(num_frozen):
        slices[stage].eval()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = reference.make_optimizer(trained.values(), training)
    scheduler = reference.make_scheduler(optimizer, training)
    outcome, first = reference.Outcome(), 0
    versions = [{name: each.detach().clone() for name, each in trained.items()}]

    def show(version):
        with torch.no_grad():
            for name, each in trained.items():
                each.copy_(versions[version][name])

    for batch, num_microbatches in enumerate(training.batches):
        show(max(batch - delay, 0))
        optimizer.zero_grad()
        total = 0.0
        for replica in range(training.num_replicas):
            for index in range(first, first + num_microbatches):
                inputs, targets = reference.data(index, replica)
                loss = reference.loss_of(model(inputs), targets)
                (loss / num_microbatches / training.num_replicas).backward()
                total += loss.item()
        first += num_microbatches
        outcome.losses.append(total / num_microbatches / training.num_replicas)
        norm = torch.nn.utils.get_total_norm([each.grad for each in trained.values()])
        outcome.grad_norms.append(norm.item())
        show(batch)
        if training.clip_grad:
            torch.nn.utils.clip_grads_with_norm_(trained.values(), training.clip_grad, norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        versions.append({name: each.detach().clone() for name, each in trained.items()})
    outcome.parameters = dict(model.named_parameters()) | versions[-1]
    return outcome
