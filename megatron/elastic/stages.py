"""The division of layers among ranks, and the stages of a pipeline whose first layers are frozen.

Units are divided such that the busiest rank has the least possible work:

    5 1 1 1 4 3 on 3 ranks    exactly    5 1 | 1 1 4 | 3    busiest 6
                              greedily   5 | 1 1 1 4 | 3    busiest 7

The exact way is dynamic programming: the best cut of the first n units for k ranks is the best cut of fewer units for
k-1 ranks, and the rest for the last rank. PipeTransformer (section 3.3) uses the greedy way: it fills one rank after
the other up to the mean of the remaining work.

Frozen layers form stages of their own, so no stage is partly frozen. A rank within the frozen prefix has one stage, a
rank after the prefix has one, and a rank in whose layers the prefix ends has two:

    layers 2 2 2 2 of four ranks, 3 frozen    stages 2 | 1 1 | 2 | 2    on ranks 0 | 1 1 | 2 | 3
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

_EQUAL = 1 + 5e-14  # sums of the same times differ in their last bits


def cut_exactly(work: Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """The number of units of each rank, at least 1, such that the busiest rank has the least work.

    Of several such cuts, the result gives the most units to the first ranks.

    Raises:
        ValueError: there are fewer units than ranks, or a unit's work is negative or not finite.
    """
    counts = cut_that_fits(work, num_ranks, lambda rank, begin, end: True)
    assert counts is not None
    return counts


def cut_that_fits(
    work: Sequence[float], num_ranks: int, fits: Callable[[int, int, int], bool]
) -> tuple[int, ...] | None:
    """The best cut (see `cut_exactly`) among those that fit into the memory of the ranks; None if no cut fits.

    Args:
        fits: (rank, begin, end) -> whether the rank may have units `begin` to `end` - 1. Ranks and units count from 0.
    """
    _check(work, num_ranks)
    total = [0.0, *accumulate(work)]
    num_units = len(work)
    best = [0.0, *([math.inf] * num_units)]  # by n, the busiest rank's work for the first n units on the ranks so far
    begins: list[list[int]] = []  # for 1, 2, ... ranks, by n: the first unit of the last rank
    for rank in range(1, num_ranks + 1):
        now, chosen = [math.inf] * (num_units + 1), [0] * (num_units + 1)
        for end in range(rank, num_units + 1):
            for begin in range(rank - 1, end):
                busiest = max(best[begin], total[end] - total[begin])
                if busiest < math.inf and busiest <= now[end] * _EQUAL and fits(rank - 1, begin, end):
                    now[end], chosen[end] = min(busiest, now[end]), begin
        best = now
        begins.append(chosen)
    if best[num_units] == math.inf:
        return None
    counts, end = [], num_units
    for chosen in reversed(begins):
        counts.append(end - chosen[end])
        end = chosen[end]
    return tuple(reversed(counts))


def cut_greedily(work: Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """The number of units of each rank, cut in the paper's way.

    A rank takes units up to the mean of the remaining work over this rank and the later ones.

    Raises:
        ValueError: as `cut_exactly`.
    """
    _check(work, num_ranks)
    counts, begin = [], 0
    for rank in range(num_ranks):
        behind = num_ranks - rank - 1
        mean = math.fsum(work[begin:]) / (behind + 1)
        end, taken = begin + 1, work[begin]
        while end < len(work) - behind and (not behind or taken + work[end] / 2 <= mean):
            taken += work[end]
            end += 1
        counts.append(end - begin)
        begin = end
    return tuple(counts)


def _check(work: Sequence[float], num_ranks: int) -> None:
    if not 1 <= num_ranks <= len(work):
        raise ValueError(
            f"{len(work)} units cannot be shared out to {num_ranks} ranks, each of which needs one; give 1 to "
            f"{len(work)} ranks"
        )
    for place, each in enumerate(work):
        if not 0.0 <= each < math.inf:
            raise ValueError(f"unit {place} has work {each:g}; give a number of 0 and more")


@dataclass(frozen=True)
class StageLayers:
    """The number of layers and the rank of each stage.

    Attributes:
        layers: number of layers of each stage.
        rank_of_stage: pipeline rank of each stage.
        num_frozen: number of frozen stages, which come first.
    """

    layers: tuple[int, ...]
    rank_of_stage: tuple[int, ...]
    num_frozen: int

    @property
    def num_stages(self) -> int:
        return len(self.layers)


def cut_at_frozen(layers_of_rank: Sequence[int], num_frozen: int) -> StageLayers:
    """The stages of ranks with `layers_of_rank` layers each, of which the first `num_frozen` layers are frozen.

    Raises:
        ValueError: a rank has no layer, all layers are frozen, or `num_frozen` is negative.
    """
    if min(layers_of_rank) < 1:
        raise ValueError(
            f"the ranks of the pipeline have {', '.join(map(str, layers_of_rank))} layers, and where layers freeze or "
            "the pipeline changes each needs one; cut it otherwise, or over fewer ranks"
        )
    num_layers = sum(layers_of_rank)
    if not 0 <= num_frozen < num_layers:
        raise ValueError(f"{num_frozen} of {num_layers} layers cannot be frozen; give 0 to {num_layers - 1}")
    layers, ranks, frozen = [], [], 0
    for rank, (begin, end) in enumerate(pairwise(accumulate(layers_of_rank, initial=0))):
        border = min(max(num_frozen, begin), end)
        for first, last in ((begin, border), (border, end)):
            if first < last:
                layers.append(last - first)
                ranks.append(rank)
                frozen += last <= num_frozen
    return StageLayers(tuple(layers), tuple(ranks), frozen)


@dataclass(frozen=True)
class Arrangement:
    """One arrangement of a job.

    Attributes:
        pipeline, data: the number of ranks of a pipeline, and the number of pipelines.
        micro_batch_size: samples of a microbatch.
        layers_of_rank: number of layers of each rank of the pipeline.
        num_frozen: number of frozen layers, which are the first ones.
        cached: the output of the frozen layers is read from a cache; these layers are then all on the first rank.
        pipelines_in_a_row: the ranks of a pipeline follow each other, and not the replicas of a stage.
    """

    pipeline: int
    data: int
    micro_batch_size: int
    layers_of_rank: tuple[int, ...]
    num_frozen: int = 0
    cached: bool = False
    pipelines_in_a_row: bool = False

    @property
    def stages(self) -> StageLayers:
        return cut_at_frozen(self.layers_of_rank, self.num_frozen)

    @property
    def ranks(self) -> tuple[int, int, bool]:
        """The values on which process groups depend: ranks of a pipeline, number of pipelines, and their order."""
        return self.pipeline, self.data, self.pipelines_in_a_row

    def with_frozen(self, num_frozen: int) -> Arrangement:
        """This arrangement with `num_frozen` frozen layers."""
        return replace(self, num_frozen=num_frozen)

    def __str__(self) -> str:
        stages, ranks, word = self.stages, [], " cached" if self.cached else " frozen"
        for rank in range(self.pipeline):
            own = [
                f"{layers}{word * (stage < stages.num_frozen)}"
                for stage, (layers, at) in enumerate(zip(stages.layers, stages.rank_of_stage, strict=True))
                if at == rank
            ]
            ranks.append(" + ".join(own))
        return ", ".join(ranks)

    def state_dict(self) -> dict[str, Any]:
        """The arrangement for a checkpoint, as plain numbers."""
        return {**asdict(self), "layers_of_rank": list(self.layers_of_rank)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Arrangement:
        """The arrangement that `state_dict` has saved. Raises ValueError, TypeError or KeyError for another value."""
        found = cls(**{**state, "layers_of_rank": tuple(map(int, state["layers_of_rank"]))})
        if len(found.layers_of_rank) != found.pipeline:
            raise ValueError(f"{found.pipeline} ranks have {len(found.layers_of_rank)} numbers of layers")
        cut_at_frozen(found.layers_of_rank, found.num_frozen)
        return found
