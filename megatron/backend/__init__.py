"""The only folder that distinguishes a CPU from a GPU.

Problem: megatron.core is written for CUDA. It asks `torch.cuda` for a device, for random-number states and for
streams in a few dozen places, and fails on a machine without CUDA.

Solution: `install()`, called once before the first `import megatron.core`. It sets the environment, puts a few
stand-ins in place if there is no CUDA (`cpu.py`, each with its reason), imports megatron.core, and repairs the faults
that the wheel has without Transformer Engine and Apex (`fixes.py`). With CUDA it replaces nothing of torch but the
device of gloo groups (`gloo.py`). Everything else in the project asks this module for the device, the process-group
backend, the memory and the random numbers.
"""

import os
import sys
from importlib.util import find_spec

import torch

from megatron.backend.device import (
    available_host_bytes,
    device,
    device_bytes,
    device_rng_state,
    is_cuda,
    keep_freed_memory,
    manual_seed,
    peak_memory_bytes,
    process_group_backend,
    reset_peak_memory,
    set_device_rng_state,
    synchronize,
)

_installed = False


def is_installed() -> bool:
    """Whether `install` has run in this process."""
    return _installed


def install() -> None:
    """Make megatron.core usable in this process.

    Call it before the first `import megatron.core`. Later calls are no-ops.

    Raises:
        ValueError: megatron.core is not installed.
        RuntimeError: on a machine without CUDA, if megatron.core was imported earlier: its modules then hold names of
            `torch.cuda` that cannot be replaced any more.
    """
    global _installed
    if _installed:
        return
    require_core()
    from megatron.backend import cpu

    if not torch.cuda.is_initialized():  # CUDA reads these variables once, so a value set later would be misleading
        # A hardware queue for each stream: reductions run beside computations (pipeline/check/hardware_queues.py).
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        # Loading a kernel at its first launch may wait for the device, which is busy with receives posted ahead.
        if os.environ.get("WORLD_SIZE", "1") != "1":
            os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    if is_cuda():
        _import_core()
    else:
        if "megatron.core" in sys.modules:
            raise RuntimeError(
                "megatron.core was imported before megatron.backend.install(): call install() first, at the top of "
                "the program, since without CUDA megatron.core needs stand-ins at import time."
            )
        cpu.install_stand_ins()
        with cpu.import_stand_ins():
            _import_core()
    from megatron.backend import fixes, gloo

    fixes.apply()
    gloo.share_device()
    _installed = True


def require_core() -> None:
    """Check that megatron.core is there, from the extra `core` or in a Megatron-LM checkout, without importing it.

    Raises:
        ValueError: megatron.core is not installed.
    """
    if find_spec("megatron.core") is None:
        raise ValueError(
            "megatron.core is not installed, and training needs it; pip install '.[core]', or run "
            "from a Megatron-LM checkout through python -m megatron.pipeline.dropin"
        )


def _import_core() -> None:
    import megatron.core
    import megatron.core.models.gpt
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
