"""The relay of a captured model (L2L): its layers are stages, and weights, gradients and optimizer live on the host.

The device has the weights of a few layers at a time. All microbatches of a batch pass a layer before the next one is
fetched; inputs of layers wait on the host for their recompute. So the device's memory does not grow with depth.

Weights are read stage by stage straight into the memory from which the device copies them. A parameter that the first
and the last stage share, such as a tied embedding, has a copy at each, and both step with the sum of their gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from megatron.capture.cut import CapturedStage
from megatron.finetuning.optimizers import make_optimizer, make_scheduler
from megatron.finetuning.plan import RunPlan
from megatron.pipeline.library.ranks import Groups, Ranks
from megatron.pipeline.runtime.failure.agreement import agreed
from megatron.pipeline.runtime.relay.host_store import HostStore, trained
from megatron.pipeline.runtime.relay.node_replicas import NodeReplicas
from megatron.pipeline.runtime.relay.packed_weights import PACKINGS, Packing
from megatron.pipeline.runtime.stages.module.rank_update import ModuleRelayUpdate
from megatron.pipeline.runtime.stages.module.reduction import TiedParameter


def relay_update(
    plan: RunPlan, args: argparse.Namespace, modules: Mapping[int, nn.Module], *, load: Callable[..., object],
    exact: dict[str, Tensor], ranks: Ranks, groups: Groups, num_steps: int, first_version: int, **options: Any,
) -> ModuleRelayUpdate:  # fmt: skip
    """The update of this rank's stages, whose weights live on the host and are read here.

    Args:
        modules: by stage; each has the cut stage as `stage`, without memory for its parameters.
        load: `load_stage` with the run's files.
        exact: gets the FP32 values that `BuiltPipeline` has.
        options: further arguments of `ModuleRelayUpdate`.

    Collective: every rank must call it. Raises ValueError if tensors cannot be read.
    """
    schedule, device = plan.schedule, options["device"]
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    replicas = NodeReplicas(ranks.columns[ranks.rank], device=device, timeout=timeout)
    stages = {index: module.stage for index, module in modules.items()}
    names = {index: _own_names(stage, plan.crossing.copies) for index, stage in stages.items()}
    model_names = {key: name for own_names in names.values() for key, name in own_names.items()}
    packed = packed_names(plan, args)
    with agreed():  # each rank reads its own tensors
        store = HostStore(
            {index: dict(zip(names[index], stage.parameters(), strict=True)) for index, stage in stages.items()},
            device=device, masters=args.bf16, first_version=first_version, replicas=replicas,
            packing=packing_of(args), packs=lambda key: model_names[key] in packed,
            values=lambda index: _values(stages[index], names[index], args, load, exact),
        )  # fmt: skip
    steps = trained(store.parameters)
    if args.bf16:
        masters = steps if args.freeze_training else store.parameters
        exact |= {model_names[key]: parameter.detach() for key, parameter in masters.items()}
    optimizer = make_optimizer(steps, args, decays={key for key in steps if model_names[key] in plan.decays})
    return ModuleRelayUpdate(
        modules, store, residency=schedule.residency, optimizer=optimizer,
        scheduler=make_scheduler(optimizer, args, num_steps=num_steps), tied=_tied(plan, names, ranks, groups),
        frozen=filter(schedule.graph.is_forward_only, modules), **options,
    )  # fmt: skip


def packing_of(args: argparse.Namespace) -> Packing | None:
    """The form of the layers' frozen weights on the host; None: as they are."""
    bits = 4 if args.load_in_4bit else 8 if args.load_in_8bit else None
    return None if bits is None else PACKINGS[bits]


def packed_names(plan: RunPlan, args: argparse.Namespace) -> frozenset[str]:
    """The parameters that are packed: frozen matrices of numbered layers, except embeddings."""
    packing = packing_of(args)
    if packing is None:
        return frozenset()
    tables = {path for path, module in plan.adapter.model.named_modules() if isinstance(module, nn.Embedding)}
    return frozenset(
        name
        for name, parameter in plan.captured.parameters.items()
        if not parameter.requires_grad
        and packing.takes(parameter)
        and name.rpartition(".")[0] not in tables
        and any(part.isdigit() for part in name.split("."))
    )


def rounding_of(plan: RunPlan, args: argparse.Namespace) -> Callable[[str, Tensor], Tensor]:
    """(name, frozen weight) -> the weight as it is on the device."""
    packing, packed = packing_of(args), packed_names(plan, args)
    return lambda name, weight: packing.rounded(weight) if name in packed else weight


def _own_names(stage: CapturedStage, copies: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Name in the host's store -> name in the model, for each parameter of a stage. A copy has a name of its own."""
    return {
        name if stage.index == copies.get(name, (stage.index,))[0] else f"{name} of stage {stage.index}": name
        for name, _ in stage.named_parameters()
    }


def _values(
    stage: CapturedStage, names: Mapping[str, str], args: argparse.Namespace, load: Callable[..., object],
    exact: dict[str, Tensor],
) -> dict[str, Tensor]:  # fmt: skip
    """Read the values of a stage's parameters, with --bf16 in FP32; the parameters themselves have no memory again."""
    found: dict[str, Tensor] = {}
    load(stage, exact=found if args.bf16 else None)
    parameters = dict(stage.named_parameters())
    # A layer that trains again begins with the FP32 values that it was frozen with.
    own = trained(parameters) if args.freeze_training else parameters
    exact.update({name: value for name, value in found.items() if name not in own})
    values = {key: found.get(name, parameters[name].data) for key, name in names.items()}
    for parameter in parameters.values():
        parameter.data = parameter.data.new_full((1,), torch.nan).expand(parameter.shape)
    return values


def _tied(plan: RunPlan, names: Mapping[int, Mapping[str, str]], ranks: Ranks, groups: Groups) -> TiedParameter | None:
    """The shared parameter, if this rank has a copy. Collective over the job."""
    if not plan.tied:
        return None
    [(shared, ends)] = plan.tied.items()
    places = sorted({plan.schedule.rank_of_stage[stage] for stage in ends})
    group = groups.of([[pipeline[place] for place in places] for pipeline in ranks.pipelines])
    own = tuple(key for index in ends if index in names for key, name in names[index].items() if name == shared)
    return TiedParameter(own, group, counts_in_norm=ends[0] in names) if own else None
