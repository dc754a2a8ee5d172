"""The planner: what a configuration needs before it runs, memory and time (docs/planner.md).

Pure Python: neither torch nor megatron.core.
"""

from megatron.planner.activations import Activations, ActivationSetting, Recompute
from megatron.planner.architecture import Architecture
from megatron.planner.cluster import Cluster, load_cluster
from megatron.planner.configuration import Configuration
from megatron.planner.demand import Demand, demand_of, most
from megatron.planner.devices import DEVICES, Device, Verdict, device_gib, judge
from megatron.planner.estimate import Estimate
from megatron.planner.memory import GIB, MemoryParts, RankMemory, estimate_memory
from megatron.planner.planner import Planner
from megatron.planner.software import Software
from megatron.planner.state import TrainingState

__all__ = [
    "DEVICES",
    "GIB",
    "ActivationSetting",
    "Activations",
    "Architecture",
    "Cluster",
    "Configuration",
    "Demand",
    "Device",
    "Estimate",
    "MemoryParts",
    "Planner",
    "RankMemory",
    "Recompute",
    "Software",
    "TrainingState",
    "Verdict",
    "demand_of",
    "device_gib",
    "estimate_memory",
    "judge",
    "load_cluster",
    "most",
]
