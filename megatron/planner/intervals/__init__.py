"""The errors of predicted times by kind of run, and the interval of a new prediction.

residuals   the kinds of runs, and measured over predicted times of published runs, as files that `validate` writes
interval    the interval of a prediction from residuals, or the reason why there is none; and the number of runs that
            lie in the interval of the other runs
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
