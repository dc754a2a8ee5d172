"""Holds the planner against published results: errors of time, choices, and what fits."""

from megatron.planner.published.errors import FEWEST_OTHERS, RowError, row_errors
from megatron.planner.published.feasibility import Fact, Judged, judge_facts, load_facts
from megatron.planner.published.report import Outcome, validate
from megatron.planner.published.selection import Choice, choices

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
