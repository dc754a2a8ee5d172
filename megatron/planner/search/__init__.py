"""Search: which degrees, microbatch, schedule and recompute scope train a model fastest on a cluster.

space      what is considered, and the schedules by name
rules      what cannot run, and why
explore    enumeration, memory first, early stopping
search     ranking, and simulation of the best
outcome    what was kept and what was rejected
"""

from megatron.planner.search.outcome import Choice, Kept, Outcome, Rejected
from megatron.planner.search.rules import Training
from megatron.planner.search.search import search
from megatron.planner.search.space import RANK_MAPPINGS, SCOPES, Space, offered

__all__ = [
    "RANK_MAPPINGS",
    "SCOPES",
    "Choice",
    "Kept",
    "Outcome",
    "Rejected",
    "Space",
    "Training",
    "offered",
    "search",
]
