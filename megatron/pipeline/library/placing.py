"""Which schedule all ranks run, and which modules each brings to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.pipeline.library.building import device_of, modules_of
from megatron.pipeline.library.choice import Choices, choose_schedule, microbatches_of
from megatron.pipeline.library.ranks import Ranks
from megatron.pipeline.runtime.failure.agreement import Agreement


@dataclass(frozen=True)
class Placed:
    """What a rank has of a pipeline. `modules`: of its stages, ascending. `is_tied`: some rank gives a tied
    parameter.
    """

    schedule: Any
    num_microbatches: int
    modules: tuple[nn.Module, ...]
    device: torch.device
    is_tied: bool


def place(
    module: nn.Module | Sequence[nn.Module],
    schedule: str | Path | Any,
    agreement: Agreement,
    ranks: Ranks,
    *,
    has_loss: bool,
    has_tied: bool,
    device: torch.device | str | None,
    num_microbatches: int | None,
    clip_grad: float,
    recompute: bool,
    provisional: bool,
    autocast: torch.dtype | None,
) -> Placed:
    """Collective over the job; the arguments are those of `Pipeline`.

    Raises:
        ValueError: on all ranks: what does not go together, or is not the same on all of them.
    """
    facts = {"num_microbatches": num_microbatches, "clip_grad": clip_grad, "recompute": recompute,
             "provisional": provisional, "autocast": autocast}  # fmt: skip

    def own() -> tuple[tuple[nn.Module, ...], torch.device]:
        if clip_grad < 0:
            raise ValueError(f"clip_grad is {clip_grad}; give the largest norm, or 0 to clip nothing")
        if autocast not in (None, torch.bfloat16):
            raise ValueError(f"autocast to {autocast} would need a scaled loss; use torch.bfloat16, or None")
        modules = tuple(modules_of(module))
        return modules, device_of(modules, device)

    modules, found_device = agreement.on(own)
    found = agreement.gathered({**facts, "modules": len(modules), "ties": has_tied})
    choices = Choices(
        modules_of_rank=[found[ranks.job.index(rank)]["modules"] for rank in ranks.pipeline],
        num_microbatches=num_microbatches, data_parallel=len(ranks.pipelines) > 1, norm_decides=clip_grad > 0,
        tied=any(each["ties"] for each in found), recompute=recompute, provisional=provisional,
    )  # fmt: skip

    def choose() -> tuple[Any, int]:
        for name, value in facts.items():
            if others := [each[name] for each in found if each[name] != value]:
                raise ValueError(f"{name} is {value} on one rank and {others[0]} on another; give the same to all")
        chosen = choose_schedule(schedule, choices)
        last = chosen.num_stages - 1
        if not has_loss and last in chosen.stages_of(ranks.rank):
            raise ValueError(f"this rank has the last stage, {last}, and no loss; give it")
        return chosen, microbatches_of(chosen, choices)

    return Placed(*agreement.on(choose), modules, found_device, choices.tied)
