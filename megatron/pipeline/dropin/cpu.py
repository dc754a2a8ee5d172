"""Their unmodified training on a machine without CUDA.

Problem: Megatron-LM's training asks for CUDA, NCCL, compiled kernels and triton. So nobody could try a job, or a
schedule, without a GPU.

Solution: `megatron.backend` makes megatron.core usable there. What their training asks for beyond that is put in place
here, in the process only: no file of theirs is changed. With CUDA nothing of this file is used.
"""

import functools
import sys
from types import SimpleNamespace

import torch

from megatron import backend
from megatron.pipeline.dropin import dataset_helpers, triton_stand_in
from megatron.pipeline.dropin.sentences import say


def install(*, quiet: bool = False) -> None:
    """Without CUDA: make their training usable on the CPU, with gloo, and import it. With CUDA: nothing.

    Args:
        quiet: no line on rank 0.

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
    triton_stand_in.install()
    _pretend_one_device()
    _take_gloo()
    backend.install()
    import megatron.training.initialize
    import megatron.training.training

    megatron.training.initialize._compile_dependencies = dataset_helpers.provide
    _allow_no_cuda(megatron.training.initialize.initialize_megatron)
    if not quiet:
        say("no CUDA here: the CPU layer is installed; training runs on the CPU, with gloo where nccl is asked for")


def _pretend_one_device() -> None:
    torch.cuda.device_count = lambda: 1  # with none they set up neither model parallelism nor random numbers
    # Asked for its generation: from 10 on, no order of launches is demanded through CUDA_DEVICE_MAX_CONNECTIONS.
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name="CPU", major=10, minor=0, total_memory=backend.device_bytes(), multi_processor_count=1
    )
    torch.cuda.get_device_capability = lambda device=None: (10, 0)
    torch.cuda.set_stream = lambda stream: None
    torch.cuda.device_memory_used = lambda device=None: 0  # a column of their memory report


def _take_gloo() -> None:
    """nccl is their default and cannot work here."""
    form_group = torch.distributed.init_process_group

    @functools.wraps(form_group)
    def with_gloo(backend=None, *args, device_id=None, **kwargs):
        return form_group("gloo" if backend in (None, "nccl") else backend, *args, **kwargs)

    torch.distributed.init_process_group = with_gloo


def _allow_no_cuda(initialize) -> None:
    """Wherever the function is known by its name."""
    allowed = functools.partial(initialize, allow_no_cuda=True)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and getattr(module, initialize.__name__, None) is initialize:
            setattr(module, initialize.__name__, allowed)
