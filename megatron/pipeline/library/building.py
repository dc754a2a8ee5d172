"""From a user's modules to what the runtime runs: their parameters, their device, the stages around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.pipeline.library.batches import MicrobatchFeed
from megatron.pipeline.library.counts import LossCounts
from megatron.pipeline.library.ranks import Groups, Ranks
from megatron.pipeline.library.shapes import Specs, edges_of
from megatron.pipeline.library.stages import ChainModule, LibraryStage, LossFunction, StageModule
from megatron.pipeline.program.instruction import Tensor as Travelling
from megatron.pipeline.runtime.activations.activation_memory import ActivationMemory
from megatron.pipeline.runtime.contract.stage import GraphStage, Stage
from megatron.pipeline.runtime.stages.module.rank_update import OfStage
from megatron.pipeline.runtime.stages.module.reduction import TiedParameter
from megatron.pipeline.runtime.stages.module.stage import ModuleStage
from megatron.pipeline.runtime.update.versions import WeightVersions


def modules_of(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that a user gives. Raises ValueError where there is none."""
    is_list = isinstance(module, (Sequence, nn.ModuleList)) and not isinstance(module, nn.Sequential)
    modules = list(module) if is_list else [module]
    if not modules or not all(isinstance(each, nn.Module) for each in modules):
        raise ValueError(f"{module!r} is no module; give this rank's nn.Module, or a list of several")
    if len(set(modules)) < len(modules):
        raise ValueError("a module is given twice, and each is a stage of its own; share parameters, not modules")
    return modules


def device_of(modules: Iterable[nn.Module], device: torch.device | str | None) -> torch.device:
    """Where the modules are. Raises ValueError where that is in several places, or not where it is said."""
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
    """For each stage its parameters that require gradients, each once, by its number and their names: `2.weight`.

    Raises:
        ValueError: two stages share one, and each steps by itself.
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
    """A parameter that the first and the last stage share: `name` on this rank, None where it has no copy; `ends`: the
    global ranks that have, of each pipeline.
    """

    name: str | None
    ends: tuple[tuple[int, int], ...]
    is_first: bool

    @staticmethod
    def of(tied: nn.Parameter | None, of_stage: OfStage, schedule: Any, ranks: Ranks) -> Tie:
        """Raises ValueError where this rank has to say which parameter it is, or cannot have one."""
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
        """As an update wants it; None where this rank has no copy. Collective."""
        group = groups.of(self.ends)
        return None if self.name is None else TiedParameter((self.name,), group, counts_in_norm=self.is_first)


def stage_module(
    module: nn.Module, index: int, schedule: Any, *, loss: LossFunction | None, autocast: torch.dtype | None,
    device: torch.device,
) -> StageModule:  # fmt: skip
    """The module as a stage of the schedule's graph."""
    graph = schedule.graph
    return StageModule(
        module, index=index, targets=graph.takers(Travelling.ACTIVATION, index),
        with_gradients=graph.makers(Travelling.GRADIENT, index), loss=loss, autocast=autocast, device=device,
    )  # fmt: skip


def build_stage(
    module: StageModule, index: int, schedule: Any, *, versions: WeightVersions, specs: Specs, feed: MicrobatchFeed,
    counts: LossCounts, memory: ActivationMemory | None, device: torch.device,
) -> Stage | GraphStage:  # fmt: skip
    """What the executor runs. Where activations move it is a stage of a chain, with one tensor in and one out.

    Raises:
        ValueError: several tensors, where activations move.
    """
    last, recomputes = schedule.num_stages - 1, schedule.recomputes(index)
    if memory is None:
        return LibraryStage(
            module, index=index, graph=schedule.graph, edges=edges_of(specs, (index,))[index], versions=versions,
            data=feed, has_loss=index == last, recompute=recomputes, device=device, counts=counts,
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
        output_spec=None if index == last else specs[index, index + 1][0], recompute=recomputes, device=device,
        activation_memory=memory,
    )  # fmt: skip
