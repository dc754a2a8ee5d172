"""The part of the pipeline that runs on this rank: its stages with their tensors, their optimizers, and the engine.

`megatron.pipeline.Pipeline` is not used here. It splits a batch of tensors into a fixed number of microbatches, and a
trial run tells it which tensors travel between stages. In fine-tuning, the captured graph says which tensors travel,
including shared parameters; an epoch may end with a shorter batch; and optimizers may step FP32 masters. Weight
versions, updates and the engine are the same as the library's.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron import backend
from megatron.capture.cut import CapturedStage, StageData, cut
from megatron.capture.randomness import mixed
from megatron.capture.statistics import counted_in
from megatron.capture.tensors import load_stage
from megatron.finetuning.adapters import AdapterTensors
from megatron.finetuning.arguments import has_masters
from megatron.finetuning.data.batches import Feed
from megatron.finetuning.data.lengths import Widths
from megatron.finetuning.optimizers import make_optimizer, make_scheduler
from megatron.finetuning.plan import RunPlan
from megatron.finetuning.pretrained import Pretrained
from megatron.finetuning.relay import relay_update
from megatron.pipeline.library.ranks import Groups, Ranks
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.runtime.contract.stage import BatchInfo, Microbatch
from megatron.pipeline.runtime.contract.tensors import EdgeTensors, TensorSpec
from megatron.pipeline.runtime.contract.trace import Tracer
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.failure.agreement import agreed
from megatron.pipeline.runtime.stages.module.graph_stage import GraphModuleStage
from megatron.pipeline.runtime.stages.module.rank_update import TOGETHER, make_updates, make_versions, steps_of
from megatron.pipeline.runtime.stages.module.update import FrozenUpdate, ModuleUpdate
from megatron.pipeline.runtime.update.loss_scales import DynamicScaler, LossScales
from megatron.pipeline.runtime.update.optimizer_wrappers import GapAware, GapAwareMasters, MasterWeights
from megatron.pipeline.runtime.update.versions import WeightVersions
from megatron.pipeline.schedules import PipelineSchedule, Schedule

Summary = Callable[[str, Tensor, Mapping[str, Tensor]], Tensor]
"""(name of a kept output, the output, tensors of the microbatch) -> the part of the output that metrics need."""


class Results:
    """The losses and output summaries of this rank's stages in an evaluation, by the numbers of microbatches.

    Attributes:
        summary: makes the summaries.
    """

    def __init__(self, summary: Summary) -> None:
        self.summary = summary
        self._losses: dict[int, Tensor] = {}
        self._kept: dict[str, dict[int, Tensor]] = {}

    def note(self, data: StageData, loss: Tensor | None, kept: Mapping[str, Tensor]) -> None:
        """Add the results of one microbatch at one stage: its loss, if the stage has it, and the outputs to keep."""
        if loss is not None:
            self._losses[data.draw.sample] = loss.detach()
        for name, tensor in kept.items():
            self._kept.setdefault(name, {})[data.draw.sample] = self.summary(name, tensor, data.tensors).cpu()

    def take(self) -> tuple[dict[int, float], dict[str, dict[int, Tensor]]]:
        """Return the losses, and by name the summaries, and clear the collection."""
        losses, kept = {number: loss.item() for number, loss in self._losses.items()}, self._kept
        self._losses, self._kept = {}, {}
        return losses, kept


class StageModule(nn.Module):
    """A captured stage in the form that `GraphModuleStage` calls; the loss is multiplied by the microbatch's weight."""

    def __init__(self, stage: CapturedStage, results: Results) -> None:
        super().__init__()
        self.stage = stage
        self._results = results

    def forward(
        self, data: StageData, inputs: Mapping[int, tuple[Tensor, ...]]
    ) -> tuple[dict[int, tuple[Tensor, ...]], Tensor | None]:
        outputs, loss, kept = self.stage.run(data, inputs)
        if not self.training:
            self._results.note(data, loss, kept)
        return outputs, None if loss is None else loss * data.weight

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """The trained parameters of the stage, by their names in the model."""
        return {name: parameter for name, parameter in self.stage.named_parameters() if parameter.requires_grad}


class FrozenRank(FrozenUpdate):
    """The update of a rank whose parameters are all frozen.

    Its reports equal the reports of the other ranks, since this may be the first rank, which writes the log.

    Args:
        versions, optimizer: versions and optimizer of no parameters, so that checkpoints of all ranks have one form.
        scheduler: the scheduler of `optimizer`. It keeps stepping, so layers that train again have the right learning
            rate.
        num_replicas: replicas of the pipeline.
        options: arguments of `FrozenUpdate`.
    """

    scales = None

    def __init__(
        self, *, versions: WeightVersions, optimizer: torch.optim.Optimizer, scheduler: Any, num_replicas: int,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        self.versions, self.optimizer, self.scheduler = versions, optimizer, scheduler
        self._num_replicas = num_replicas
        self._sizes: dict[int, int] = {}

    def begin_batch(self, info: BatchInfo) -> None:
        super().begin_batch(info)
        self._sizes[info.index + 1] = info.num_microbatches

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        report, size = self._reports.pop(version), self._sizes.pop(version)
        count = self._reduction.reduce_norm(report, 0.0, stop_requests, losses) / self._num_replicas
        report.grad_norm /= count / size or 1.0
        report.learning_rate = self.optimizer.param_groups[0]["lr"]
        report.skipped = report.overflow or not count
        if not report.skipped:
            self.scheduler.step()


@dataclass
class BuiltPipeline:
    """The pipeline on this rank.

    Attributes:
        engine: runs the program; None while the ranks of the job change, and in a process that is not in the job yet.
        schedule: that of a replica while no rank is lost.
        place: the rank of this rank's stages in a replica of all its ranks.
        is_first: whether this rank is the first with its stages, which it writes.
        stages: the stages of `modules` as the engine calls them.
        update: the weight update of this rank.
        modules, versions: by stage; stages that step together share one `WeightVersions`.
        updates: by the stage that steps, or -1 if all stages of the rank step together.
        exact: with --bf16 or --fp16, the FP32 value of each floating-point tensor by its name: masters and untrained
            tensors.
        ranks, groups: the ranks of all pipelines, and their process groups. Where ranks were lost, all ranks that are
            left are one pipeline.
        engine_options: arguments of the engine that do not depend on the program.
        num_traced: the number of the last batches that the engine traces.
    """

    engine: PipelineEngine | None
    schedule: Schedule
    place: int
    is_first: bool
    stages: list[GraphModuleStage]
    update: Any
    modules: dict[int, StageModule]
    versions: dict[int, WeightVersions]
    updates: dict[int, ModuleUpdate | FrozenRank]
    feed: Feed
    results: Results
    exact: dict[str, Tensor]
    ranks: Ranks
    groups: Groups
    engine_options: Mapping[str, Any]
    num_traced: int

    def begin(self, program: PipelineSchedule, *, first_batch: int, first_microbatch: int) -> None:
        """Make the engine that runs a program on the ranks of this rank's pipeline. Collective over them."""
        for stage, number in zip(self.stages, program.stages_of(self.ranks.rank), strict=True):
            stage.recompute_from_now(program.recomputes(number), keeps=program.keeps(number))
        self.engine = PipelineEngine(
            program, self.stages, self.update, ranks=self.ranks.pipeline, first_batch=first_batch,
            first_microbatch=first_microbatch, tracer=Tracer(num_batches=self.num_traced) if self.num_traced else None,
            **self.engine_options,
        )  # fmt: skip

    def statistics(self) -> dict[int, dict[str, Tensor]]:
        """Stage -> name -> statistic of batch norm, of which each forward in training counts a microbatch."""
        return {
            index: {name: module.stage.get_buffer(name) for name in sorted(counted_in(module.stage.graph))}
            for index, module in self.modules.items()
        }

    def load_statistics(self, found: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take over the result of `statistics` of this rank, or of another rank with these stages."""
        for index, own in self.statistics().items():
            for name, statistic in own.items():
                statistic.copy_(found[index][name])


def build_pipeline(
    plan: RunPlan,
    args: argparse.Namespace,
    *,
    feed: Feed,
    summary: Summary,
    pretrained: Pretrained | AdapterTensors,
    ranks: Ranks,
    num_steps: int,
    first_batch: int = 0,
    first_microbatch: int = 0,
    groups: Groups | None = None,
    observe: Callable[[Mapping[str, Tensor]], None] | None = None,
    is_alone: bool = False,
) -> BuiltPipeline:
    """Cut this rank's stages, load their tensors and connect the ranks; a new head is initialised at random.

    Args:
        groups: the groups of an earlier pipeline, which was closed; None: new ones.
        observe: as for `ModuleUpdate`; where weights live on the host, it gets norms for gradients.
        is_alone: this process is alone in its process group, and joins the job of `ranks` later: there is no engine.

    Collective: every rank must call it. Raises ValueError if tensors cannot be read.
    """
    device, schedule, results = backend.device(), plan.schedule, Results(summary)
    relays, timeout = schedule.residency is not None, timedelta(minutes=args.distributed_timeout_minutes)
    groups = groups or Groups(Ranks(((0,),), 0) if is_alone else ranks, timeout)
    stages = cut(
        plan.captured, plan.stage_of_operator, chain=relays, device=device, only=schedule.stages_of(ranks.rank)
    )
    modules = {index: StageModule(stage, results) for index, stage in stages.items()}
    initial = initial_tensors(args, plan, pretrained)
    load = partial(load_stage, folder=pretrained.folder, read=pretrained.read, initial=initial)
    exact: dict[str, Tensor] = {}
    common = {
        "clip_grad": args.max_grad_norm, "data_parallel_group": groups.replicas, "observe": observe,
        "job_group": groups.reductions, "counts_in_norm": ranks.replica == 0, "device": device,
    }  # fmt: skip
    scales = None
    if relays:
        update = relay_update(
            plan, args, modules, load=load, exact=exact, ranks=ranks, groups=groups, num_steps=num_steps,
            first_version=first_batch, **common,
        )  # fmt: skip
        updates, versions = {TOGETHER: update}, dict.fromkeys(modules, update.versions)
        shown = {index: update.weights.of_stage(index) for index in modules}
    else:
        frozen: dict[str, nn.Parameter] = {}
        with agreed():  # each rank reads its own tensors
            for stage in stages.values():
                load(stage, device=device, exact=exact if has_masters(args) else None)
                _share_frozen(stage, frozen)
                stage.to(device)
        scales = _loss_scales(args, schedule.weights)
        update, updates, versions = _updates(
            plan, args, modules, exact, feed=feed, scales=scales, num_replicas=len(ranks.pipelines),
            num_steps=num_steps, first_version=first_batch, common=common,
        )  # fmt: skip
        shown = versions
    runs = [
        GraphModuleStage(
            module, index=index, graph=schedule.graph, edges=edges_of_stage(plan, module.stage),
            edges_at=edges_by_microbatch(plan, module.stage, feed), versions=shown[index], data=feed,
            has_loss=module.stage.has_loss, recompute=schedule.recomputes(index), device=device,
            loss_scale=(lambda batch: 1.0) if scales is None else scales.of_batch,
        )
        for index, module in modules.items()
    ]  # fmt: skip
    options = {
        "timeout": timeout, "backend": args.distributed_backend, "device": device,
        "ledger": update.ledger if relays else None,
    }  # fmt: skip
    built = BuiltPipeline(
        None, schedule, ranks.rank, ranks.replica == 0, runs, update, modules, versions, updates, feed, results, exact,
        ranks, groups, options, 4 * args.pipeline_timeline_iterations if args.pipeline_timeline else 0,
    )  # fmt: skip
    if not is_alone:
        built.begin(schedule, first_batch=first_batch, first_microbatch=first_microbatch)
    return built


def _updates(
    plan: RunPlan, args: argparse.Namespace, modules: Mapping[int, StageModule], exact: Mapping[str, Tensor], *,
    feed: Feed, scales: LossScales | None, num_replicas: int, num_steps: int, first_version: int,
    common: Mapping[str, Any],
) -> tuple[Any, dict[int, ModuleUpdate | FrozenRank], dict[int, WeightVersions]]:  # fmt: skip
    """The weight update of a rank whose weights are on the device, its parts and the versions, as `BuiltPipeline` has
    them. `common`: further arguments of updates."""
    schedule = plan.schedule
    weights, graph = schedule.weights, schedule.graph
    of_stage = {index: module.parameters_by_name() for index, module in modules.items()}
    versions = make_versions(weights, of_stage, num_stages=schedule.num_stages, first_version=first_version)

    def stepping(key: int, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        masters = {name: nn.Parameter(exact[name]) for name in parameters} if has_masters(args) else {}
        optimizer = make_optimizer(masters or parameters, args, decays=plan.decays)
        scheduler = make_scheduler(optimizer, args, num_steps=num_steps)
        if has_masters(args):
            optimizer = MasterWeights(optimizer, {masters[name]: weight for name, weight in parameters.items()})
        if args.gap_aware and key != TOGETHER and graph.depth(key):
            optimizer = (GapAwareMasters if has_masters(args) else GapAware)(optimizer)
        return {"optimizer": optimizer, "scheduler": scheduler}

    steps = steps_of(weights, of_stage)
    made = {key: stepping(key, own) for key, own in steps.items()}
    if not all(map(graph.is_forward_only, modules)):
        made_updates = make_updates(steps, versions, made, weights=weights, counts=feed.counts, scales=scales, **common)
        return *made_updates, versions
    (own,) = set(versions.values())
    options = {name: common[name] for name in ("job_group", "counts_in_norm", "device")}
    update = FrozenRank(versions=own, **made[TOGETHER], num_replicas=num_replicas, **options)
    return update, {TOGETHER: update}, versions


def _loss_scales(args: argparse.Namespace, weights: WeightPolicy) -> LossScales | None:
    """The loss scales of --fp16, which change alike on all ranks; None without it."""
    if not args.fp16:
        return None
    scaler = DynamicScaler(
        args.initial_loss_scale, args.loss_scale_growth, args.loss_scale_backoff, args.loss_scale_window,
        args.min_loss_scale,
    )  # fmt: skip
    return LossScales(scaler, delay=weights.delay + 1)


def _share_frozen(stage: CapturedStage, frozen: dict[str, nn.Parameter]) -> None:
    """Give a stage the frozen parameters that an earlier stage of this rank has already; `frozen`: these by name."""
    for name, parameter in list(stage.named_parameters()):
        if not parameter.requires_grad:
            path, _, last = name.rpartition(".")
            stage.get_submodule(path)._parameters[last] = frozen.setdefault(name, parameter)


def edges_of_stage(plan: RunPlan, stage: CapturedStage, widths: Widths | None = None) -> dict[int, EdgeTensors]:
    """The other stage -> the tensors that a microbatch sends between it and `stage`.

    `widths`: the tokens to which the microbatch is padded; None: the most.
    """
    sizes = plan.sizes_at(widths)
    return {
        other: EdgeTensors(
            [TensorSpec(tensor.shape_at(sizes), tensor.dtype) for tensor in tensors],
            [tensor.owner for tensor in tensors],
            [tensor.has_gradient for tensor in tensors],
        )
        for other, tensors in (*stage.sources.items(), *stage.targets.items())
    }


def edges_by_microbatch(
    plan: RunPlan, stage: CapturedStage, feed: Feed
) -> Callable[[Microbatch], Mapping[int, EdgeTensors]] | None:
    """Microbatch -> `edges_of_stage`; None if all microbatches have one shape."""
    if plan.lengths is None:
        return None
    at = cache(lambda widths: edges_of_stage(plan, stage, widths))
    return lambda microbatch: at(feed.widths(microbatch))


def initial_tensors(
    args: argparse.Namespace, plan: RunPlan, source: Pretrained | AdapterTensors
) -> Callable[..., Tensor]:
    """A function that initialises a tensor that the files lack: of an adapter, or of a new head, whose weights begin as
    the configuration says and biases at 0.

    The values depend on the seed and the tensor's name, so they are the same for every partition of the model.
    """

    def make(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if len(shape) < 2:
            return torch.full(shape, float("norm" in name.lower() and name.endswith("weight")), dtype=dtype)
        generator = torch.Generator().manual_seed(mixed(args.seed, zlib.crc32(name.encode())))
        return torch.empty(shape).normal_(0.0, plan.initializer_range, generator=generator).to(dtype)

    return source.initial(make) if isinstance(source, AdapterTensors) else make
