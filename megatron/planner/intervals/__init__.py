"""How far measured times were from predicted ones, by the kind of run, and so how far they may be from a prediction.

kind        what decides how far off a prediction is
residuals   measured over predicted times of published runs, as a file that `validate` writes
interval    from these, the interval of a prediction, or why there is none
coverage    how many of the runs lie in the interval that the others give
"""

from megatron.planner.intervals.interval import LEVEL, Interval, NotValidated, interval_of
from megatron.planner.intervals.residuals import Kind, Residual, Residuals, kind_of, load_residuals

__all__ = [
    "LEVEL",
    "Interval",
    "Kind",
    "NotValidated",
    "Residual",
    "Residuals",
    "interval_of",
    "kind_of",
    "load_residuals",
]
