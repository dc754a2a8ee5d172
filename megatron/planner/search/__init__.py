"""Search: finds the degrees, microbatch, schedule and recompute scope that train a model fastest on a cluster.

space      the values to try, and the schedules by name
rules      the reasons why a choice cannot run
explore    enumeration, memory before time, early stopping
search     ranking, and simulation of the best
outcome    the configurations kept and the choices rejected
"""

from megatron.planner.search.outcome import Choice, Kept, Outcome, Rejected
from megatron.planner.search.rules import Training
from megatron.planner.search.search import search
from megatron.planner.search.space import RANK_MAPPINGS, SCOPES, Space, offered

__all__ = ["RANK_MAPPINGS", "SCOPES", "Choice", "Kept", "Outcome", "Rejected", "Space", "Training", "offered", "search"]
