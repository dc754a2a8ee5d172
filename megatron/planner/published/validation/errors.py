"""The error of each measured run, predicted by constants that were not fitted to it.

A run that the calibration was fitted to is predicted by a fit to the others: without it, and without those of the same
degrees and microbatch, which would give it away.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.planner.published.entries import Entry
from megatron.planner.published.fit import fit_questions, questions
from megatron.planner.published.prediction import Prediction, Question
from megatron.planner.time.calibration import Calibration
from megatron.planner.time.constants import Constants

FEWEST_OTHERS = 8
"""Fewer runs than twice the constants of all runs would be met one by one, and say nothing of another."""


@dataclass(frozen=True, kw_only=True)
class RowError:
    """One run. `left_out`: its constants were fitted without it; else they were never fitted to it."""

    prediction: Prediction
    left_out: bool

    @property
    def entry(self) -> Entry:
        return self.prediction.entry

    @property
    def errors(self) -> dict[str, float]:
        """Predicted over measured time less 1."""
        return self.prediction.errors

    @property
    def worst(self) -> float:
        """The largest of them, with its sign."""
        return max(self.errors.values(), key=abs)


def row_errors(entries: Sequence[Entry], calibration: Calibration) -> list[RowError]:
    """The error of every entry whose time was measured and whose configuration can run; of those that were fitted only
    where enough others are there to fit to. Raises ValueError where two have the same id.
    """
    asked = questions(entries)
    fitted = {name: asked[name] for name in calibration.entries if name in asked}
    rows = []
    for name, question in asked.items():
        constants = _without(name, fitted) if name in fitted else calibration.fitted
        if constants is not None:
            rows.append(RowError(prediction=question.predict(constants), left_out=name in fitted))
    return rows


def _without(name: str, fitted: dict[str, Question]) -> Constants | None:
    """A fit that begins where every fit does, so that nothing of this run is in it."""
    alike = _shape(fitted[name].entry)
    others = {key: each for key, each in fitted.items() if _shape(each.entry) != alike}
    return fit_questions(others).constants if len(others) >= FEWEST_OTHERS else None


def _shape(entry: Entry) -> tuple:
    each = entry.configuration
    return entry.model, each.degrees, each.virtual, each.micro_batch_size
