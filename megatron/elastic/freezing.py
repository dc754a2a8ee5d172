"""The decisions on frozen layers: rules for their number, and the comparison of evaluations that ends freezing.

A rule decides by gradients (PipeTransformer, section 3.2) or by hand. Layers converge from the input on. At the end of
each interval T the paper freezes

    L_f(T) = min(L_f(T-1) + alpha (L - L_f(T-1)), argmin of the gradient norms of the layers from L_f(T-1) on)

of L layers, with L_f(0) = 0: the layers before the layer with the least gradient norm, but at most a share alpha of the
layers that are not frozen yet. The bound stays a real number, and only the number of layers is rounded down. If the
bound itself were rounded each time, alpha = 1/3 and L = 12 would stop at 10. Without the minimum the bound would be L
(1 - (1 - alpha)^T) (the equation below (1)), which is less than L: the last layer is never frozen. A new rule is a
class in this file with an entry in `RULES`.

A layer that is frozen too early no longer learns, and gradients do not show this. So `ValidationWatch` compares each
evaluation with the best one before it. A lower accuracy or a higher loss shows that freezing has cost too much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class FreezeRule(Protocol):
    """A rule that decides at the end of each interval how many layers are frozen.

    One rank asks the rule and tells the other ranks, since the last bits of norms differ between ranks.
    """

    def decide(self, squared_norms: Sequence[float]) -> int:
        """The number of frozen layers for the next interval: at least as many as before, and fewer than all.

        Args:
            squared_norms: for each layer, the squared norm of its gradients, as the mean over the interval; values of
                frozen layers are ignored.
        """

    def state_dict(self) -> dict[str, Any]:
        """The rule's state for a checkpoint, as plain numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class ByGradients:
    """The paper's rule, by gradient norms.

    Attributes:
        num_layers: L, at least 1.
        alpha: the largest part of the layers that are not frozen yet which an interval freezes, between 0 and 1.
        bound: L_f before it is rounded down.

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
                f"alpha {self.alpha:g} is not a share of the layers that an interval may freeze; give a number between "
                "0 and 1, such as 0.33"
            )

    def decide(self, squared_norms: Sequence[float]) -> int:
        if len(squared_norms) != self.num_layers:
            raise ValueError(f"{len(squared_norms)} norms are given for {self.num_layers} layers; give each its own")
        first = math.floor(self.bound)
        active = range(first, self.num_layers)
        # A norm that overflowed is ignored.
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
    """A rule that freezes a given number of layers after each interval, whatever their gradients.

    Attributes:
        num_layers: number of layers of the model.
        counts: number of frozen layers after interval 1, 2, ...; the last number stays.
        num_intervals: number of intervals decided so far.

    Raises:
        ValueError: there are no counts, or a count is less than the one before, or includes all layers.
    """

    num_layers: int
    counts: tuple[int, ...]
    num_intervals: int = 0

    def __post_init__(self) -> None:
        if not self.counts:
            raise ValueError("a schedule of frozen layers needs a number; give such as 0,4,6")
        for before, count in zip((0, *self.counts), self.counts, strict=False):
            if not before <= count < self.num_layers:
                raise ValueError(
                    f"{count} of {self.num_layers} layers cannot be frozen after {before}: frozen layers stay frozen, "
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
    """The settings from which a rule is made.

    Attributes:
        num_layers: number of layers of the model, at least 1.
        alpha: as in `ByGradients`.
        counts: as in `ByHand`; empty if they are not given.
    """

    num_layers: int
    alpha: float
    counts: tuple[int, ...] = ()


RULES: dict[str, Callable[[FreezeSettings], FreezeRule]] = {
    "gradients": lambda settings: ByGradients(settings.num_layers, settings.alpha),
    "schedule": lambda settings: ByHand(settings.num_layers, settings.counts),
}
"""Value of --freeze-rule -> a function that makes the rule; users add their own.

The function raises ValueError for settings that it cannot use."""


class LayerNorms:
    """The mean of the layers' squared gradient norms over the batches since the last `take`."""

    def __init__(self, num_layers: int) -> None:
        self._sums, self._count = [0.0] * num_layers, 0

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint taken in the middle of an interval must save, as plain numbers."""
        return {"sums": list(self._sums), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sums = list(map(float, state["sums"]))
        if len(sums) != len(self._sums):
            raise ValueError(f"{len(sums)} layers have norms, and the model has {len(self._sums)} layers")
        self._sums, self._count = sums, int(state["count"])

    def add(self, squared_norms: Sequence[float]) -> None:
        """Add the norms of one batch. A batch with a norm that overflowed is ignored."""
        assert len(squared_norms) == len(self._sums)
        if all(map(math.isfinite, squared_norms)):
            self._sums = [total + each for total, each in zip(self._sums, squared_norms, strict=True)]
            self._count += 1

    def take(self) -> tuple[float, ...]:
        """Return the means, and start the next interval. The means are infinite if no batch was added."""
        means = tuple(total / self._count if self._count else math.inf for total in self._sums)
        self._sums, self._count = [0.0] * len(self._sums), 0
        return means


WORTH_A_WORD = 0.01
"""The least fall of an evaluation that is worth a warning if the user gives no tolerance."""


@dataclass(frozen=True)
class Validation:
    """The result of one evaluation: an accuracy (from 0 to 1) or a loss, and the number of frozen layers."""

    name: str
    value: float
    is_accuracy: bool
    iteration: int
    num_frozen: int

    def fall_from(self, best: Validation) -> float:
        """The amount by which this evaluation is worse than `best`; infinite for a value that is not finite.

        The amount is the difference of accuracies, or the relative difference of losses.
        """
        if not math.isfinite(self.value):
            return math.inf
        if self.is_accuracy:
            return best.value - self.value
        return (self.value - best.value) / max(abs(best.value), 1e-12)

    def __str__(self) -> str:
        layers = f"{self.num_frozen or 'no'} layer{'s' * (self.num_frozen > 1)}"
        return f"{self.value:.4f} at iteration {self.iteration} with {layers} frozen"


class ValidationWatch:
    """Compares each evaluation with the best before it.

    Args:
        tolerance: freezing ends if an evaluation with frozen layers is worse by more than this. With a negative
            tolerance each evaluation has to be better by that amount. None: freezing continues, and a fall is only
            reported.
    """

    def __init__(self, tolerance: float | None) -> None:
        self.tolerance = tolerance
        self.has_fallen = False
        self._has_frozen = False
        self._before: Validation | None = None  # the last evaluation before layers froze
        self._best: Validation | None = None
        self._last: Validation | None = None
        self._told: Validation | None = None  # the best evaluation that the last warning named

    def note(self, found: Validation) -> str | None:
        """Note an evaluation; all evaluations must have one name. Sets `has_fallen`, whether freezing must end.

        Returns a warning if the evaluation is worse than the tolerance allows. Without a tolerance, a fall above
        `WORTH_A_WORD` gives a warning, once for each best evaluation.
        """
        best, warning = self._best, None
        fall = -math.inf if best is None or not found.num_frozen else found.fall_from(best)
        self._has_frozen |= found.num_frozen > 0
        if not self._has_frozen:
            self._before = found
        self._last = found
        if math.isfinite(found.value) and (best is None or found.fall_from(best) < 0):
            self._best = found
        self.has_fallen = self.tolerance is not None and fall > self.tolerance
        if self.has_fallen or (self.tolerance is None and fall > WORTH_A_WORD and self._told != best):
            self._told = best
            gain = -(self.tolerance or 0.0)
            by = f"{gain:g}" if found.is_accuracy else f"{100 * gain:g}%"
            asks = f"should be better by {by} than" if gain > 0 else "was"
            warning = f"the validation {found.name} is {found}, and {asks} {best}"
        return warning

    def summary(self) -> str | None:
        """A sentence with the last, the best and the last unfrozen evaluation; None if there was no evaluation."""
        if self._last is None or self._best is None:
            return None
        before = "" if self._before in (None, self._best) else f"; before layers froze {self._before}"
        return f"the validation {self._last.name} is {self._last}; at best {self._best}{before}"

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, as plain numbers and texts."""
        kept = {"before": self._before, "best": self._best, "last": self._last, "told": self._told}
        found = {name: None if each is None else dict(vars(each)) for name, each in kept.items()}
        return {**found, "has_frozen": self._has_frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._has_frozen = bool(state["has_frozen"])
        kept = (state["before"], state["best"], state["last"], state.get("told"))  # older checkpoints have no "told"
        self._before, self._best, self._last, self._told = (
            None if each is None else Validation(**each) for each in kept
        )
