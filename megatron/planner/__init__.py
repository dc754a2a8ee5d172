"""The planner: what a configuration needs before it runs. So far its memory; its time and a search are to come.

Pure Python: neither torch nor megatron.core.
"""

from megatron.planner.activations import Activations, ActivationSetting, Recompute
from megatron.planner.architecture import Architecture
from megatron.planner.cluster import Cluster, load_cluster
from megatron.planner.configuration import Configuration
from megatron.planner.demand import Demand, demand_of, most
from megatron.planner.devices import DEVICES, Device, Verdict, device_gib, judge
from megatron.planner.memory import GIB, MemoryParts, RankMemory, estimate_memory
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
    "MemoryParts",
    "RankMemory",
    "Recompute",
    "TrainingState",
    "Verdict",
    "demand_of",
    "device_gib",
    "estimate_memory",
    "judge",
    "load_cluster",
    "most",
]
