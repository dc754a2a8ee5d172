"""Times what weights on the host need of a machine: copies between host and device, and the host's optimizer.

Copies go between the runtime's own buffers: on CUDA pinned memory and the GPU's; on a CPU the host is a shared mapping
and the device the process's private memory, so they are copies in memory. The optimizer is the runtime's, on a stage of
its own: AdamW by both kernels, with FP32 masters where weights have 16 bits, and gradients in FP32, as they arrive.
"""

import time
from collections.abc import Sequence

import torch

from megatron import backend
from megatron.backend.streams import streams_of
from megatron.pipeline.runtime.relay.host_optimizer import HostOptimizer
from megatron.pipeline.runtime.relay.host_store import LOW_PRECISION, HostStore
from megatron.planner.memory.architecture import Architecture
from megatron.trainer.optimizer.kernel import KERNELS

TO_DEVICE, FROM_DEVICE = "to device", "from device"
_LARGEST = 2**22  # elements of a matrix: beyond caches, and more take as much each


def time_copies(sizes: Sequence[int], *, num_iterations: int, num_warmup: int) -> dict[tuple[str, int], list[float]]:
    """Direction and number of bytes -> seconds of each copy."""
    device = backend.device()
    found = {}
    for size in sizes:
        host = streams_of(device).host_buffer((size,), torch.uint8)
        there = torch.zeros(size, dtype=torch.uint8, device=device)
        for direction, target, source in ((TO_DEVICE, there, host), (FROM_DEVICE, host, there)):
            samples = []
            for _ in range(num_warmup + num_iterations):
                backend.synchronize()
                start = time.perf_counter()
                target.copy_(source, non_blocking=True)
                backend.synchronize()
                samples.append(time.perf_counter() - start)
            found[direction, size] = samples[num_warmup:]
    return found


def time_updates(
    model: Architecture, dtype: str, *, num_iterations: int, num_warmup: int
) -> tuple[int, dict[str, list[float]]]:
    """Parameters of a stage, and kernel -> seconds of each of its updates. `dtype`: of the weights."""
    kind = getattr(torch, dtype)
    found, num_parameters = {}, 0
    for kernel in KERNELS:
        parameters = {str(index): torch.nn.Parameter(torch.full(shape, 0.5, dtype=kind))
                      for index, shape in enumerate(shapes_of_layer(model))}  # fmt: skip
        store = HostStore(
            {0: parameters}, device=backend.device(), masters=kind in LOW_PRECISION, gradient_dtype=torch.float32
        )
        optimizer = torch.optim.AdamW(store.parameters.values(), fused=True if kernel == "fused" else None)
        host, samples = HostOptimizer(optimizer, store), []
        for gradient in store.stages[0].flat_gradients.values():
            gradient.fill_(1e-3)
        for _ in range(num_warmup + num_iterations):
            start = time.perf_counter()
            host.update(0, host.settings())
            samples.append(time.perf_counter() - start)
        found[kernel] = samples[num_warmup:]
        num_parameters = sum(each.numel() for each in parameters.values())
    return num_parameters, found


def shapes_of_layer(model: Architecture) -> list[tuple[int, ...]]:
    """Those of a layer's matrices, with fewer rows where they are very large, and of as many vectors."""
    h, wide = model.hidden_size, model.ffn_hidden_size * (2 if model.gated else 1)
    matrices = [(model.query_width + 2 * model.key_width, h), (h, model.query_width), (wide, h),
                (h, model.ffn_hidden_size)]  # fmt: skip
    cut = [(min(rows, max(1, _LARGEST // columns)), columns) for rows, columns in matrices]
    return [*cut, *((rows,) for rows, _ in cut)]
