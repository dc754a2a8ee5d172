"""The optimizers of --optim and the learning rates of --lr_scheduler_type."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.pipeline.runtime.update.narrow_moments import NarrowMoments


def _of_adam(args: argparse.Namespace) -> dict[str, Any]:
    return {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], Callable[[argparse.Namespace], dict[str, Any]]]] = {
    "adam": (torch.optim.Adam, _of_adam),
    "adamw": (torch.optim.AdamW, _of_adam),
    "adamw_torch_fused": (torch.optim.AdamW, lambda args: _of_adam(args) | {"fused": True}),
    "sgd": (torch.optim.SGD, lambda args: {"momentum": args.momentum}),
    "adafactor": (torch.optim.Adafactor, lambda args: {}),
}
"""Word of --optim -> class of the optimizer, and its options besides the learning rate."""


def make_optimizer(
    parameters: Mapping[str, nn.Parameter], args: argparse.Namespace, *, decays: Set[str]
) -> torch.optim.Optimizer:
    """The optimizer of a stage's parameters; `parameters` may be empty. Only l2l has moments in BF16.

    `decays`: the names of the weights to which --weight_decay applies.
    """
    groups = [
        {"params": [parameters[name] for name in names], "weight_decay": decay}
        for names, decay in zip(_groups_of(parameters, decays), (args.weight_decay, 0.0), strict=True)
    ]
    optimizer, options = _OPTIMIZERS[args.optim]
    if args.l2l_moments == "bfloat16":
        optimizer = partial(NarrowMoments, dtypes=(torch.bfloat16, torch.bfloat16), dithers=True)
    return optimizer(groups, lr=args.learning_rate, **options(args))


def optimizer_order(names: Iterable[str], decays: Set[str]) -> list[str]:
    """The names of parameters in the order in which the state of `make_optimizer` numbers them."""
    return [name for group in _groups_of(names, decays) for name in group]


def _groups_of(names: Iterable[str], decays: Set[str]) -> tuple[list[str], list[str]]:
    ordered = sorted(names)
    return [name for name in ordered if name in decays], [name for name in ordered if name not in decays]


def make_scheduler(
    optimizer: torch.optim.Optimizer, args: argparse.Namespace, *, num_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The scheduler of --lr_scheduler_type over `num_steps` batches; it steps after each step of the optimizer."""
    from transformers import get_scheduler

    num_warmup_steps = args.warmup_steps or math.ceil(args.warmup_ratio * num_steps)
    return get_scheduler(
        args.lr_scheduler_type, optimizer, num_warmup_steps=num_warmup_steps, num_training_steps=num_steps
    )


def take_rates(scheduler: torch.optim.lr_scheduler.LambdaLR) -> None:
    """Let the next step have the learning rates of `scheduler`, and not the rates of the run that saved its state.

    The saved state counts steps, and a schedule over another number of batches has other rates at the same count.
    """
    for group, base, factor in zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(scheduler.last_epoch)
