"""Holds the planner against published results: errors of time, choices, and what fits."""

from megatron.planner.published.validation.errors import FEWEST_OTHERS, RowError, row_errors
from megatron.planner.published.validation.feasibility import Fact, Judged, judge_facts, load_facts
from megatron.planner.published.validation.report import ValidationOutcome, validate
from megatron.planner.published.validation.selection import TableChoice, choices

__all__ = [
    "FEWEST_OTHERS",
    "Fact",
    "Judged",
    "RowError",
    "TableChoice",
    "ValidationOutcome",
    "choices",
    "judge_facts",
    "load_facts",
    "row_errors",
    "validate",
]
