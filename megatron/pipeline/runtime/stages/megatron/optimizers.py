"""Masters, gradient buffers and weight versions over megatron.core's DDP and optimizers.

**Gradient buffers.** DDP gives every parameter a `main_grad`, a view of a flat buffer, and adds each gradient to it.
While the chain reduces the gradients of one batch, the next batch must accumulate into another buffer. A slot is one
set of flat buffers. Slot 0 has DDP's own buffers. A second slot is allocated when a batch begins its backwards while
the first slot is still in use. A switch changes every reference that megatron.core keeps: in the buffer, its buckets,
the cached shards of the bucket groups, and the parameters.

**Weight versions.** With the distributed optimizer the parameters are views of flat buffers, which the all-gather of
the parameters fills. So a slot of weights is a set of flat buffers. The optimizer's shards of FP32 parameters are views
of these buffers, too, and stepping them would change weights that forwards in flight use. So they are replaced by
masters with their own storage.

**Owners** share out the optimizer's state over the replicas by whole parameters. Problem: megatron.core's distributed
optimizer cuts flat buffers into shards. An optimizer such as Muon steps a matrix as a whole.

Solution: each parameter has one owner (`owners_of`): of an expert one of the ranks that hold it, of any other weight
one of the replicas. Gradients are averaged on all of them. megatron.core's plain optimizer of a rank holds and steps
the parameters that the rank owns. Then the ranks exchange the weights.

Weights lie in flat buffers, one for each owner, kind and dtype, and the parameters are views of them. So an exchange is
one broadcast of each buffer, in place. A slot of the weight versions is one set of such buffers, and the exchange fills
the slot that the parameters show. It uses megatron.core's groups of the replicas, on the thread that steps.

A tied embedding that two stages share is owned by replica 0 at both. A prediction may read the gradients of the owner
alone, and so both copies are predicted from the same gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.utils import unwrap_model
from megatron.pipeline.placement.mapping import owners_of
from megatron.pipeline.runtime.stages.megatron.pipeline_position import tied_embeddings
from megatron.pipeline.runtime.update.versions import WeightVersions

MegatronCoreOptimizer = FP32Optimizer | Float16OptimizerWithFloat16Params | DistributedOptimizer


def steps_parameters_in_place(optimizer: MegatronOptimizer) -> bool:
    """Whether the optimizer steps some of the model's parameters directly instead of masters of them."""
    return any(map(_steps_in_place, optimizers_of(optimizer)))


def _steps_in_place(optimizer: MegatronCoreOptimizer) -> bool:
    if isinstance(optimizer, DistributedOptimizer) or optimizer.is_stub_optimizer:
        return False
    if isinstance(optimizer, FP32Optimizer):
        return True
    return any(optimizer.fp32_from_fp32_groups)


def optimizers_of(optimizer: MegatronOptimizer) -> list[MegatronCoreOptimizer]:
    """The optimizers of the rank's chunks: one, and under expert parallelism a second one for the experts."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def is_distributed(optimizer: MegatronOptimizer) -> bool:
    """Whether the replicas hold shards of the optimizer's state."""
    return isinstance(optimizers_of(optimizer)[0], DistributedOptimizer)


def shared_scaler(optimizer: MegatronOptimizer) -> MegatronGradScaler | None:
    """The loss scaler. The optimizers of a chain have one each; from now on they share the first."""
    first, *others = optimizers_of(optimizer)
    scaler = getattr(first, "grad_scaler", None)
    for each in others:
        each.grad_scaler = scaler
    return scaler


def buffers_of(chunk: DistributedDataParallel) -> list:
    """DDP's buffers of a chunk. The buffers of experts that ranks share out come last."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _views(buffers: list, flats: list[Tensor]) -> dict[Parameter, Tensor]:
    """Parameter -> its view of flat tensors that are laid out like DDP's `buffers`."""
    return {
        param: flat[start:end].view(param.shape)
        for buffer, flat in zip(buffers, flats, strict=True)
        for param, (start, end, _) in buffer.param_index_map.items()
    }


def _point(chunks: list[DistributedDataParallel], buffers: list, flats: list[Tensor], kind: str) -> None:
    """Point DDP's buffers of a kind, "grad" or "param", and their buckets at flat tensors."""
    for buffer, flat in zip(buffers, flats, strict=True):
        setattr(buffer, f"{kind}_data", flat)
        for bucket in buffer.buckets:
            setattr(bucket, f"{kind}_data", bucket_of(flat, bucket))
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            setattr(group, f"cached_{kind}_buffer_shard_list", [None] * len(group.buckets))


def copy_gradients(optimizer: MegatronOptimizer) -> None:
    """Give the parameters of the optimizer their gradients, in FP32, without a collective."""
    for each in optimizers_of(optimizer):
        if isinstance(each, FP32Optimizer):
            each.prepare_grads()
        elif not each.is_stub_optimizer:
            each._copy_model_grads_to_main_grads()


def masters_of(optimizer: MegatronCoreOptimizer) -> dict[Tensor, Tensor]:
    """Parameter of the model -> its FP32 master, for parameters with a master. Not for the distributed optimizer."""
    if optimizer.is_stub_optimizer or isinstance(optimizer, FP32Optimizer):
        return {}
    groups = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
    return {model: master for group in groups for model, master in zip(*group, strict=True)}


def gradients_of(optimizer: MegatronOptimizer) -> list[Tensor]:
    """The gradients of the parameters of the optimizer, without None."""
    params = [
        param for each in optimizers_of(optimizer) if not each.is_stub_optimizer for param in each.get_parameters()
    ]
    return [param.grad for param in params if param.grad is not None]


def multiply_elsewhere(optimizer: MegatronOptimizer, factor: float) -> None:
    """Give the parameters of the optimizer new gradients: the present ones times `factor`."""
    for each in optimizers_of(optimizer):
        for param in [] if each.is_stub_optimizer else each.get_parameters():
            if param.grad is not None:
                param.grad = param.grad * factor


@dataclass(eq=False)
class GradientSlot:
    """One set of flat gradient buffers, and the view that each parameter has of them."""

    flats: list[Tensor]
    views: dict[Parameter, Tensor]


class CoreGradientBuffers:
    """The gradient slots of the DDP-wrapped chunks of one rank; the first slot has DDP's own buffers.

    Attributes:
        buffers: DDP's buffers of all chunks.
        shown: the slot to which backwards add.
    """

    def __init__(self, chunks: list[DistributedDataParallel]) -> None:
        self._chunks = chunks
        self.buffers = [buffer for chunk in chunks for buffer in buffers_of(chunk)]
        self._slots = [self._slot([buffer.grad_data for buffer in self.buffers])]
        self._free = list(self._slots)
        self.shown = self._slots[0]

    @property
    def num_slots(self) -> int:
        """The number of slots allocated so far."""
        return len(self._slots)

    def _slot(self, flats: list[Tensor]) -> GradientSlot:
        return GradientSlot(flats, _views(self.buffers, flats))

    def take(self) -> GradientSlot:
        """Take a free slot, zero it, and make backwards add to it. Allocates a slot if none is free."""
        if self._free:
            slot = self._free.pop()
            for flat in slot.flats:
                flat.zero_()
        else:
            slot = self._slot([torch.zeros_like(flat) for flat in self._slots[0].flats])
            self._slots.append(slot)
        self.show(slot)
        for chunk in self._chunks:  # fused kernels set the flag when they add to a gradient
            for param in chunk.params_with_grad:
                param.grad_added_to_main_grad = False
        return slot

    def copy_of(self, slot: GradientSlot) -> GradientSlot:
        return self._slot([flat.clone() for flat in slot.flats])

    def give_back(self, slot: GradientSlot) -> None:
        """Make `slot` free again; its gradients are no longer needed."""
        self._free.append(slot)

    def __getitem__(self, number: int) -> GradientSlot:
        return self._slots[number]

    def show(self, slot: GradientSlot) -> None:
        """Make backwards add to `slot`, and megatron.core's optimizers read from it."""
        if slot is self.shown:
            return
        _point(self._chunks, self.buffers, slot.flats, "grad")
        for param, view in slot.views.items():
            param.main_grad = view
        self.shown = slot


def bucket_of(flat: Tensor, bucket) -> Tensor:
    """The part of a flat buffer that belongs to one of its buckets."""
    return flat[bucket.offset : bucket.offset + bucket.grad_data.numel()]


def groups_of_replicas(optimizer: MegatronOptimizer, chunk: DistributedDataParallel) -> list[dist.ProcessGroup]:
    """The ranks that share out the state of each of `optimizers_of`: of dense weights and, in a chain, of experts."""
    return [chunk.intra_dp_cp_group, chunk.intra_expt_dp_group][: len(optimizers_of(optimizer))]


def is_dense(param: Parameter) -> bool:
    """Whether each replica has the parameter: it belongs to no expert that ranks share out."""
    return getattr(param, "allreduce", True)


def named_parameters(chunks: list[nn.Module]) -> dict[str, Parameter]:
    """Name -> trainable parameter of a rank's chunks.

    Names are those in the model, with a prefix ``model0.``, ``model1.``, ... if there are several chunks.
    """
    return {
        name if len(chunks) == 1 else f"model{number}.{name}": param
        for number, chunk in enumerate(chunks)
        for name, param in unwrap_model(chunk).named_parameters()
        if param.requires_grad
    }


class DistributedSlots:
    """The flat parameter buffers of the distributed optimizer, one set per slot of the weight versions."""

    def __init__(self, chunks: list[DistributedDataParallel]) -> None:
        self._chunks = chunks
        self._names = {param: name for name, param in named_parameters(chunks).items()}
        self._buffers = [buffer for chunk in chunks for buffer in buffers_of(chunk)]
        self._slots = [[buffer.param_data for buffer in self._buffers]]

    def make(self) -> dict[str, Tensor]:
        """Allocate another set of flat buffers. Return name -> view of it with the parameter's shape."""
        flats = [torch.zeros_like(buffer.param_data) for buffer in self._buffers]
        self._slots.append(flats)
        return {self._names[param]: view for param, view in _views(self._buffers, flats).items()}

    def switch(self, slot: int) -> None:
        """Point DDP's parameter buffers, into which the optimizer and the all-gather write, at slot number `slot`."""
        _point(self._chunks, self._buffers, self._slots[slot], "param")


def separate_masters(optimizer: DistributedOptimizer, *, share_storage: bool) -> None:
    """Replace the optimizer's shards of FP32 parameters by new leaf tensors, the masters.

    `share_storage`: masters share the storage of the shards (one weight version); else they are copies (several).
    """
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


class Slots(Protocol):
    """Flat buffers of weights, one set per slot of the weight versions."""

    def make(self) -> dict[str, Tensor]: ...

    def switch(self, slot: int) -> None: ...


def weight_versions(
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    *,
    window: int,
    first_version: int = 0,
    slots: Slots | None = None,
) -> WeightVersions:
    """The weight versions of one rank's chunks. The distributed `optimizer` gets masters (see `separate_masters`).

    `slots`: the flat buffers of the weights, for another optimizer; None: weights lie in tensors of their own.
    """
    if is_distributed(optimizer):
        for each in optimizers_of(optimizer):
            if not each.is_stub_optimizer:
                separate_masters(each, share_storage=window == 1)
        slots = DistributedSlots(chunks)
    return WeightVersions(
        named_parameters(chunks),
        window=window,
        first_version=first_version,
        make_slot=slots and slots.make,
        on_switch=slots and slots.switch,
    )


_ALIGNMENT = 64  # elements, as in megatron.core's buffers


class _Key(NamedTuple):
    """A flat buffer. `owner`: a rank in the group of the replicas, or of the ranks with the same experts."""

    is_dense: bool
    owner: int
    dtype: torch.dtype


class Owners:
    """The owners of one rank's parameters, and the flat buffers of the weights. The parameters move into slot 0.

    Args:
        chunks: the model chunks of the rank.
        bytes_of: (parameter, name) -> the bytes of the optimizer's state of the parameter.
    """

    def __init__(self, chunks: list[DistributedDataParallel], bytes_of: Callable[[Parameter, str], float]) -> None:
        self._groups = {True: chunks[0].intra_dp_cp_group, False: chunks[0].intra_expt_dp_group}
        self._names = {parameter: name for name, parameter in named_parameters(chunks).items()}
        tied = set(tied_embeddings(chunks))
        self._places: dict[Parameter, tuple[_Key, int]] = {}  # the flat buffer, and the offset there
        self._lengths: dict[_Key, int] = defaultdict(int)
        for kind, group in self._groups.items():
            own = [parameter for parameter in self._names if is_dense(parameter) is kind]
            owners = owners_of(
                [bytes_of(parameter, self._names[parameter]) for parameter in own],
                group.size(),
                pinned=[index for index, parameter in enumerate(own) if parameter in tied],
            )
            for parameter, owner in zip(own, owners, strict=True):
                key = _Key(kind, owner, parameter.dtype)
                self._places[parameter] = key, self._lengths[key]
                self._lengths[key] += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        self._slots: list[dict[_Key, Tensor]] = []
        self._shown = 0
        views = self.make()
        for parameter, name in self._names.items():
            views[name].copy_(parameter.data)
            parameter.data = views[name]

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the replicas, which share out the dense parameters."""
        return dist.get_process_group_ranks(self._groups[True])

    @contextmanager
    def building(self) -> Iterator[None]:
        """In this block only the parameters that this replica owns require gradients.

        So an optimizer that megatron.core builds in the block gets no other parameters.
        """
        others = [each for each, (key, _) in self._places.items() if key.owner != self._groups[key.is_dense].rank()]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def make(self) -> dict[str, Tensor]:
        """Allocate a slot. Return name -> view of it with the parameter's shape."""
        device = next(iter(self._names)).device
        flats = {key: torch.zeros(length, dtype=key.dtype, device=device) for key, length in self._lengths.items()}
        self._slots.append(flats)
        views = {}
        for parameter, (key, start) in self._places.items():
            views[self._names[parameter]] = flats[key][start : start + parameter.numel()].view(parameter.shape)
        return views

    def switch(self, slot: int) -> None:
        """Note the number of the slot that the parameters show."""
        self._shown = slot

    @torch.no_grad()
    def exchange(self) -> None:
        """Fill the slot that the parameters show with the weights of all owners. Collective over the replicas."""
        works = []
        for key, flat in self._slots[self._shown].items():
            group = self._groups[key.is_dense]
            works.append(dist.broadcast(flat, dist.get_global_rank(group, key.owner), group=group, async_op=True))
        for work in works:
            work.wait()


def owners(optimizer: MegatronOptimizer) -> Owners | None:
    """The owners that share out the state of an optimizer; None if each replica has all of it, or shards."""
    return getattr(optimizers_of(optimizer)[0], "owners", None)
