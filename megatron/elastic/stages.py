"""The stages of a pipeline whose first layers are frozen.

What is frozen is stages of its own, and no stage is half frozen. So a rank of the prefix has one stage, a rank behind
it one, and the rank where the prefix ends within its layers both:

    layers 2 2 2 2 of four ranks, 3 frozen    stages 2 | 1 1 | 2 | 2    on ranks 0 | 1 1 | 2 | 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Stages:
    """Which layers each stage has, and which rank has the stage.

    Attributes:
        layers: how many, of each stage.
        rank_of_stage: of the pipeline.
        num_frozen: stages in front that are frozen.
    """

    layers: tuple[int, ...]
    rank_of_stage: tuple[int, ...]
    num_frozen: int

    @property
    def num_stages(self) -> int:
        return len(self.layers)


def stages_of(layers_of_rank: Sequence[int], num_frozen: int) -> Stages:
    """The stages of ranks with so many layers each, of which the first `num_frozen` layers are frozen.

    Raises:
        ValueError: a rank has no layer, all layers are frozen, or fewer than none.
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
