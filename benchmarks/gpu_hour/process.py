"""The process of a part that trains on one device: its device, its group of one rank, and megatron.core."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.gpu_hour.result import Result, parser_of
from megatron import backend


def main(description: str, run: Callable[[Result], None], arguments: Sequence[str] | None = None) -> None:
    """Run a part by its command line."""
    args = parser_of(description).parse_args(arguments)
    if args.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not backend.is_cuda():
        raise SystemExit("error: no CUDA device is there; give --rehearse to see on a CPU that the part runs")
    torch.manual_seed(1234)
    begin()
    gc.freeze()  # as in training: a collection that looks at all of torch takes longer than a microbatch
    run(Result(args))
    dist.destroy_process_group()


def begin() -> None:
    """Make megatron.core importable, and this process a rank alone: over NCCL on a GPU, over gloo on a CPU. Later
    calls are no-ops."""
    backend.install()
    from megatron.core import parallel_state

    warnings.filterwarnings("ignore", message=".*cuda_graph_scope.*")  # about megatron.core's own default
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")
    if not dist.is_initialized():
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group(
            backend.process_group_backend(), store=store, rank=0, world_size=1, timeout=timedelta(minutes=5)
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def free() -> None:
    """Give back what nobody refers to any more, also to the device; megatron.core's chunks are in circles."""
    gc.collect()
    if backend.is_cuda():
        torch.cuda.empty_cache()


@torch.no_grad()
def largest_difference(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """The most by which an element of one list of tensors differs from that of the other, in FP32."""
    return max((a.float() - b.float()).abs().max().item() for a, b in zip(some, others, strict=True))
