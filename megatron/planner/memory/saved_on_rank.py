"""The bytes of saved activations that a rank holds at once, at its fullest moment."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import NamedTuple

from megatron.pipeline.program.lane_order import Pairs
from megatron.planner.memory.activations import ActivationSetting
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.demand import Demand, Moment
from megatron.planner.memory.encoder_decoder import activations_of
from megatron.planner.memory.recompute import NOTHING


@dataclass(frozen=True)
class StageSizes:
    """Bytes of a microbatch at each stage.

    Attributes:
        saved: from the forward to the end of the B or I; if the microbatch is recomputed, its input.
        deferred: from then to the end of the W.
        workspace: in a B or I, beside `saved` and `deferred`.
        again: the part of `workspace` that a recomputed microbatch takes from its R on.
        kept: bytes beyond `saved` of a microbatch that is not recomputed.
        workspace_of_kept: `workspace` of a microbatch that is not recomputed.
    """

    saved: Sequence[float]
    deferred: Sequence[float]
    workspace: Sequence[float]
    again: Sequence[float]
    kept: Sequence[float]
    workspace_of_kept: Sequence[float]

    @property
    def moved(self) -> list[float]:
        """The most bytes that move with a microbatch of each stage."""
        return [saved + kept for saved, kept in zip(self.saved, self.kept, strict=True)]


def sizes_of_stages(
    shape: Architecture, setting: ActivationSetting, layers: Sequence[int], demand: Demand
) -> StageSizes:
    """Return the sizes of a demand's stages. `setting` recomputes whole stages if any stage of the demand does."""
    saved, workspace, deferred = activations_of(shape, setting).by_stage(layers)
    again, kept, of_kept = ([0.0] * len(layers) for _ in range(3))
    if demand.recomputed_microbatches and setting.recompute.whole_stage:
        plain = replace(setting, recompute=replace(setting.recompute, whole_stage=False))
        of_plain = activations_of(shape, plain).by_stage(layers)
        for stage, recomputed in enumerate(demand.recomputed_microbatches):
            if recomputed:
                kept[stage], of_kept[stage] = of_plain[0][stage] - saved[stage], of_plain[1][stage]
            else:
                saved[stage], workspace[stage], deferred[stage] = (part[stage] for part in of_plain)
    if setting.recompute.whole_stage:
        nothing = activations_of(shape, replace(setting, recompute=NOTHING)).by_stage(layers)[1]
        again = [more - less for more, less in zip(workspace, nothing, strict=True)]
    return StageSizes(saved, deferred, workspace, again, kept, of_kept)


class SavedOnRank(NamedTuple):
    """Bytes that a rank holds at its fullest moment.

    Attributes:
        activations, deferred: bytes that wait for an I or B, and for a W, at the moment when their sum is largest.
        workspace: bytes of a backward's workspace. If the demand has moments, the increase of the peak by it.
    """

    activations: float
    deferred: float
    workspace: float


def saved_on_rank(rank: int, sizes: StageSizes, demand: Demand) -> SavedOnRank:
    """Return what a rank holds for a demand."""
    if demand.moments:
        return _at_moments(rank, sizes, demand)
    at_once = demand.recomputed_microbatches or (1,) * len(sizes.saved)
    trained = [stage for stage in demand.stages_of(rank) if stage >= demand.num_frozen]
    workspaces = [sizes.workspace[each] + max(0, at_once[each] - 1) * sizes.again[each] for each in trained]
    return SavedOnRank(_within_limits(rank, sizes.saved, demand), 0.0, max(workspaces, default=0.0))


def _within_limits(rank: int, saved: Sequence[float], demand: Demand) -> float:
    """Bytes of the microbatches that a rank holds, within the checker's limits for each stage and for the rank.

    Microbatches from the paired rank have the size of its stage. The largest microbatches are counted first.
    """
    sizes, pairs = [], Pairs(demand.rank_of_stage, demand.num_frozen)
    for stage in demand.stages_of(rank):
        peak = demand.saved_microbatches[stage]
        sizes.append((saved[stage], min(peak, demand.own_microbatches[stage])))
        if demand.accepts[rank]:
            sizes.append((saved[pairs.of_stage(stage)], peak))
    total, left = 0.0, demand.saved_on_rank[rank]
    for size, peak in sorted(sizes, reverse=True):
        taken = min(peak, left)
        total, left = total + taken * size, left - taken
    return total


def _at_moments(rank: int, sizes: StageSizes, demand: Demand) -> SavedOnRank:
    """Return the bytes that a rank holds at the fullest moment of a demand.

    At a moment when no microbatch of a stage waits for an I, the stage adds no workspace: a W recomputes nothing.
    Recomputed activations count from R on.
    """
    stages, pairs = demand.stages_of(rank), Pairs(demand.rank_of_stage, demand.num_frozen)
    saved, deferred, again, kept = (
        [of[stage] for stage in stages] for of in (sizes.saved, sizes.deferred, sizes.again, sizes.kept)
    )
    at_work = [sizes.workspace[stage] - sizes.again[stage] for stage in stages]
    accepted = [sizes.moved[pairs.of_stage(stage)] for stage in stages]

    def bytes_at(moment: Moment) -> tuple[float, float, float]:
        of_kept = moment.kept or (0,) * len(stages)
        whole = _sum(moment.saved, saved) + _sum(of_kept, kept) + _sum(moment.accepted, accepted)
        between = _sum(moment.deferred, deferred)
        made = moment.recomputed or [number > 0 for number in moment.saved]
        working = [
            max(work, sizes.workspace_of_kept[stage] * (number > 0))
            for stage, work, any_saved, number in zip(stages, at_work, moment.saved, of_kept, strict=True) if any_saved
        ]  # fmt: skip
        return whole, between, whole + between + _sum(made, again) + max(working, default=0.0)

    found = list(map(bytes_at, demand.moments[rank]))
    whole, between, _ = max(found, key=lambda each: each[0] + each[1])
    return SavedOnRank(whole, between, max(each[2] for each in found) - whole - between)


def _sum(numbers: Sequence[int], sizes: Sequence[float]) -> float:
    return sum(map(mul, numbers, sizes))
