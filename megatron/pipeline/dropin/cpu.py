"""A user's unmodified Megatron-LM training on a machine without CUDA.

Problem: Megatron-LM's training asks for CUDA, NCCL, compiled kernels and triton. So nobody could try a job, or a
schedule, without a GPU.

Solution: `megatron.backend` makes megatron.core usable on the CPU. This module replaces what Megatron-LM's training
needs beyond megatron.core, in the process only: no file of the checkout is changed. Some modules of Megatron-LM always
import triton. A stand-in module takes triton's place: every name exists there and can decorate or describe a kernel,
and launching a kernel raises an error. torch decides before the stand-in is set up whether triton exists, and works
without it. With CUDA nothing of this file is used.

When it starts, Megatron-LM's training compiles the helpers of megatron.core's datasets into the checkout by `make`, and
older versions then compile fused CUDA kernels. In their place comes `megatron.pipeline.start_up.dataset_helpers`.
"""

import functools
import sys
from types import SimpleNamespace

import torch

from megatron import backend
from megatron.backend.triton_stand_in import stand_in_for_triton
from megatron.pipeline.dropin.sentences import errors_end_the_job, say
from megatron.pipeline.start_up import dataset_helpers


def install(*, quiet: bool = False) -> None:
    """Make Megatron-LM's training usable on the CPU, with gloo, and import it. A no-op with CUDA.

    Args:
        quiet: whether rank 0 writes no line.

    Raises:
        ValueError: megatron.core was imported before.
    """
    if backend.is_cuda():
        return
    if "megatron.core" in sys.modules and not backend.is_installed():
        raise ValueError(
            "megatron.core was imported before megatron.pipeline.dropin.install(), and without CUDA it needs stand-ins "
            "at its import; call install() before the first import of Megatron"
        )
    stand_in_for_triton()
    _pretend_one_device()
    _take_gloo()
    backend.install()
    import megatron.training.initialize
    import megatron.training.training

    megatron.training.initialize._compile_dependencies = errors_end_the_job()(dataset_helpers.provide)
    _allow_no_cuda(megatron.training.initialize.initialize_megatron)
    if not quiet:
        say("no CUDA here: the CPU layer is installed; training runs on the CPU, with gloo where nccl is asked for")


def _pretend_one_device() -> None:
    # With no device Megatron-LM sets up neither model parallelism nor random numbers.
    torch.cuda.device_count = lambda: 1
    # From generation 10 on, Megatron-LM does not demand an order of launches through CUDA_DEVICE_MAX_CONNECTIONS.
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name="CPU", major=10, minor=0, total_memory=backend.device_bytes(), multi_processor_count=1
    )
    torch.cuda.get_device_capability = lambda device=None: (10, 0)
    torch.cuda.set_stream = lambda stream: None
    torch.cuda.device_memory_used = lambda device=None: 0  # a column of Megatron-LM's memory report


def _take_gloo() -> None:
    """Use gloo for process groups that ask for nccl, Megatron-LM's default, which needs CUDA."""
    form_group = torch.distributed.init_process_group

    @functools.wraps(form_group)
    def with_gloo(backend=None, *args, device_id=None, **kwargs):
        return form_group("gloo" if backend in (None, "nccl") else backend, *args, **kwargs)

    torch.distributed.init_process_group = with_gloo


def _allow_no_cuda(initialize) -> None:
    """Replace `initialize`, in every module of megatron that has imported it, by a version that allows no CUDA."""
    allowed = functools.partial(initialize, allow_no_cuda=True)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and getattr(module, initialize.__name__, None) is initialize:
            setattr(module, initialize.__name__, allowed)
