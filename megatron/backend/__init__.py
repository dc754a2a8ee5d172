"""The one room that knows a CPU from a GPU.

Problem: megatron.core is written for CUDA. It asks `torch.cuda` for a device, for random-number states and for
streams in a few dozen places, and dies on a machine that has none.

Solution: `install()`, called once before the first `import megatron.core`. Without CUDA it puts a few stand-ins in
place (`cpu.py`, each with its reason); with CUDA it replaces nothing of torch. On both it repairs the faults that
the wheel has where neither Transformer Engine nor Apex is installed (`fixes.py`). Everything else in the project
asks this module for its device, its process-group backend, its memory and its random numbers.
"""

from megatron.backend.core_wheel import require_core
from megatron.backend.device import (
    device,
    device_bytes,
    device_rng_state,
    is_cuda,
    manual_seed,
    peak_memory_bytes,
    process_group_backend,
    reset_peak_memory,
    set_device_rng_state,
    synchronize,
)
from megatron.backend.host_memory import available_host_bytes, keep_freed_memory
from megatron.backend.install import install, is_installed

__all__ = [
    "available_host_bytes",
    "device",
    "device_bytes",
    "device_rng_state",
    "install",
    "is_cuda",
    "is_installed",
    "keep_freed_memory",
    "manual_seed",
    "peak_memory_bytes",
    "process_group_backend",
    "require_core",
    "reset_peak_memory",
    "set_device_rng_state",
    "synchronize",
]
