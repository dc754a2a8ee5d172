"""The optimizer of a run: megatron.core's Adam and SGD, or LAMB, Muon, or AdamW with 16-bit moments.

megatron.core's optimizer keeps master weights, parameter groups and formats; it has Adam and SGD. Another optimizer
replaces its Adam before Adam has any state. The groups are kept; they then hold the master weights of 16-bit weights.

LAMB (You et al., 2019, algorithm 2) takes Adam's direction, and for each tensor a step in proportion to the norm of its
weights. For a tensor x with gradient g, at step t, as in Adam:

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay x

and then, with the norms of the whole tensor, x = x - lr |x| / |r| r. (The algorithm's phi is the identity here.) If a
norm is 0, as for a bias that starts at 0, the ratio counts as 1.

Muon steps the matrices of the layers, and AdamW the other parameters (`megatron.pipeline.runtime.update.muon`). The
groups say which of the two steps a parameter.

torch's optimizers step parameters one by one with several operations (`loop`), or each in one pass of a compiled kernel
(`fused`), which is several times faster on a CPU; the last bits may differ. The kernel is a setting of the optimizer's
groups, which a checkpoint overwrites, so the run sets it after loading.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.backend.cpu import optimizers_on_host
from megatron.backend.fixes import TORCHS_ADAM
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.pipeline.runtime.stages.megatron.optimizers import Owners, is_dense, optimizers_of
from megatron.pipeline.runtime.update.muon import COLUMNS, QKV, ROWS, WHOLE, Muon, Orthogonalization
from megatron.pipeline.runtime.update.narrow_moments import NarrowMoments, OneByOne
from megatron.trainer.arguments.flags.config import TrainConfig, num_replicas
from megatron.trainer.models import core_config

# --- LAMB -------------------------------------------------------------------------------------------------------------


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Lamb(OneByOne):
    """The LAMB optimizer, by the module's formulas."""

    def _step(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        gradient, mean, size, count = parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["step"].item()
        beta1, beta2 = group["betas"]
        mean.lerp_(gradient, 1 - beta1)
        size.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        direction = mean / (1 - beta1**count)
        direction.div_((size / (1 - beta2**count)).sqrt_().add_(group["eps"]))
        if group["weight_decay"]:
            direction.add_(parameter, alpha=group["weight_decay"])
        of_weights, of_direction = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(direction)
        ratio = torch.where((of_weights > 0) & (of_direction > 0), of_weights / of_direction, 1.0)
        parameter.sub_(direction.mul_(ratio * group["lr"]))


# --- Muon -------------------------------------------------------------------------------------------------------------


def layout_of(parameter: Tensor, name: str) -> str | None:
    """How tensor parallel ranks shard a layer's matrix that Muon steps; None: AdamW steps the parameter."""
    if parameter.dim() != 2 or ".layers." not in f".{name}":
        return None
    if name.endswith("linear_qkv.weight"):
        return QKV
    if not is_dense(parameter) and parallel_state.get_expert_tensor_parallel_world_size() == 1:
        return WHOLE  # megatron.core marks it as sharded all the same
    return {0: ROWS, 1: COLUMNS}.get(getattr(parameter, "partition_dim", -1), WHOLE)


def _muon(args: TrainConfig, chunks: Sequence[torch.nn.Module]) -> Callable[[list[dict[str, Any]]], Muon]:
    """A function that makes the run's Muon from megatron.core's groups."""
    config = chunks[0].config
    queries = config.num_attention_heads // config.num_query_groups * config.kv_channels
    gathers = args.muon_tp_mode == "duplicated" and args.tensor_model_parallel_size > 1
    orthogonalization = Orthogonalization(
        coefficients=args.muon_coefficient_type,
        num_steps=args.muon_num_ns_steps,
        in_bfloat16=args.muon_fp32_matmul_prec == "medium",
        scale=args.muon_scale_mode,
        extra_scale=args.muon_extra_scale_factor,
        qkv_rows=(queries, config.kv_channels, config.kv_channels) if args.muon_split_qkv else None,
        group=parallel_state.get_tensor_model_parallel_group() if gathers else None,
    )

    def made(groups: list[dict[str, Any]]) -> Muon:
        return Muon(
            groups, momentum=args.muon_momentum, nesterov=args.muon_use_nesterov, orthogonalization=orthogonalization
        )

    return made


def _muons_groups(args: TrainConfig) -> dict[ParamKey, ParamGroupOverride]:
    """The layout of Muon's groups, and the learning rate of AdamW's group if it differs."""
    overrides = {_key(layout, layout): {"muon": layout} for layout in (WHOLE, ROWS, COLUMNS, QKV)}
    if args.muon_scalar_lr is not None:
        smallest = args.min_lr if args.muon_scalar_min_lr is None else args.muon_scalar_min_lr
        overrides[_key("scalars", None, args.decoupled_lr)] = {"max_lr": args.muon_scalar_lr, "min_lr": smallest}
    return overrides


def _bytes_of_muon(parameter: Tensor, name: str) -> int:
    """The bytes of a parameter's moments and, for 16-bit weights, of its master weights."""
    num_moments = 2 if layout_of(parameter, name) is None else 1
    return 4 * parameter.numel() * (num_moments + (parameter.element_size() < 4))


def _key(title: str, layout: str | None, decoupled_lr: float | None = None) -> ParamKey:
    """The parameters with this layout, without those with --decoupled-lr."""

    def belongs(parameter: Tensor, name: str) -> bool:
        is_decoupled = decoupled_lr is not None and getattr(parameter, "is_embedding_or_output_parameter", False)
        return layout_of(parameter, name) == layout and not is_decoupled

    return ParamKey(with_name_predicate=ParamWithNamePredicate(name=title, fn=belongs))


# --- the optimizer of a run -------------------------------------------------------------------------------------------


Kinds = list[list[tuple]]
"""For each list of groups that megatron.core makes for an optimizer, the kinds of parameters of all ranks: learning
rates, weight decays and layouts."""


def build_optimizer(
    args: TrainConfig, chunks: Sequence[torch.nn.Module], *, on_host: bool = False, kinds: Kinds | None = None
) -> MegatronOptimizer:
    """Build the optimizer of `args` for a rank's chunks.

    If replicas own whole parameters, the optimizer has this replica's, and `owners(optimizer)` knows the other owners.
    Where ranks may be lost, its `kinds_of_parameters` are what a new process needs as `kinds`.

    Args:
        on_host: weights live on the host, which makes the steps.
        kinds: in a process that is alone, the kinds of parameters of the job whose rank it is to be. Its optimizer then
            has the groups that those of the job's ranks have, empty ones included.
    """
    wanted = core_config.optimizer_config(args)
    shared = None
    own, overrides = None, get_standard_config_overrides(wanted)
    if args.optimizer == "lamb":
        own = Lamb
    elif args.optimizer == "muon":
        own = _muon(args, chunks)
        overrides |= _muons_groups(args)
        if args.use_distributed_optimizer and num_replicas(args) > 1:
            shared = Owners(chunks, _bytes_of_muon)
    elif args.use_precision_aware_optimizer:
        dtypes = DTYPES[args.exp_avg_dtype], DTYPES[args.exp_avg_sq_dtype]
        fused = args.optimizer_kernel == "fused"
        own = partial(NarrowMoments, dtypes=dtypes, dithers=on_host, fused=fused)
    if own is not None:
        wanted = replace(wanted, optimizer="adam")
    nothing = contextlib.nullcontext()
    with (
        optimizers_on_host() if on_host else nothing,
        _as_one(chunks) if on_host else nothing,
        nothing if shared is None else shared.building(),
        _with_kinds(kinds) if args.go_on_without_lost_ranks else nothing as found,
    ):
        optimizer = get_megatron_optimizer(wanted, chunks, config_overrides=overrides)
    if own is not None:
        for each in optimizers_of(optimizer):
            each.owners = shared
            if not each.is_stub_optimizer:
                each.optimizer = _in_place_of(each.optimizer, own)
    optimizer.kinds_of_parameters = found
    return optimizer


@contextlib.contextmanager
def _with_kinds(known: Kinds | None) -> Iterator[Kinds]:
    """Yield a list of the kinds that megatron.core gathers within the block, or give it the `known` kinds instead.

    megatron.core makes the same groups on all ranks: one for each kind of parameter that any of them has.
    """
    found: Kinds = []
    gather = torch.distributed.all_gather_object

    def gathered(kinds_of_ranks: list, own: list) -> None:
        if known is None:
            gather(kinds_of_ranks, own)
        else:
            kinds_of_ranks[:] = [known[len(found)]]
        found.append(list(dict.fromkeys(kind for kinds in kinds_of_ranks for kind in kinds)))

    with mock.patch.object(torch.distributed, "all_gather_object", gathered):
        yield found


@contextlib.contextmanager
def _as_one(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Make megatron.core build one optimizer within the block, for the experts of expert parallelism, too.

    The host steps whole stages, after their gradients are reduced, so experts need no optimizer of their own.
    """
    experts = [each for chunk in chunks for each in chunk.parameters() if not is_dense(each)]
    for each in experts:
        each.allreduce = True
    try:
        yield
    finally:
        for each in experts:
            each.allreduce = False


def _in_place_of(
    adam: torch.optim.Optimizer, own: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """An optimizer of `adam`'s groups, without the settings that only Adam reads."""
    assert not adam.state, "an optimizer that has stepped cannot be replaced"
    made = own(adam.param_groups)
    for group in made.param_groups:
        for name in adam.defaults.keys() - made.defaults.keys():
            del group[name]
    return made


# --- the kernel of the steps ------------------------------------------------------------------------------------------

KERNELS = ("loop", "fused")
_WITH_KERNELS = (*TORCHS_ADAM, torch.optim.SGD)


def choose_kernel(optimizer: MegatronOptimizer, kernel: str) -> None:
    """Set the kernel, one of `KERNELS`, with which `optimizer` steps.

    Optimizers that are not torch's (Apex, Transformer Engine) have only one kernel.
    """
    for each in optimizers_of(optimizer):
        inner = getattr(each, "optimizer", None)
        if isinstance(inner, _WITH_KERNELS):
            for group in inner.param_groups:
                group["fused"] = True if kernel == "fused" else None
