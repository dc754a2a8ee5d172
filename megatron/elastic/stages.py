"""The stages of a pipeline whose first layers are frozen.

Frozen layers form stages of their own, so no stage is partly frozen. A rank within the frozen prefix has one stage, a
rank after the prefix has one, and a rank in whose layers the prefix ends has two:

    layers 2 2 2 2 of four ranks, 3 frozen    stages 2 | 1 1 | 2 | 2    on ranks 0 | 1 1 | 2 | 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any


@dataclass(frozen=True)
class Stages:
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


def stages_of(layers_of_rank: Sequence[int], num_frozen: int) -> Stages:
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
    return Stages(tuple(layers), tuple(ranks), frozen)


@dataclass(frozen=True)
class Arrangement:
    """One arrangement of a job.

    Attributes:
        pipeline, data: ranks of a pipeline, and how many pipelines there are.
        micro_batch_size: samples.
        layers_of_rank: of the pipeline.
        num_frozen: layers in front.
        cached: what they put out is read from a cache; then they are all on the first rank.
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
    def stages(self) -> Stages:
        return stages_of(self.layers_of_rank, self.num_frozen)

    @property
    def ranks(self) -> tuple[int, int, bool]:
        """What process groups depend on."""
        return self.pipeline, self.data, self.pipelines_in_a_row

    def with_frozen(self, num_frozen: int) -> Arrangement:
        """This arrangement with so many frozen layers."""
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
        """What `state_dict` has made. Raises ValueError, TypeError or KeyError where it is something else."""
        found = cls(**{**state, "layers_of_rank": tuple(map(int, state["layers_of_rank"]))})
        if len(found.layers_of_rank) != found.pipeline:
            raise ValueError(f"{found.pipeline} ranks have {len(found.layers_of_rank)} numbers of layers")
        stages_of(found.layers_of_rank, found.num_frozen)
        return found
