"""The stages of a pipeline whose first layers are frozen.

Frozen layers form stages of their own, so no stage is partly frozen. A rank within the frozen prefix has one stage, a
rank after the prefix has one, and a rank in whose layers the prefix ends has two:

    layers 2 2 2 2 of four ranks, 3 frozen    stages 2 | 1 1 | 2 | 2    on ranks 0 | 1 1 | 2 | 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


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
