"""Holds the planner against published results: errors of time, choices, and what fits."""

from megatron.planner.published.errors import FEWEST_OTHERS, RowError, row_errors
from megatron.planner.published.feasibility import Fact, Judged, judge_facts, load_facts
from megatron.planner.published.report import ValidationOutcome, validate
from megatron.planner.published.selection import TableChoice, choices

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
