"""What the C library does with memory that a rank on a CPU frees.

Problem: glibc gives freed memory back to the system where it can: large blocks, and the top of its heap when a few of
the largest blocks' bytes are free there. A training step frees its activations and allocates as many again, so every
microbatch pays for page faults and for zeroed pages; with small models that is a tenth of a backward.

Solution: let it keep what is freed for what is allocated next, as torch's allocator does on a GPU.
"""

import ctypes
import os

from megatron.backend.device import is_cuda

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_MOST_ON_HEAP = (1 << 30, 1 << 25)  # bytes; a larger block goes back to the system. Older glibc refuses the first
_MOST_KEPT = (1 << 31) - 1  # bytes, a C int
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """From now on, freed memory of this process is kept for its next allocation.

    Returns:
        False where nothing was changed: activations are on a GPU, the user has set the C library's own variables, or it
        is not glibc.
    """
    if is_cuda() or any(name in os.environ for name in _USERS):
        return False
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        return False
    # First the blocks: whichever is set first ends glibc's own adjustment of the other, which would stay at 128 KiB.
    if not any(library.mallopt(_MMAP_THRESHOLD, most) for most in _MOST_ON_HEAP):
        return False
    return bool(library.mallopt(_TRIM_THRESHOLD, _MOST_KEPT))
