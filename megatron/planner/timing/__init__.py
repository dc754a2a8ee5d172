"""The planner's time: what the instructions of a configuration cost, and how long an iteration of them takes."""

from megatron.planner.timing.iteration import IterationTime, closed_form, simulated
from megatron.planner.timing.model import CostModel

__all__ = ["CostModel", "IterationTime", "closed_form", "simulated"]
