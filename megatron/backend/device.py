"""Questions about the device, answered alike for CPU and CUDA."""

import os
import resource

import psutil
import torch

from megatron.documents import counted

_STATUS_FILE = "/proc/self/status"
_CLEAR_REFS_FILE = "/proc/self/clear_refs"


def is_cuda() -> bool:
    """True if this process computes on a CUDA device."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device that this process computes on: its current CUDA device, else the CPU."""
    if is_cuda():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def process_group_backend(requested: str | None = None) -> str:
    """The torch.distributed backend to use: "nccl" or "gloo".

    Args:
        requested: "nccl", "gloo", or None for the best that this machine allows: nccl where every rank of the node
            has a GPU of its own (NCCL refuses two ranks on one GPU), else gloo.

    Raises:
        ValueError: an unknown name, or nccl where it cannot work.
    """
    if requested not in (None, "nccl", "gloo"):
        raise ValueError(f"Unknown distributed backend {requested!r}: choose nccl or gloo.")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if requested == "nccl":
        if not is_cuda():
            raise ValueError("The nccl backend needs CUDA, which this machine does not have: choose gloo.")
        if local_ranks > torch.cuda.device_count():
            raise ValueError(
                f"The nccl backend needs a GPU for each rank, but this node has {local_ranks} ranks and "
                f"{counted(torch.cuda.device_count(), 'GPU')}: choose gloo or fewer ranks."
            )
    if requested is not None:
        return requested
    return "nccl" if is_cuda() and local_ranks <= torch.cuda.device_count() else "gloo"


def synchronize() -> None:
    """Wait until the device has finished all work given to it (on a CPU: at once)."""
    if is_cuda():
        torch.cuda.synchronize()


def peak_memory_bytes() -> int:
    """Peak memory since the start or the last `reset_peak_memory`, in bytes.

    CUDA: what torch's allocator had handed out at most. CPU: the largest resident size of the process.
    """
    if is_cuda():
        return torch.cuda.max_memory_allocated()
    try:
        with open(_STATUS_FILE) as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the portable figure below
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_bytes() -> int:
    """All memory of the device. On a CPU: that of the host, which its processes share."""
    return torch.cuda.get_device_properties(device()).total_memory if is_cuda() else psutil.virtual_memory().total


def reset_peak_memory() -> None:
    """Start the measurement of `peak_memory_bytes` anew (on a CPU only where Linux permits it)."""
    if is_cuda():
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        with open(_CLEAR_REFS_FILE, "w") as clear_refs:
            clear_refs.write("5")
    except OSError:
        pass  # the peak then counts from the start of the process


def manual_seed(seed: int) -> None:
    """Seed the generator that the device draws from (dropout, initialisation)."""
    if is_cuda():
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def device_rng_state() -> torch.Tensor:
    """State of the device's generator, a uint8 tensor on the CPU."""
    return torch.cuda.get_rng_state() if is_cuda() else torch.default_generator.get_state()


def set_device_rng_state(state: torch.Tensor) -> None:
    """Restore what `device_rng_state` returned."""
    if is_cuda():
        torch.cuda.set_rng_state(state)
    else:
        torch.default_generator.set_state(state)
