"""The comparison of evaluations, to notice that evaluations with frozen layers are worse than a user allows.

Problem: a layer that is frozen too early no longer learns. The rule that freezes layers reads only gradients, which do
not show this.

Solution: each evaluation is compared with the best one before it. A lower accuracy or a higher loss shows that freezing
has cost too much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        """The amount by which this evaluation is worse than `best`: the difference of accuracies, or the relative
        difference of losses. A value that is not finite is infinitely worse."""
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
        kept = {"before": self._before, "best": self._best, "last": self._last}
        found = {name: None if each is None else dict(vars(each)) for name, each in kept.items()}
        return {**found, "has_frozen": self._has_frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._has_frozen = bool(state["has_frozen"])
        self._before, self._best, self._last = (
            None if state[name] is None else Validation(**state[name]) for name in ("before", "best", "last")
        )
