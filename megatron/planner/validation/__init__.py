"""Holds the planner against published results: errors of time, choices, and what fits."""

from megatron.planner.validation.errors import FEWEST_OTHERS, RowError, row_errors
from megatron.planner.validation.feasibility import Fact, Judged, judge_facts, load_facts
from megatron.planner.validation.report import Outcome, validate
from megatron.planner.validation.selection import Choice, choices

__all__ = [
    "FEWEST_OTHERS",
    "Choice",
    "Fact",
    "Judged",
    "Outcome",
    "RowError",
    "choices",
    "judge_facts",
    "load_facts",
    "row_errors",
    "validate",
]
