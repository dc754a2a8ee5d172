"""What a weight update takes from megatron.core's DDP and optimizers: masters, gradient buffers and weight versions.

Gradient buffers: the next batch accumulates into another buffer while the chain reduces the gradients of one batch.
DDP gives every parameter a `main_grad`, a view of one flat buffer, and adds each gradient to it. A slot is one such set
of flat buffers; slot 0 is DDP's own, a second one is made when a batch begins its backwards while the first is still
needed. Switching repoints every reference that megatron.core keeps: the buffer, its buckets, the bucket groups' cached
shards and the parameters.

Weight versions: with the distributed optimizer the parameters are views of one flat buffer per dtype, which the
parameter all-gather fills, so a slot of weights is a set of flat buffers. Its FP32 shards are views of that buffer,
too: stepping them would change weights that forwards in flight still use, so they become masters of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron import backend
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from megatron.core.utils import unwrap_model
from megatron.pipeline.runtime.update.versions import WeightVersions

MegatronCoreOptimizer = FP32Optimizer | Float16OptimizerWithFloat16Params | DistributedOptimizer


def steps_parameters_in_place(optimizer: MegatronCoreOptimizer) -> bool:
    """True if the optimizer updates some of the model's parameters themselves and not masters of them."""
    if isinstance(optimizer, DistributedOptimizer) or optimizer.is_stub_optimizer:
        return False
    if isinstance(optimizer, FP32Optimizer):
        return True
    return any(optimizer.fp32_from_fp32_groups)


def single_optimizer(optimizer: MegatronOptimizer) -> MegatronCoreOptimizer:
    """The optimizer of all parameters of the rank's chunks. Raises ValueError where there are several."""
    if not isinstance(optimizer, ChainedOptimizer):
        return optimizer
    if len(optimizer.chained_optimizers) != 1:
        raise ValueError(
            f"The model needs {len(optimizer.chained_optimizers)} chained optimizers (expert parameters?): the "
            "pipeline's weight update supports one."
        )
    return optimizer.chained_optimizers[0]


def copy_gradients(optimizer: MegatronCoreOptimizer) -> None:
    """Give the optimizer's parameters their gradients, in FP32, without any collective."""
    if isinstance(optimizer, FP32Optimizer):
        optimizer.prepare_grads()
    elif not optimizer.is_stub_optimizer:
        optimizer._copy_model_grads_to_main_grads()


def masters_of(optimizer: MegatronCoreOptimizer) -> dict[Tensor, Tensor]:
    """Parameter of the model -> its FP32 master, for those that have one. Not of the distributed optimizer."""
    if optimizer.is_stub_optimizer or isinstance(optimizer, FP32Optimizer):
        return {}
    groups = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
    return {model: master for group in groups for model, master in zip(*group, strict=True)}


def gradients_of(optimizer: MegatronCoreOptimizer) -> list[Tensor]:
    """The gradients of the optimizer's parameters, without those that are None."""
    if optimizer.is_stub_optimizer:
        return []
    return [param.grad for param in optimizer.get_parameters() if param.grad is not None]


@dataclass(eq=False)
class GradientSlot:
    """One set of flat gradient buffers, and each parameter's view of them."""

    flats: list[Tensor]
    views: dict[Parameter, Tensor]


class CoreGradientBuffers:
    """All gradient buffers of the DDP-wrapped chunks of one rank."""

    def __init__(self, chunks: list[DistributedDataParallel]) -> None:
        self._chunks = chunks
        self.buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
        self._slots = [self._slot([buffer.grad_data for buffer in self.buffers])]
        self._free = list(self._slots)
        self.shown = self._slots[0]
        """The slot that backwards accumulate into."""

    @property
    def num_slots(self) -> int:
        """Slots allocated so far."""
        return len(self._slots)

    def _slot(self, flats: list[Tensor]) -> GradientSlot:
        views = {}
        for buffer, flat in zip(self.buffers, flats, strict=True):
            for param, (start, end, _) in buffer.param_index_map.items():
                views[param] = flat[start:end].view(param.shape)
        return GradientSlot(flats, views)

    def take(self) -> GradientSlot:
        """Reserve a free slot, zeroed, and let backwards accumulate into it. Allocates where none is free."""
        if self._free:
            slot = self._free.pop()
            for flat in slot.flats:
                flat.zero_()
        else:
            slot = self._slot([torch.zeros_like(flat) for flat in self._slots[0].flats])
            self._slots.append(slot)
        self.show(slot)
        for chunk in self._chunks:  # what fused kernels have added to, which megatron.core notes for each batch
            for param in chunk.params_with_grad:
                param.grad_added_to_main_grad = False
        return slot

    def copy_of(self, slot: GradientSlot) -> GradientSlot:
        """A copy of a slot's present gradients."""
        return self._slot([flat.clone() for flat in slot.flats])

    def give_back(self, slot: GradientSlot) -> None:
        """The gradients in `slot` are no longer needed."""
        self._free.append(slot)

    def __getitem__(self, number: int) -> GradientSlot:
        return self._slots[number]

    def show(self, slot: GradientSlot) -> None:
        """Let backwards accumulate into `slot`, and megatron.core's optimizers read from it."""
        if slot is self.shown:
            return
        for buffer, flat in zip(self.buffers, slot.flats, strict=True):
            buffer.grad_data = flat
            for bucket in buffer.buckets:
                bucket.grad_data = bucket_of(flat, bucket)
        for chunk in self._chunks:
            for group in chunk.bucket_groups:
                group.cached_grad_buffer_shard_list = [None] * len(group.buckets)
        for param, view in slot.views.items():
            param.main_grad = view
        self.shown = slot


def bucket_of(flat: Tensor, bucket) -> Tensor:
    """The part of a flat buffer that one of its buckets covers."""
    return flat[bucket.offset : bucket.offset + bucket.grad_data.numel()]


class LayersOfParameters:
    """The transformer layer that each trainable parameter of `chunks` belongs to, in a model of `num_layers`.

    Parameters in front of the layers or behind them (embeddings, heads) belong to none.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], num_layers: int) -> None:
        self.num_layers = num_layers
        self._numbers = {
            parameter: module.layer_number - 1
            for chunk in chunks
            for module in unwrap_model(chunk).modules()
            if isinstance(module, BaseTransformerLayer)
            for parameter in module.parameters()
            if parameter.requires_grad
        }
        assert all(0 <= number < num_layers for number in self._numbers.values()), "layers are numbered over the model"

    def squared_norms(self, norms: Mapping[Parameter, Tensor]) -> Tensor:
        """The squared norm of each layer, float64 [num_layers], from the FP32 norms of parameters' gradients; 0 for
        layers without any.
        """
        result = torch.zeros(self.num_layers, dtype=torch.float64, device=backend.device())
        own = [(self._numbers[parameter], norm) for parameter, norm in norms.items() if parameter in self._numbers]
        if own:
            numbers = torch.tensor([number for number, _ in own], device=result.device)
            squares = torch.stack([norm for _, norm in own]).double().square()
            result.index_add_(0, numbers, squares)
        return result


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
