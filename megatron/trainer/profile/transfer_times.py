"""Times what goes between two ranks of a machine, and all-reduces, on the links and groups that training uses."""

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron import backend
from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.stages.megatron.groups import ChainGroup
from megatron.pipeline.runtime.transport.links import LINKS

_TIMEOUT = timedelta(minutes=5)
_FLOAT = 4


def time_transfers(sizes: Sequence[int], *, num_iterations: int, num_warmup: int) -> dict[int, list[float]]:
    """Number of bytes -> seconds one way, half of each of `num_iterations` round trips between ranks 0 and 1.
    Collective over the two."""
    rank, name = dist.get_rank(), backend.process_group_backend()
    link_class = LINKS[name, backend.device().type]
    options = {"timeout": _TIMEOUT, "device": backend.device(), "store": dist.distributed_c10d._get_default_store()}
    links = [
        link_class(f"profile/{source}", sends=rank == source, on_error=lambda error: None, **options)
        for source in (0, 1)
    ]  # a link each way
    outward, homeward = links[rank], links[1 - rank]
    found: dict[int, list[float]] = {}
    for size in sizes:
        spec = TensorSpec((max(size // _FLOAT, 1),))
        tensor = torch.ones(spec.shape, device=backend.device())
        dist.barrier()
        samples = []
        for index in range(num_warmup + num_iterations):
            receive = homeward.receive(spec, index)
            start = time.perf_counter()
            if rank == 0:
                outward.send(tensor, index)
            receive.wait(_TIMEOUT)
            backend.synchronize()
            if rank == 1:
                outward.send(tensor, index)
            samples.append((time.perf_counter() - start) / 2)
        found[size] = samples[num_warmup:]
    dist.barrier()
    for link in links:
        link.close(_TIMEOUT.total_seconds())
    return found


def time_all_reduces(sizes: Sequence[int], *, num_iterations: int, num_warmup: int) -> dict[int, list[float]]:
    """Number of bytes -> seconds of an all-reduce of FP32 numbers over all ranks. Collective."""
    group = ChainGroup(
        "profile", list(range(dist.get_world_size())), backend_name=backend.process_group_backend(), timeout=_TIMEOUT
    )
    found: dict[int, list[float]] = {}
    for size in sizes:
        tensor = torch.ones(max(size // _FLOAT, 1), device=backend.device())
        samples = []
        for _ in range(num_warmup + num_iterations):
            dist.barrier()  # so that none is timed while it waits for another
            backend.synchronize()
            start = time.perf_counter()
            group.all_reduce(tensor)
            backend.synchronize()
            samples.append(time.perf_counter() - start)
            tensor.fill_(1.0)
        found[size] = samples[num_warmup:]
    return found
