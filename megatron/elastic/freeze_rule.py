"""How many layers are frozen: by their gradients (PipeTransformer, section 3.2), or as a user says.

Layers converge from the input on. At the end of each interval T the paper freezes

    L_f(T) = min(L_f(T-1) + alpha (L - L_f(T-1)), argmin of the gradient norms of the layers from L_f(T-1) on)

of L layers, L_f(0) = 0: those in front of the layer that learns least, and never more than a share alpha of what is
left. The bound stays a real number and only the number of layers is rounded down; rounded each time, alpha = 1/3 and
L = 12 would stop at 10. So the bound alone comes to L (1 - (1 - alpha)^T) (the equation below (1)), which is less than
L: the last layer is never frozen.

A rule of one's own is one more class here: enter it into `RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class FreezeRule(Protocol):
    """Decides at the end of each interval. Asked on one rank, which tells the others: last bits of norms differ."""

    def decide(self, squared_norms: Sequence[float]) -> int:
        """How many layers are frozen from now on, no fewer than before and fewer than all.

        Args:
            squared_norms: of the gradients of each layer, the mean over the interval; of frozen layers anything.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class ByGradients:
    """The paper's rule.

    Attributes:
        num_layers: L, 1 and more.
        alpha: of the layers that are left, the largest part that an interval freezes, between 0 and 1.
        bound: L_f before it is rounded.

    Raises:
        ValueError: alpha is not between 0 and 1.
    """

    num_layers: int
    alpha: float
    bound: float = 0.0

    def __post_init__(self) -> None:
        assert self.num_layers >= 1
        if not 0.0 < self.alpha < 1.0:
            raise ValueError(
                f"alpha {self.alpha:g} is no part of the layers that an interval may freeze; give a number between 0 "
                "and 1, such as 0.33"
            )

    def decide(self, squared_norms: Sequence[float]) -> int:
        if len(squared_norms) != self.num_layers:
            raise ValueError(f"{len(squared_norms)} norms are given for {self.num_layers} layers; give each its own")
        first = math.floor(self.bound)
        active = range(first, self.num_layers)
        # What overflowed says nothing, and is not the least.
        known = {layer: squared_norms[layer] for layer in active if math.isfinite(squared_norms[layer])}
        if known:
            least = min(known, key=lambda layer: (known[layer], layer))
            self.bound = max(self.bound, min(self.bound + self.alpha * (self.num_layers - self.bound), least))
        return math.floor(self.bound)

    def state_dict(self) -> dict[str, Any]:
        return {"bound": self.bound}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bound = float(state["bound"])


@dataclass
class ByHand:
    """Freezes so many layers after each interval, whatever their gradients.

    Attributes:
        num_layers: of the model.
        counts: behind interval 1, 2, ...; the last one stays.

    Raises:
        ValueError: no counts, fewer than before, or all layers.
    """

    num_layers: int
    counts: tuple[int, ...]
    num_intervals: int = field(default=0)

    def __post_init__(self) -> None:
        if not self.counts:
            raise ValueError("a schedule of frozen layers needs a number; give such as 0,4,6")
        for before, count in zip((0, *self.counts), self.counts, strict=False):
            if not before <= count < self.num_layers:
                raise ValueError(
                    f"{count} of {self.num_layers} layers cannot be frozen behind {before}: what is frozen stays so, "
                    f"and one layer has to be trained; give {before} to {self.num_layers - 1}"
                )

    def decide(self, squared_norms: Sequence[float]) -> int:
        self.num_intervals += 1
        return self.counts[min(self.num_intervals, len(self.counts)) - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"num_intervals": self.num_intervals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_intervals = int(state["num_intervals"])


@dataclass(frozen=True)
class FreezeSettings:
    """What a rule is made of.

    Attributes:
        num_layers: of the model, 1 and more.
        alpha: as of `ByGradients`.
        counts: as of `ByHand`; none are given.
    """

    num_layers: int
    alpha: float
    counts: tuple[int, ...] = ()


RULES: dict[str, Callable[[FreezeSettings], FreezeRule]] = {
    "gradients": lambda settings: ByGradients(settings.num_layers, settings.alpha),
    "schedule": lambda settings: ByHand(settings.num_layers, settings.counts),
}
"""Value of --freeze-rule -> what makes the rule. Raises ValueError for settings that it cannot use."""


class LayerNorms:
    """The mean of the layers' squared gradient norms since it was last taken."""

    def __init__(self, num_layers: int) -> None:
        self._sums, self._count = [0.0] * num_layers, 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint within an interval keeps, as plain numbers."""
        return {"sums": list(self._sums), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sums = list(map(float, state["sums"]))
        if len(sums) != len(self._sums):
            raise ValueError(f"{len(sums)} layers have norms, and the model has {len(self._sums)} layers")
        self._sums, self._count = sums, int(state["count"])

    def add(self, squared_norms: Sequence[float]) -> None:
        """Add the norms of one batch; one that overflowed is left out."""
        assert len(squared_norms) == len(self._sums)
        if all(map(math.isfinite, squared_norms)):
            self._sums = [total + each for total, each in zip(self._sums, squared_norms, strict=True)]
            self._count += 1

    def take(self) -> tuple[float, ...]:
        """The means, and begin anew; infinite where there was no batch."""
        means = tuple(total / self._count if self._count else math.inf for total in self._sums)
        self._sums, self._count = [0.0] * len(self._sums), 0
        return means
