"""Layers with experts (mixture of experts): how many experts, how wide, on which layers, and how ranks share them.

As megatron.core has them. A router gives each token to `topk` of the experts of its layer, which are MLPs; the MLP of
such a layer is gone, unless a shared expert stands for it that takes every token. What an expert saves and computes
depends on how many tokens it gets. Balanced load is assumed: each expert gets as many.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import comb


@dataclass(frozen=True, kw_only=True)
class ExpertDegrees:
    """How the experts of a layer lie on ranks.

    Attributes:
        parallel: expert parallel size (ep): so many ranks have different experts.
        tensor: expert tensor parallel size (etp): so many ranks have a part of each.
    """

    parallel: int = 1
    tensor: int = 1


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a model's layers.

    Attributes:
        count: of a layer that has any.
        topk: to how many of them a token goes.
        ffn_hidden_size: width of each.
        shared_ffn_hidden_size: width of the expert that takes all tokens; 0 without one.
        layers: which layers have experts, as Megatron's `--moe-layer-freq`: every n-th from the first on, or a 1 or 0
            for each.
        capacity_factor: how many times its balanced load each expert takes, as padding to the capacity makes it, and as
            dropping lets through at most; None: the balanced load.

    Raises:
        ValueError: a number below 1, more experts for a token than there are, or no pattern.
    """

    count: int
    topk: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    layers: int | tuple[int, ...] = 1
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("count", "topk", "ffn_hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of experts is {getattr(self, name)}, which is below 1; give 1 or more")
        if self.topk > self.count:
            raise ValueError(f"a token goes to {self.topk} of {self.count} experts; lower topk, or give more experts")
        if self.shared_ffn_hidden_size < 0:
            raise ValueError(
                f"the shared expert is {self.shared_ffn_hidden_size} columns wide; give 0 for none, or more"
            )
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(f"the capacity factor is {self.capacity_factor}; give a number above 0, or leave it out")
        if isinstance(self.layers, int) and self.layers < 1:
            raise ValueError(f"every {self.layers}th layer has experts; give 1 or more")
        if not isinstance(self.layers, int) and set(self.layers) - {0, 1}:
            raise ValueError(f"the pattern of layers with experts is {self.layers}; give 1 or 0 for each layer")

    @property
    def copies(self) -> float:
        """Experts for which a token is computed, on average."""
        return self.topk * (1.0 if self.capacity_factor is None else self.capacity_factor)

    def reached(self, groups: int) -> float:
        """In how many of so many groups of equally many experts a token has one, on average, where all choices are
        alike likely."""
        return groups * (1 - comb(self.count - self.count // groups, self.topk) / comb(self.count, self.topk))

    def check_layers(self, num_layers: int) -> None:
        """Raises ValueError where the pattern is not of so many layers."""
        if not isinstance(self.layers, int) and len(self.layers) != num_layers:
            raise ValueError(
                f"the pattern of layers with experts has {len(self.layers)} entries, and the model {num_layers} "
                "layers; give one for each"
            )

    def of_stages(self, layers: Sequence[float]) -> tuple[float, ...]:
        """How many of the layers of each stage have experts. A part of a layer counts as that part."""
        return _of_stages(self, tuple(layers))

    def _first(self, num_layers: float) -> float:
        """Of the first so many layers."""
        whole = int(num_layers)
        if isinstance(self.layers, int):
            return -(-whole // self.layers) + (num_layers - whole) * (whole % self.layers == 0)
        rest = num_layers - whole
        return sum(self.layers[:whole]) + (rest * self.layers[whole] if rest else 0)


@lru_cache(maxsize=256)
def _of_stages(experts: Experts, layers: tuple[float, ...]) -> tuple[float, ...]:
    first = [experts._first(num_layers) for num_layers in accumulate(layers, initial=0)]
    return tuple(end - begin for begin, end in pairwise(first))
