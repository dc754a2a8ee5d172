"""Weight versions of megatron.core's chunks: slots that its buffers and optimizers follow.

Two things differ from any other module's. With the distributed optimizer the parameters are views of one flat buffer
per dtype, which the parameter all-gather fills, so a slot is a set of flat buffers. And its FP32 shards are views of
that buffer: stepping them would change weights that forwards in flight still use, so they become masters of their own.
"""

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model
from megatron.pipeline.runtime.stages.megatron.gradients import bucket_of
from megatron.pipeline.runtime.stages.megatron.optimizers import MegatronCoreOptimizer
from megatron.pipeline.runtime.update.versions import WeightVersions


def named_parameters(chunks: list[nn.Module]) -> dict[str, Parameter]:
    """name -> trainable parameter of a rank's chunks, named as in the model, prefixed ``model0.`` ... if several."""
    return {
        name if len(chunks) == 1 else f"model{number}.{name}": param
        for number, chunk in enumerate(chunks)
        for name, param in unwrap_model(chunk).named_parameters()
        if param.requires_grad
    }


class DistributedSlots:
    """Flat parameter buffers of the distributed optimizer, one set per slot of weight versions."""

    def __init__(self, chunks: list[DistributedDataParallel]) -> None:
        self._chunks = chunks
        self._names = {param: name for name, param in named_parameters(chunks).items()}
        self._buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
        self._slots = [[buffer.param_data for buffer in self._buffers]]

    def make(self) -> dict[str, Tensor]:
        """Allocate another set; returns name -> view of it."""
        flats = [torch.zeros_like(buffer.param_data) for buffer in self._buffers]
        self._slots.append(flats)
        return {
            self._names[param]: flat[start:end].view(param.shape)
            for buffer, flat in zip(self._buffers, flats, strict=True)
            for param, (start, end, _) in buffer.param_index_map.items()
        }

    def switch(self, slot: int) -> None:
        """Point DDP's buffers, which the optimizer writes and the all-gather fills, at `slot`."""
        for buffer, flat in zip(self._buffers, self._slots[slot], strict=True):
            buffer.param_data = flat
            for bucket in buffer.buckets:
                bucket.param_data = bucket_of(flat, bucket)
        for chunk in self._chunks:
            for group in chunk.bucket_groups:
                group.cached_param_buffer_shard_list = [None] * len(group.buckets)


def separate_masters(optimizer: DistributedOptimizer, *, share_storage: bool) -> None:
    """Make the FP32 shards leaves: over the same storage (flush), or with storage of their own (several versions)."""
    replaced = {}
    for group in optimizer.shard_fp32_groups:
        for position, shard in enumerate(group):
            master = shard.detach() if share_storage else shard.detach().clone()
            tensor_parallel.copy_tensor_model_parallel_attributes(master, shard)
            if hasattr(shard, "shared"):
                master.shared = shard.shared
            if shard in optimizer.optimizer.state:
                optimizer.optimizer.state[master] = optimizer.optimizer.state.pop(shard)
            group[position] = replaced[shard] = master
    for group in optimizer.optimizer.param_groups:
        group["params"] = [replaced.get(param, param) for param in group["params"]]


def weight_versions(
    chunks: list[DistributedDataParallel], optimizer: MegatronCoreOptimizer, *, window: int, first_version: int = 0
) -> WeightVersions:
    """The version table of one rank's chunks; prepares `optimizer` for it."""
    if not isinstance(optimizer, DistributedOptimizer):
        return WeightVersions(named_parameters(chunks), window=window, first_version=first_version)
    separate_masters(optimizer, share_storage=window == 1)
    slots = DistributedSlots(chunks)
    return WeightVersions(
        named_parameters(chunks),
        window=window,
        first_version=first_version,
        make_slot=slots.make,
        on_switch=slots.switch,
    )
