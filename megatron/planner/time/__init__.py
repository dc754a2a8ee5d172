"""The time model of the planner: the costs of a configuration's instructions, and the seconds of an iteration."""

from megatron.planner.time.closed_forms import CLOSED_FORMS
from megatron.planner.time.iteration import CostModel, IterationTime, closed_form, priced, simulated
from megatron.planner.time.microbatch_flow import StageTimes

__all__ = ["CLOSED_FORMS", "CostModel", "IterationTime", "StageTimes", "closed_form", "priced", "simulated"]
