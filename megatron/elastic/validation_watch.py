"""Whether evaluations with frozen layers are worse than a user allows.

Problem: a layer that is frozen too early no longer learns, and the rule that freezes layers reads gradients only, which
do not say so.

Solution: compare each evaluation with the best before it. An accuracy that falls, or a loss that rises, says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WORTH_A_WORD = 0.01
"""The least fall of which a run warns where no tolerance is given."""


@dataclass(frozen=True)
class Validation:
    """One evaluation: an accuracy (a part of 1), or else a loss, by name; how many layers were frozen."""

    name: str
    value: float
    is_accuracy: bool
    iteration: int
    num_frozen: int

    def fall_from(self, best: Validation) -> float:
        """How much worse this is: of accuracies the difference, of losses its share of the best. NaN is infinitely
        worse."""
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
        tolerance: by how much more an evaluation with frozen layers is worse where freezing is to end; below 0, it has
            to be better by so much. None: freezing goes on, and a fall is told.
    """

    def __init__(self, tolerance: float | None) -> None:
        self.tolerance = tolerance
        self.has_fallen = False
        self._has_frozen = False
        self._before: Validation | None = None  # the last before layers froze
        self._best: Validation | None = None
        self._last: Validation | None = None
        self._told: Validation | None = None  # the best that a warning named

    def note(self, found: Validation) -> str | None:
        """Count in an evaluation; all have one name. Sets `has_fallen`, whether freezing is to end. Returns a sentence
        where it is worse than is allowed, or where nothing says how much, than is worth a word; once for each best."""
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
        """The evaluations that say what freezing has cost; None where there was none."""
        if self._last is None or self._best is None:
            return None
        before = "" if self._before in (None, self._best) else f"; before layers froze {self._before}"
        return f"the validation {self._last.name} is {self._last}; at best {self._best}{before}"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain numbers and texts."""
        kept = {"before": self._before, "best": self._best, "last": self._last}
        found = {name: None if each is None else dict(vars(each)) for name, each in kept.items()}
        return {**found, "has_frozen": self._has_frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._has_frozen = bool(state["has_frozen"])
        self._before, self._best, self._last = (
            None if state[name] is None else Validation(**state[name]) for name in ("before", "best", "last")
        )
