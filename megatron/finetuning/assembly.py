"""What runs on this rank: its stages with their tensors, the updates of their weights, and the engine."""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from megatron import backend
from megatron.capture.cut import cut
from megatron.capture.randomness import mixed
from megatron.capture.stage import CapturedStage, EdgeTensor
from megatron.capture.tensors import load_stage
from megatron.finetuning.feed import Feed
from megatron.finetuning.optimizers import make_optimizer, make_scheduler
from megatron.finetuning.plan import RunPlan
from megatron.finetuning.pretrained import Pretrained
from megatron.finetuning.stage_module import Results, StageModule, Summary
from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.contract.trace import Tracer
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.failure.agreement import agreed
from megatron.pipeline.runtime.stages.module.graph_stage import GraphModuleStage
from megatron.pipeline.runtime.stages.module.rank_update import make_updates, make_versions, steps_of
from megatron.pipeline.runtime.stages.module.update import ModuleUpdate
from megatron.pipeline.runtime.transport.edge_tensors import EdgeTensors
from megatron.pipeline.runtime.update.gap_aware import GapAware
from megatron.pipeline.runtime.update.master_weights import GapAwareMasters, MasterWeights
from megatron.pipeline.runtime.update.versions import WeightVersions


@dataclass
class BuiltPipeline:
    """This rank's part. `modules`, `versions`: by stage; stages that step together share versions. `updates`: those
    that step, by the stage or, where the rank steps as one, under -1. `exact`: with --bf16, the FP32 value of each
    floating tensor by its name: masters, and what is not trained.
    """

    engine: PipelineEngine
    modules: dict[int, StageModule]
    versions: dict[int, WeightVersions]
    updates: dict[int, ModuleUpdate]
    feed: Feed
    results: Results
    exact: dict[str, Tensor]


def build_pipeline(
    plan: RunPlan,
    args: argparse.Namespace,
    *,
    feed: Feed,
    summary: Summary,
    pretrained: Pretrained,
    num_steps: int,
    first_batch: int = 0,
    first_microbatch: int = 0,
) -> BuiltPipeline:
    """Cut this rank's stages, load their tensors and connect the ranks; a new head begins at random. Collective.

    Raises ValueError where tensors cannot be read.
    """
    rank, device = torch.distributed.get_rank(), backend.device()
    own = plan.schedule.stages_of(rank)
    results = Results(summary)
    cut_stages = cut(plan.captured, plan.stage_of_operator, device=device, only=own)
    exact: dict[str, Tensor] = {}
    modules = {}
    with agreed():  # each rank reads its own tensors
        for index, stage in cut_stages.items():
            load_stage(
                stage, pretrained.folder, device=device, read=pretrained.read, initial=_initial(args, plan),
                exact=exact if args.bf16 else None,
            )  # fmt: skip
            modules[index] = StageModule(stage.to(device), results)
    of_stage = {index: module.parameters_by_name() for index, module in modules.items()}
    versions = make_versions(
        plan.schedule.weights, of_stage, num_stages=plan.schedule.num_stages, first_version=first_batch
    )
    stages = [
        GraphModuleStage(
            modules[index], index=index, graph=plan.schedule.graph, edges=_edges(plan, cut_stages[index]),
            versions=versions[index], data=feed, has_loss=cut_stages[index].has_loss,
            recompute=plan.schedule.recomputes(index), device=device,
        )
        for index in own
    ]  # fmt: skip
    job = torch.distributed.new_group(list(range(torch.distributed.get_world_size())))
    update, updates = _updates(plan, args, of_stage, versions, exact, num_steps, job, device, feed.counts)
    tracer = Tracer(num_batches=4 * args.pipeline_timeline_iterations) if args.pipeline_timeline else None
    engine = PipelineEngine(
        plan.schedule, stages, update, timeout=timedelta(minutes=args.distributed_timeout_minutes),
        backend=args.distributed_backend, device=device, tracer=tracer, first_batch=first_batch,
        first_microbatch=first_microbatch,
    )  # fmt: skip
    return BuiltPipeline(engine, modules, versions, updates, feed, results, exact)


def _updates(plan: RunPlan, args, of_stage, versions, exact, num_steps, job, device, counts):
    """(what the engine takes, the updates that step)."""

    def stepping(parameters: Mapping[str, torch.nn.Parameter], depth: int) -> dict:
        masters = {name: torch.nn.Parameter(exact[name]) for name in parameters} if args.bf16 else {}
        optimizer = make_optimizer(masters or parameters, args, decays=plan.decays)
        scheduler = make_scheduler(optimizer, args, num_steps=num_steps)
        is_aware = args.gap_aware and depth
        if args.bf16:
            wrapped = MasterWeights(optimizer, {masters[name]: each for name, each in parameters.items()})
            return {"optimizer": GapAwareMasters(wrapped) if is_aware else wrapped, "scheduler": scheduler}
        return {"optimizer": GapAware(optimizer) if is_aware else optimizer, "scheduler": scheduler}

    weights = plan.schedule.weights
    steps, graph = steps_of(weights, of_stage), plan.schedule.graph
    made = {key: stepping(own, graph.depth(key) if weights.refreshes else 0) for key, own in steps.items()}
    options = {} if weights.refreshes else {"clip_grad": args.max_grad_norm}
    return make_updates(
        steps, versions, made, weights=weights, job_group=job, device=device, counts=counts, **options
    )  # fmt: skip


def _edges(plan: RunPlan, stage: CapturedStage) -> dict[int, EdgeTensors]:
    return {
        other: EdgeTensors([_spec(plan, tensor) for tensor in tensors], [tensor.owner for tensor in tensors])
        for other, tensors in (*stage.sources.items(), *stage.targets.items())
    }


def _spec(plan: RunPlan, tensor: EdgeTensor) -> TensorSpec:
    return TensorSpec(tensor.shape_at(plan.sizes), tensor.dtype)


def _initial(args: argparse.Namespace, plan: RunPlan) -> Callable[..., Tensor]:
    """Values of a new head: weights as the model's configuration says, biases 0, the same on every cut."""

    def make(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if len(shape) < 2:
            return torch.full(shape, float("norm" in name.lower() and name.endswith("weight")), dtype=dtype)
        generator = torch.Generator().manual_seed(mixed(args.seed, zlib.crc32(name.encode())))
        return torch.empty(shape).normal_(0.0, plan.initializer_range, generator=generator).to(dtype)

    return make
