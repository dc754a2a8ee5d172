"""The device's properties through one interface for CPU and CUDA, and the memory of the host.

Problem: glibc returns freed memory to the system: large blocks, and the top of its heap once enough of it is free. A
training step frees its activations and allocates the same amount again, so every microbatch pays for page faults and
for zeroed pages. With small models that is a tenth of a backward.

Solution: glibc keeps freed memory for the next allocation, as torch's allocator does on a GPU (`keep_freed_memory`).
"""

import contextlib
import ctypes
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch import Tensor

from megatron.documents import counted

_STATUS_FILE = "/proc/self/status"
_CLEAR_REFS_FILE = "/proc/self/clear_refs"


def is_cuda() -> bool:
    """Whether this process computes on a CUDA device."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device that this process computes on: its current CUDA device, else the CPU."""
    if is_cuda():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def process_group_backend(requested: str | None = None) -> str:
    """The torch.distributed backend to use: "nccl" or "gloo".

    Args:
        requested: "nccl", "gloo", or None for the best that this machine allows: nccl if every rank of the node
            has a GPU of its own (NCCL refuses two ranks on one GPU), else gloo.

    Raises:
        ValueError: the name is unknown, or nccl cannot work on this machine.
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
    """Wait until the device has finished all work given to it; a no-op on a CPU."""
    if is_cuda():
        torch.cuda.synchronize()


def peak_memory_bytes() -> int:
    """Peak memory since the start or the last `reset_peak_memory`, in bytes.

    CUDA: the most memory that torch's allocator had allocated. CPU: the largest resident size of the process.
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
    """The total memory of the device, in bytes; on a CPU the memory of the host, which all its processes share."""
    return torch.cuda.get_device_properties(device()).total_memory if is_cuda() else psutil.virtual_memory().total


def reset_peak_memory() -> None:
    """Restart the measurement of `peak_memory_bytes`; a no-op on a CPU if Linux does not permit it."""
    if is_cuda():
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        with open(_CLEAR_REFS_FILE, "w") as clear_refs:
            clear_refs.write("5")
    except OSError:
        pass  # the peak then counts from the start of the process


def manual_seed(seed: int) -> None:
    """Seed the device's random-number generator (dropout, initialisation)."""
    if is_cuda():
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def device_rng_state() -> torch.Tensor:
    """The state of the device's random-number generator, a uint8 tensor on the CPU."""
    return torch.cuda.get_rng_state() if is_cuda() else torch.default_generator.get_state()


def set_device_rng_state(state: torch.Tensor) -> None:
    """Restore a state that `device_rng_state` returned."""
    if is_cuda():
        torch.cuda.set_rng_state(state)
    else:
        torch.default_generator.set_state(state)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_MOST_ON_HEAP = (1 << 30, 1 << 25)  # bytes; a larger block is returned to the system. Older glibc refuses 1 << 30
_MOST_KEPT = (1 << 31) - 1  # bytes, a C int
_CGROUP_FILES = (  # a container's limit, its usage, its statistics, and the name there of the reclaimable memory
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_inactive_file",
    ),
)
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory of this process for its next allocation.

    Returns:
        Whether the setting was changed. It is not if activations are on a GPU, if the user has set the C library's own
        variables, or if the C library is not glibc.
    """
    if is_cuda() or any(name in os.environ for name in _USERS):
        return False
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        return False
    # Set the block size first: the first setting ends glibc's own adjustment, which leaves the other at 128 KiB.
    if not any(library.mallopt(_MMAP_THRESHOLD, most) for most in _MOST_ON_HEAP):
        return False
    return bool(library.mallopt(_TRIM_THRESHOLD, _MOST_KEPT))


class _Mapping(mmap.mmap):
    """Zeroed memory that does not count as private memory of the process, neither in measurements nor for `ulimit -d`.

    `at_end` is called before the memory is freed.
    """

    at_end: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.at_end is not None:
            with contextlib.suppress(Exception):  # an error at the interpreter's end cannot be reported
                self.at_end()


def host_mapping(
    shape: tuple[int, ...], dtype: torch.dtype, *, prepare: Callable[[Tensor], Callable[[], None]] | None = None
) -> Tensor:
    """A zeroed tensor outside of the process's private memory, without padding.

    `prepare`: called with the tensor; returns a function that is called before the memory is freed.
    """
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    mapping = _Mapping(-1, count * dtype.itemsize)
    tensor = torch.frombuffer(mapping, dtype=dtype, count=count).view(shape)
    if prepare is not None:
        mapping.at_end = prepare(tensor)
    return tensor


def available_host_bytes() -> int:
    """The number of bytes that this host can still allocate without swapping, by the kernel's estimate.

    In a container the rest of the container's limit is an upper bound.
    """
    available = psutil.virtual_memory().available
    for limit, current, statistics, reclaimable in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # files of another version of cgroups, or the limit "max"
            counts = dict(line.split() for line in Path(statistics).read_text().splitlines())
            used = int(Path(current).read_text()) - int(counts.get(reclaimable, 0))
            available = min(available, int(Path(limit).read_text()) - used)
    return max(0, available)
