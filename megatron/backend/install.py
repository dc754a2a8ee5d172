"""Order of installation: the environment, stand-ins, then megatron.core, then repairs."""

import os
import sys

import torch

from megatron.backend.core_wheel import require_core
from megatron.backend.device import is_cuda

_installed = False


def is_installed() -> bool:
    """True once `install` has run in this process."""
    return _installed


def install() -> None:
    """Make megatron.core usable in this process. Call before the first `import megatron.core`; again is free.

    Raises:
        ValueError: megatron.core is not installed.
        RuntimeError: on a machine without CUDA, if megatron.core was imported earlier: it has then bound names of
            `torch.cuda` that nobody can replace any more.
    """
    global _installed
    if _installed:
        return
    require_core()
    from megatron.backend import cpu

    if not torch.cuda.is_initialized():  # CUDA reads it when it begins; a later value would say what is not so
        # A hardware queue for each stream: reductions run beside computations (pipeline/check/hardware_queues.py).
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        # Loading a kernel at its first launch may wait for the device, where receives spin that were posted ahead.
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
    from megatron.backend import fixes

    fixes.apply()
    _installed = True


def _import_core() -> None:
    import megatron.core
    import megatron.core.models.gpt
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
