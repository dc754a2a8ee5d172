"""The planner: predicts the memory and the time of a configuration before it runs (docs/planner.md).

The planner is pure Python: it imports neither torch nor megatron.core.
"""

from megatron.planner.job.cluster import Cluster, load_cluster
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.devices import DEVICES, Device, device_gib
from megatron.planner.job.estimate import Estimate, Verdict, judge
from megatron.planner.job.software import Software
from megatron.planner.memory.activations import Activations, ActivationSetting
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.demand import Demand, most
from megatron.planner.memory.memory import GIB, MemoryParts, RankMemory, estimate_memory
from megatron.planner.memory.parameters import TrainingState
from megatron.planner.memory.recompute import Recompute
from megatron.planner.memory.schedule_demand import demand_of
from megatron.planner.planner import Planner

__all__ = [
    "DEVICES", "GIB", "ActivationSetting", "Activations", "Architecture", "Cluster", "Configuration", "Demand",
    "Device", "Estimate", "MemoryParts", "Planner", "RankMemory", "Recompute", "Software", "TrainingState", "Verdict",
    "demand_of", "device_gib", "estimate_memory", "judge", "load_cluster", "most",
]  # fmt: skip
