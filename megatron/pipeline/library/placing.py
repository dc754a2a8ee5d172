"""Which schedule all ranks run, and which modules each brings to it. The user means a schedule by a name, as a
`Schedule`, or by the file of a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.documents import counted
from megatron.pipeline.library.building import device_of, modules_of
from megatron.pipeline.library.ranks import Ranks
from megatron.pipeline.runtime.failure.agreement import Agreement
from megatron.pipeline.schedules import PRESETS, Schedule, read_schedule
from megatron.pipeline.schedules.compatibility import require_known_norm
from megatron.pipeline.schedules.orders import MERGED
from megatron.pipeline.schedules.placements import rank_of_stage

# --- the schedule that a user means -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Choices:
    """What a run says besides the schedule; see `Pipeline`. `modules_of_rank`: how many each rank brings."""

    modules_of_rank: Sequence[int]
    num_microbatches: int | None
    data_parallel: bool
    norm_decides: bool
    tied: bool
    recompute: bool
    provisional: bool


def _choose_schedule(schedule: str | Path | Any, choices: _Choices) -> Any:
    """The schedule of a run.

    Raises:
        ValueError: there is none, or it does not go with the choices.
    """
    if isinstance(schedule, Path) or (isinstance(schedule, str) and schedule not in PRESETS):
        chosen = _of_file(schedule, choices)
    elif isinstance(schedule, str):
        chosen = _of_preset(schedule, choices)
    else:
        chosen = _of_user(schedule, choices)
    _validate(chosen, choices)
    return chosen


def _microbatches_of(schedule: Any, choices: _Choices) -> int:
    """How many microbatches a batch has: as the run says, else as the program of a file does."""
    num_microbatches = choices.num_microbatches
    if num_microbatches is None:
        num_microbatches = getattr(schedule, "num_microbatches", None)
    if num_microbatches is None:
        raise ValueError("nothing says into how many microbatches a batch is split; give num_microbatches")
    schedule.validate(num_microbatches)
    return num_microbatches


def _of_preset(name: str, choices: _Choices) -> Schedule:
    most, num_ranks = max(choices.modules_of_rank), len(choices.modules_of_rank)
    if min(choices.modules_of_rank) != most:
        raise ValueError(
            f"the ranks bring {list(choices.modules_of_rank)} modules, and {name} deals out as many to each; give as "
            "many everywhere, or a Schedule with rank_of_stage"
        )
    placed = {}
    if most > 1 and PRESETS[name].order in MERGED:
        placed["rank_of_stage"] = rank_of_stage(PRESETS[name].placement, num_ranks, most)
    return Schedule.preset(
        name, num_stages=num_ranks * most, num_virtual_stages=most, predict=choices.provisional,
        data_parallel=choices.data_parallel, norm_decides=choices.norm_decides, tied_embeddings=choices.tied,
        recompute=choices.recompute, **placed,
    )  # fmt: skip


def _of_file(path: str | Path, choices: _Choices) -> Any:
    if not Path(path).exists():
        raise ValueError(f"there is no schedule {str(path)!r}; choose from {', '.join(PRESETS)}, or give a CSV file")
    if choices.provisional:
        raise ValueError(f"{path} says itself whether its weights are predicted; leave provisional out")
    return read_schedule(
        path, recompute=choices.recompute or None, tied_embeddings=choices.tied, data_parallel=choices.data_parallel,
        norm_decides=choices.norm_decides,
    )  # fmt: skip


def _of_user(schedule: Any, choices: _Choices) -> Any:
    if choices.provisional and not schedule.weights.predicts:
        raise ValueError(f"the schedule's weights are {schedule.weights.name}; make them 2bw-provisional there")
    asked = {
        "data_parallel": choices.data_parallel,
        "tied_embeddings": choices.tied,
        "recompute": choices.recompute or schedule.recompute,
    }
    if isinstance(schedule, Schedule):
        return replace(schedule, **asked, norm_decides=choices.norm_decides or schedule.norm_decides)
    require_known_norm(schedule.weights, schedule.name_of_weights, norm_decides=choices.norm_decides)
    for name, wanted in asked.items():
        if (says := getattr(schedule, name)) != wanted:
            raise ValueError(f"the schedule says {name}={says}, and the run {wanted}; make a schedule for this run")
    return schedule


def _validate(schedule: Any, choices: _Choices) -> None:
    if schedule.num_ranks != len(choices.modules_of_rank):
        raise ValueError(
            f"the schedule is for {counted(schedule.num_ranks, 'rank')}, and the pipeline has "
            f"{len(choices.modules_of_rank)}; start as many, or give another schedule"
        )
    for rank, given in enumerate(choices.modules_of_rank):
        if given != len(due := schedule.stages_of(rank)):
            raise ValueError(
                f"the schedule puts stages {list(due)} on rank {rank} of the pipeline, which brings "
                f"{counted(given, 'module')}; give one for each, in this order"
            )
    if schedule.residency is not None:
        raise ValueError(
            "the schedule keeps weights on the host, which Pipeline does not; use another, or the engine with a "
            "ModuleRelayUpdate"
        )
    if schedule.num_frozen:
        raise ValueError(
            f"the schedule has {schedule.num_frozen} frozen stages, whose backwards are left out; freeze parameters by "
            "requires_grad_(False) in a schedule without"
        )
    if schedule.weights.refreshes and choices.data_parallel:
        raise ValueError(f"under {schedule.weights.name} each stage steps by itself; use one replica, or flush or 2bw")


# --- one schedule on all ranks ----------------------------------------------------------------------------------------


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
    choices = _Choices(
        modules_of_rank=[found[ranks.job.index(rank)]["modules"] for rank in ranks.pipeline],
        num_microbatches=num_microbatches, data_parallel=len(ranks.pipelines) > 1, norm_decides=clip_grad > 0,
        tied=any(each["ties"] for each in found), recompute=recompute, provisional=provisional,
    )  # fmt: skip

    def choose() -> tuple[Any, int]:
        for name, value in facts.items():
            if others := [each[name] for each in found if each[name] != value]:
                raise ValueError(f"{name} is {value} on one rank and {others[0]} on another; give the same to all")
        chosen = _choose_schedule(schedule, choices)
        last = chosen.num_stages - 1
        if not has_loss and last in chosen.stages_of(ranks.rank):
            raise ValueError(f"this rank has the last stage, {last}, and no loss; give it")
        return chosen, _microbatches_of(chosen, choices)

    return Placed(*agreement.on(choose), modules, found_device, choices.tied)
