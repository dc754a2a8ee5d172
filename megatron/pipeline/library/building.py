"""The construction of the runtime's objects from a user's modules: parameters, device, stages, and the job's schedule.

A user names a schedule, gives a `Schedule`, or gives the file of a program. All ranks agree on the schedule, and on the
number of modules of each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.documents import counted
from megatron.pipeline.library.batches import MicrobatchFeed
from megatron.pipeline.library.ranks import Groups, LossCounts, Ranks
from megatron.pipeline.library.stages import ChainModule, LibraryStage, LossFunction, Specs, StageModule, edges_of
from megatron.pipeline.program.edges import rank_of_stage
from megatron.pipeline.program.instruction import Tensor as Travelling
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.contract.stage import GraphStage, Stage
from megatron.pipeline.runtime.failure.agreement import Agreement
from megatron.pipeline.runtime.stages.module.rank_update import OfStage
from megatron.pipeline.runtime.stages.module.reduction import TiedParameter
from megatron.pipeline.runtime.stages.module.stage import ModuleStage
from megatron.pipeline.runtime.update.versions import WeightVersions
from megatron.pipeline.schedules import PRESETS, Schedule, read_schedule
from megatron.pipeline.schedules.compatibility import require_known_norm
from megatron.pipeline.schedules.orders import MERGED


def modules_of(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that a user gives, as a list. Raises ValueError if there is none, or one is given twice."""
    is_list = isinstance(module, (Sequence, nn.ModuleList)) and not isinstance(module, nn.Sequential)
    modules = list(module) if is_list else [module]
    if not modules or not all(isinstance(each, nn.Module) for each in modules):
        raise ValueError(f"{module!r} is no module; give this rank's nn.Module, or a list of several")
    if len(set(modules)) < len(modules):
        raise ValueError("a module is given twice, and each is a stage of its own; share parameters, not modules")
    return modules


def device_of(modules: Iterable[nn.Module], device: torch.device | str | None) -> torch.device:
    """The device of the modules. Raises ValueError if they are on several devices, or not on the given `device`."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    if any(isinstance(each, nn.parameter.UninitializedTensorMixin) for each in tensors):
        raise ValueError("a lazy module has no shapes yet; call it once before")
    found = {tensor.device for tensor in tensors}
    if len(found) > 1:
        raise ValueError(f"the modules of this rank are on {', '.join(map(str, found))}; move them to one device")
    (actual,) = found or {torch.device("cpu" if device is None else device)}
    if actual.type == "cuda" and actual.index is None:
        actual = torch.device("cuda", torch.cuda.current_device())
    asked = actual if device is None else torch.device(device)
    if asked.type != actual.type or asked.index not in (None, actual.index):
        raise ValueError(f"the modules of this rank are on {actual}, not on {asked}; move them there")
    return actual


def trained(modules: Mapping[int, nn.Module], *, stepping_alone: bool) -> dict[int, dict[str, nn.Parameter]]:
    """By stage, the parameters that require gradients, under the stage's number and the parameter's name: `2.weight`.

    A parameter that a module uses under several names is listed once.

    Raises:
        ValueError: two stages share a parameter, and each stage steps by itself.
    """
    found = {
        index: {f"{index}.{name}": each for name, each in module.named_parameters() if each.requires_grad}
        for index, module in modules.items()
    }
    parameters = [each for own in found.values() for each in own.values()]
    if stepping_alone and len(set(parameters)) < len(parameters):
        raise ValueError("two stages of this rank share a parameter, and each steps by itself; use flush or 2bw")
    return found


@dataclass(frozen=True)
class Tie:
    """A parameter that the first and the last stage share.

    Attributes:
        name: the parameter's name on this rank; None if this rank has no copy.
        ends: for each pipeline, the global ranks of the first and the last stage.
        is_first: whether this rank has the first stage.
    """

    name: str | None
    ends: tuple[tuple[int, int], ...]
    is_first: bool

    @staticmethod
    def of(tied: nn.Parameter | None, of_stage: OfStage, schedule: Any, ranks: Ranks) -> Tie:
        """Make the tie on this rank. `tied`: this rank's copy of the parameter; None on a rank without a copy.

        Raises ValueError if a copy is missing on this rank, or if this rank cannot have a copy.
        """
        first, last = schedule.rank_of_stage[0], schedule.rank_of_stage[-1]
        ends = ranks.pipeline[first], ranks.pipeline[last]
        if ends[0] == ends[1]:
            raise ValueError(
                "the first and the last stage are on one rank; give both modules the same parameter, and leave tied out"
            )
        if (ranks.own in ends) != (tied is not None):
            raise ValueError("tied has to be given on the ranks of the first and the last stage, and on no other")
        index = 0 if ranks.own == ends[0] else schedule.num_stages - 1
        names = [name for name, each in of_stage.get(index, {}).items() if each is tied]
        if tied is not None and not names:
            raise ValueError(f"the tied parameter is not one of stage {index} that require gradients; give one of it")
        of_pipelines = tuple((pipeline[first], pipeline[last]) for pipeline in ranks.pipelines)
        return Tie(names[0] if names else None, of_pipelines, ranks.own == ends[0])

    def parameter(self, groups: Groups) -> TiedParameter | None:
        """The tied parameter for an update; None if this rank has no copy.

        Collective: every rank of the job must call it.
        """
        group = groups.of(self.ends)
        return None if self.name is None else TiedParameter((self.name,), group, counts_in_norm=self.is_first)


def stage_module(
    module: nn.Module, index: int, schedule: Any, *, loss: LossFunction | None, autocast: torch.dtype | None,
    device: torch.device,
) -> StageModule:  # fmt: skip
    """Wrap a module as a stage of the schedule's graph."""
    graph = schedule.graph
    return StageModule(
        module, index=index, targets=graph.takers(Travelling.ACTIVATION, index),
        with_gradients=graph.makers(Travelling.GRADIENT, index), loss=loss, autocast=autocast, device=device,
    )  # fmt: skip


def build_stage(
    module: StageModule, index: int, schedule: Any, *, versions: WeightVersions, specs: Specs, feed: MicrobatchFeed,
    counts: LossCounts, memory: ActivationMemory | None, device: torch.device,
) -> Stage | GraphStage:  # fmt: skip
    """Build the executor's stage: a `ModuleStage` of a chain if activations move between ranks, else a `LibraryStage`.

    Raises:
        ValueError: activations move, and stages exchange more than one tensor.
    """
    last = schedule.num_stages - 1
    recompute = {"recompute": schedule.recomputes(index), "keeps": schedule.keeps(index)}
    if memory is None:
        return LibraryStage(
            module, index=index, graph=schedule.graph, edges=edges_of(specs, (index,))[index], versions=versions,
            data=feed, has_loss=index == last, device=device, counts=counts,
            **recompute,
        )  # fmt: skip
    if any(len(each) > 1 for each in specs.values()):
        raise ValueError(
            "stages hand on several tensors, and a schedule with balance moves what is saved for one; hand on one, or "
            "use a schedule without balance"
        )

    def loss_of(output: Any, microbatch: Any) -> Tensor:
        return module.loss_of(output, feed(microbatch).targets)

    return ModuleStage(
        ChainModule(module), index=index, num_stages=schedule.num_stages, versions=versions,
        source=feed if index == 0 else None, loss=loss_of if index == last else None,
        input_spec=None if index == 0 else specs[index - 1, index][0],
        output_spec=None if index == last else specs[index, index + 1][0], device=device,
        activation_memory=memory, **recompute,
    )  # fmt: skip


# --- the choice of the schedule ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Choices:
    """The choices of a run besides the schedule, as in `Pipeline`. `modules_of_rank`: number of modules by rank."""

    modules_of_rank: Sequence[int]
    num_microbatches: int | None
    data_parallel: bool
    norm_decides: bool
    tied: bool
    recompute: bool
    provisional: bool
    error_feedback: bool


def _choose_schedule(schedule: str | Path | Any, choices: _Choices) -> Any:
    """The schedule of a run.

    Raises:
        ValueError: there is no such schedule, or the schedule contradicts the choices.
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
    """The number of microbatches of a batch: the run's choice, or else the number in the file's program."""
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
            f"the ranks give {list(choices.modules_of_rank)} modules, and {name} needs the same number on each rank; "
            "give equally many, or a Schedule with rank_of_stage"
        )
    placed = {}
    if most > 1 and PRESETS[name].order in MERGED:
        placed["rank_of_stage"] = rank_of_stage(PRESETS[name].placement, num_ranks, most)
    return Schedule.preset(
        name, num_stages=num_ranks * most, num_virtual_stages=most,
        predict=choices.provisional or choices.error_feedback,
        provisional_microbatches=0 if choices.error_feedback else None,
        data_parallel=choices.data_parallel, norm_decides=choices.norm_decides, tied_embeddings=choices.tied,
        recompute=choices.recompute, **placed,
    )  # fmt: skip


def _of_file(path: str | Path, choices: _Choices) -> Any:
    if not Path(path).exists():
        raise ValueError(f"there is no schedule {str(path)!r}; choose from {', '.join(PRESETS)}, or give a CSV file")
    if choices.provisional or choices.error_feedback:
        name = "provisional" if choices.provisional else "error_feedback"
        raise ValueError(f"{path} says itself whether its weights are predicted; leave {name} out")
    return read_schedule(
        path, recompute=choices.recompute or None, tied_embeddings=choices.tied, data_parallel=choices.data_parallel,
        norm_decides=choices.norm_decides,
    )  # fmt: skip


def _of_user(schedule: Any, choices: _Choices) -> Any:
    if (choices.provisional or choices.error_feedback) and not schedule.weights.predicts:
        raise ValueError(f"the schedule's weights are {schedule.weights.name}; make them 2bw-provisional there")
    if choices.error_feedback and schedule.provisional_microbatches != 0:
        raise ValueError("the schedule's predictions read gradients; make provisional_microbatches 0 there")
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
    if schedule.copies:
        raise ValueError(
            "the stages of the schedule are copies of several replicas, and Pipeline has the stages of one; give a "
            "schedule of one replica"
        )
    if schedule.residency is not None:
        raise ValueError(
            "the schedule keeps weights on the host, which Pipeline cannot; use another, or the engine with a "
            "ModuleRelayUpdate"
        )
    if schedule.num_frozen:
        raise ValueError(
            f"the schedule has {schedule.num_frozen} frozen stages, whose backwards are left out; freeze parameters by "
            "requires_grad_(False) in a schedule without"
        )


# --- one schedule on all ranks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """A rank's part of a pipeline.

    Attributes:
        modules: the modules of the rank's stages, in ascending order of the stages.
        is_tied: whether any rank gives a tied parameter.
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
    error_feedback: bool,
    autocast: torch.dtype | None,
) -> Placed:
    """Agree with all ranks on the schedule, and return this rank's part. The arguments are those of `Pipeline`.

    Collective: every rank of the job must call it.

    Raises:
        ValueError: on all ranks, if arguments contradict each other or differ between ranks.
    """
    facts = {"num_microbatches": num_microbatches, "clip_grad": clip_grad, "recompute": recompute,
             "provisional": provisional, "error_feedback": error_feedback, "autocast": autocast}  # fmt: skip

    def own() -> tuple[tuple[nn.Module, ...], torch.device]:
        modules = tuple(modules_of(module))
        return modules, device_of(modules, device)

    modules, found_device = agreement.on(own)
    found = agreement.gathered({**facts, "modules": len(modules), "ties": has_tied})
    choices = _Choices(
        modules_of_rank=[found[ranks.job.index(rank)]["modules"] for rank in ranks.pipeline],
        num_microbatches=num_microbatches, data_parallel=len(ranks.pipelines) > 1, norm_decides=clip_grad > 0,
        tied=any(each["ties"] for each in found), recompute=recompute, provisional=provisional,
        error_feedback=error_feedback,
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
