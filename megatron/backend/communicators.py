"""NCCL process groups of the runtime's own: how much of the GPU they may take, and how they end.

Problem: every NCCL communicator has device buffers for each of its blocks (CTAs), and a transfer that waits for its
peer keeps these blocks from computing. A pipeline has many communicators, whose transfers mostly wait.

Solution: bound the blocks, and let the kernels go first: they are few, and others wait for them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store


def nccl_communicator(store: Store, rank: int, size: int, *, max_ctas: int, timeout: timedelta) -> Any:
    """A ProcessGroupNCCL of `size` ranks that meet at `store`."""
    options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    options.config.max_ctas = max_ctas
    return torch.distributed.ProcessGroupNCCL(store, rank, size, options)


def shut_down(group: Any) -> None:
    """End a group whose work is done. All its ranks do so, in the same order as their other groups.

    A communicator that is only forgotten is torn down when the process exits, in no order, which may hang.
    """
    end = getattr(group, "shutdown", None) or getattr(group, "_shutdown", None)  # underscored in older torch
    if end is not None:
        end()
