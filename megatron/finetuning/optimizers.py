"""Optimizers and learning rates of a stage, by the words of Hugging Face's scripts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Set

import torch
from torch import nn

_Parameters = list[dict[str, object]]


def _adam(groups: _Parameters, args: argparse.Namespace) -> torch.optim.Optimizer:
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.Adam(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)


def _adamw(groups: _Parameters, args: argparse.Namespace) -> torch.optim.Optimizer:
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)


def _sgd(groups: _Parameters, args: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=args.learning_rate, momentum=args.momentum)


def _adafactor(groups: _Parameters, args: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=args.learning_rate)


_MAKERS: Mapping[str, Callable[[_Parameters, argparse.Namespace], torch.optim.Optimizer]] = {
    "adam": _adam,
    "adamw": _adamw,
    "sgd": _sgd,
    "adafactor": _adafactor,
}


def make_optimizer(
    parameters: Mapping[str, nn.Parameter], args: argparse.Namespace, *, decays: Set[str]
) -> torch.optim.Optimizer:
    """A stage's optimizer; it may have no parameters. `decays`: names of the weights that `--weight_decay` is for."""
    ordered = sorted(parameters.items())
    groups = [
        {"params": [each for name, each in ordered if name in decays], "weight_decay": args.weight_decay},
        {"params": [each for name, each in ordered if name not in decays], "weight_decay": 0.0},
    ]
    return _MAKERS[args.optim](groups, args)


def make_scheduler(optimizer: torch.optim.Optimizer, args: argparse.Namespace, *, num_steps: int):
    """The scheduler of `--lr_scheduler_type` over so many batches; its step follows each step of the optimizer."""
    from transformers import get_scheduler

    return get_scheduler(
        args.lr_scheduler_type, optimizer, num_warmup_steps=num_warmup_steps(args, num_steps),
        num_training_steps=num_steps,
    )  # fmt: skip


def num_warmup_steps(args: argparse.Namespace, num_steps: int) -> int:
    """Batches in which the learning rate rises: --warmup_steps, or --warmup_ratio of all."""
    return args.warmup_steps or -int(-args.warmup_ratio * num_steps // 1)


def decaying(model: nn.Module) -> frozenset[str]:
    """Names of the weights that decay: all but biases and what belongs to a norm, as in transformers' trainer."""
    found = set()
    for path, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(recurse=False):
            if not is_norm and "bias" not in name:
                found.add(f"{path}.{name}" if path else name)
    return frozenset(found)
