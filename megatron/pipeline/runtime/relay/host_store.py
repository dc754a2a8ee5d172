"""The stages of a rank on the host: weights, gradients that arrive from the device, and FP32 masters.

Problem: where weights live on the host, the device has the weights of only a few stages, and the optimizer steps
tensors on the host. The copy of a stage should be one call per dtype, and on CUDA it should not block the host.

Solution: each stage has flat weights and flat gradients in host memory that the device can copy
(`Streams.kept_host_buffer`). On CUDA this memory is pinned. On a CPU the "device" is the private memory of the process
and the host is a shared mapping, so that tools outside of the process can tell them apart.

The optimizer steps `HostStore.parameters`. They are views of the weights. If a weight of lower precision has an FP32
master, its parameter is the master, and the weight is written from it after each step. The state of the optimizer is in
the same kind of memory (`HostMoments`).

Replicas on a node have one store, in memory that all of them have mapped (`node_replicas`). Each replica copies its
share of a stage's gradients to the host and steps this share (`share_of`). So the node holds each weight and moment
once.

A stage has memory for the gradients of one batch. It is free again when the update of the stage is complete, which is
before the stage can be fetched for its next batch.

`FlatLayout` puts the tensors of a stage into one flat tensor per dtype. Every view begins at a multiple of `ALIGNMENT`
bytes, as in torch's own memory. With another alignment a kernel might add in another order, but results must have the
same bits as with weights on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.backend.device import host_mapping
from megatron.backend.streams import streams_of
from megatron.pipeline.runtime.contract.tensors import ALIGNMENT
from megatron.pipeline.runtime.relay.node_replicas import NodeReplicas
from megatron.pipeline.runtime.relay.packed_weights import Packing

Flat = Mapping[torch.dtype, Tensor]
"""Dtype -> flat tensor."""

Make = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""(shape, dtype) -> memory."""


class FlatLayout:
    """The places of tensors in one flat tensor per dtype.

    Args:
        tensors: name -> tensor with the shape and the dtype to place.
        dtype: the dtype for all tensors; None: each keeps its own.
        parts: each flat tensor is padded so that it can be cut into this many equal and aligned parts.

    Attributes:
        num_elements: dtype -> length of the flat tensor.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None, parts: int = 1) -> None:
        self.num_elements: dict[torch.dtype, int] = {}
        self._places: dict[str, tuple[torch.dtype, int, torch.Size]] = {}
        for name, tensor in tensors.items():
            its = dtype or tensor.dtype
            start = self.num_elements.get(its, 0)
            self._places[name] = its, start, tensor.shape
            step = ALIGNMENT // its.itemsize
            self.num_elements[its] = start + -(-tensor.numel() // step) * step
        for its, count in self.num_elements.items():
            step = parts * ALIGNMENT // its.itemsize
            self.num_elements[its] = -(-count // step) * step

    @property
    def num_bytes(self) -> int:
        return sum(count * dtype.itemsize for dtype, count in self.num_elements.items())

    def allocate(self, make: Make) -> dict[torch.dtype, Tensor]:
        """Allocate one flat tensor per dtype by `make(shape, dtype)`."""
        return {dtype: make((count,), dtype) for dtype, count in self.num_elements.items()}

    def spans(self, parts: Mapping[str, slice]) -> dict[torch.dtype, slice]:
        """Dtype -> the slice of the flat tensor from the first to the last of the elements in `parts`.

        `parts` has for each name a slice of the elements of that tensor, in memory order.
        """
        found: dict[torch.dtype, slice] = {}
        for name, part in parts.items():
            dtype, start, _ = self._places[name]
            if part.stop > part.start:
                first = found[dtype].start if dtype in found else start + part.start
                found[dtype] = slice(first, start + part.stop)
        return {dtype: found.get(dtype, slice(0, 0)) for dtype in self.num_elements}

    def views(self, flat: Flat) -> dict[str, Tensor]:
        """Name -> view of the flat tensors with the shape of the tensor."""
        return {
            name: flat[dtype][start : start + shape.numel()].view(shape)
            for name, (dtype, start, shape) in self._places.items()
        }


LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class HostStage:
    """A stage on the host.

    Attributes:
        names: the names of the stage's parameters, in their order.
        device_layout: the places of all weights on the device. Those in `layout` come first.
        layout, gradient_layout, master_layout: the places of weights that are not packed, gradients and masters.
        flat, flat_gradients: dtype -> 1-d tensor.
        weights, gradients: name -> view of a flat tensor; frozen weights have no gradient.
        packed: the weights that are packed.
        masters: name -> FP32 view, for the weights that have a master.
        share: name -> the elements that this process steps; None: it steps all.
    """

    names: tuple[str, ...]
    device_layout: FlatLayout
    layout: FlatLayout
    flat: dict[torch.dtype, Tensor]
    weights: dict[str, Tensor]
    gradient_layout: FlatLayout
    flat_gradients: dict[torch.dtype, Tensor]
    gradients: dict[str, Tensor]
    master_layout: FlatLayout
    masters: dict[str, Tensor]
    share: dict[str, slice] | None
    packed: PackedWeights

    def own(self, name: str, tensor: Tensor) -> Tensor:
        """The part that this process steps of a tensor with a parameter's shape: a 1-d view, or the whole tensor."""
        return tensor if self.share is None else tensor.detach().view(-1)[self.share[name]]

    def own_gradients(self) -> dict[torch.dtype, tuple[slice, Tensor]]:
        """The gradients that STORE_GRAD copies: dtype -> (slice of the flat gradients, view of the slice)."""
        layout = self.gradient_layout
        spans = (
            {dtype: slice(None) for dtype in layout.num_elements} if self.share is None else layout.spans(self.share)
        )
        return {dtype: (span, self.flat_gradients[dtype][span]) for dtype, span in spans.items()}

    @property
    def num_bytes(self) -> int:
        layouts = self.layout, self.gradient_layout, self.master_layout, self.packed.layout
        return sum(layout.num_bytes for layout in layouts)


class PackedWeights:
    """The frozen weights of a stage that are packed on the host.

    Attributes:
        layout: the places of their parts.
        flat: dtype -> 1-d tensor on the host.
    """

    def __init__(self, weights: Mapping[str, Tensor], packing: Packing | None, make: Make) -> None:
        self._packing, self._names = packing, tuple(weights)
        empty = {
            f"{name}: {part}": tensor
            for name, weight in weights.items()
            for part, tensor in packing.empty(weight).items()
        }
        self.layout = FlatLayout(empty)
        self.flat = self.layout.allocate(make)
        self._views = self.layout.views(self.flat)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def pack(self, name: str, weight: Tensor) -> None:
        """Pack the values of a weight."""
        self._packing.pack(weight, *self._parts(self._views, name))

    def unpack(self, flat: Flat, weights: Mapping[str, Tensor]) -> None:
        """Write all weights from flat tensors like `self.flat`, such as their copies on the device."""
        views = self.layout.views(flat)
        for name in self._names:
            self._packing.unpack(*self._parts(views, name), weights[name])

    def _parts(self, views: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
        return views[f"{name}: codes"], views[f"{name}: scales"]


class HostStore:
    """The stages of one rank on the host.

    Args:
        stages: stage -> name -> parameter with its initial value, which is copied. Names must be different over all
            stages.
        values: stage -> name -> the initial value, in the weight's dtype or in the master's; called for one stage after
            another, so that at most one stage is held twice. None: the values of the parameters.
        device: the device that copies from the host memory.
        masters: name -> FP32 master that exists; its values are moved to host memory. True: make a master for each
            weight of lower precision. False: no masters.
        gradient_dtype: the dtype of the gradients; None: the dtypes of the weights.
        first_version: the version of the initial values.
        replicas: the replicas that share the store; None: it is not shared. If they are several, the constructor is
            collective, and the values come from the first of them.
        gathers: each replica fetches a share of the weights, and their devices gather the shares.
        packing: the packed form of the frozen weights that it `takes`; None: no weights are packed.
        packs: name -> whether the weight of that name may be packed.

    Attributes:
        stages: stage -> `HostStage`.
        parameters: name -> the tensor that an optimizer on the host steps.
        is_shared: whether several replicas share the store.
        replicas: the replicas that share the store; None if it is not shared.
        gathers: whether replicas fetch shares and gather them.
        make: (shape, dtype) -> memory of the same kind as the store's.
        versions: stage -> the version of its weights.

    Raises:
        ValueError: two stages have a name or a parameter in common.
    """

    def __init__(
        self,
        stages: Mapping[int, Mapping[str, torch.nn.Parameter]],
        *,
        values: Callable[[int], Mapping[str, Tensor]] | None = None,
        device: torch.device | str = "cpu",
        masters: bool | Mapping[str, Tensor] = False,
        gradient_dtype: torch.dtype | None = None,
        first_version: int = 0,
        replicas: NodeReplicas | None = None,
        gathers: bool = False,
        packing: Packing | None = None,
        packs: Callable[[str], bool] = lambda name: True,
    ) -> None:
        _require_own(stages)
        if packing is not None and gathers:
            raise ValueError("packed weights are not fetched in shares; let each replica fetch whole stages")
        self.is_shared = replicas is not None and replicas.size > 1
        self.gathers = gathers and self.is_shared
        self.replicas = replicas if self.is_shared else None
        self.make = replicas.buffer if self.is_shared else streams_of(torch.device(device)).kept_host_buffer
        self.stages: dict[int, HostStage] = {}
        self.parameters: dict[str, Tensor] = {}
        self.versions = dict.fromkeys(stages, first_version)
        for stage, parameters in stages.items():
            share = share_of(trained(parameters), replicas.index, replicas.size) if self.is_shared else None
            parts = replicas.size if self.gathers else 1
            frozen = {name: each for name, each in parameters.items() if not each.requires_grad}
            packed = {name: each for name, each in frozen.items() if packing and packing.takes(each) and packs(name)}
            place = self.stages[stage] = _place_of(
                parameters, gradient_dtype, masters, self.make, share, parts, PackedWeights(packed, packing, self.make)
            )
            given = parameters if values is None else values(stage)
            for name, parameter in parameters.items():
                if name in packed:
                    if not self.is_shared or replicas.index == 0:
                        place.packed.pack(name, given[name].detach())
                    continue
                weight, master = place.weights[name], place.masters.get(name)
                if not self.is_shared or replicas.index == 0:
                    weight.copy_(given[name].detach())
                    if master is not None:
                        master.copy_((masters[name] if isinstance(masters, Mapping) else given[name]).detach())
                if master is not None and isinstance(masters, Mapping):
                    masters[name].data = master
                    self.parameters[name] = masters[name]
                else:
                    steps = weight if master is None else master
                    self.parameters[name] = torch.nn.Parameter(steps, requires_grad=parameter.requires_grad)
        if self.is_shared:
            replicas.barrier()

    @property
    def num_bytes(self) -> int:
        """The bytes of weights, gradients and masters, without the moments of an optimizer."""
        return sum(stage.num_bytes for stage in self.stages.values())

    def newest_tensors(self) -> dict[str, Tensor]:
        """Name -> weight of all stages, not copied."""
        return {name: weight for stage in self.stages.values() for name, weight in stage.weights.items()}

    @torch.no_grad()
    def write_weights(self, stage: int) -> None:
        """Write this process's share of a stage's low-precision weights from the masters. Called after a step."""
        place = self.stages[stage]
        for name, weight in place.weights.items():
            parameter = self.parameters[name]
            if parameter.dtype != weight.dtype:
                place.own(name, weight).copy_(place.own(name, parameter))


def _place_of(
    parameters: Mapping[str, Tensor],
    gradient_dtype: torch.dtype | None,
    masters: bool | Mapping[str, Tensor],
    make: Make,
    share: dict[str, slice] | None,
    parts: int,
    packed: PackedWeights,
) -> HostStage:
    def has_master(name: str) -> bool:
        return name in masters if isinstance(masters, Mapping) else masters and parameters[name].dtype in LOW_PRECISION

    steps = trained(parameters)
    plain = {name: each for name, each in parameters.items() if name not in packed}
    layout, gradient_layout = FlatLayout(plain, parts=parts), FlatLayout(steps, dtype=gradient_dtype)
    master_layout = FlatLayout({name: steps[name] for name in steps if has_master(name)}, dtype=torch.float32)
    flat, flat_gradients = layout.allocate(make), gradient_layout.allocate(make)
    return HostStage(
        tuple(parameters),
        FlatLayout(plain | dict(parameters), parts=parts),
        layout,
        flat,
        layout.views(flat),
        gradient_layout,
        flat_gradients,
        gradient_layout.views(flat_gradients),
        master_layout,
        master_layout.views(master_layout.allocate(make)),
        share,
        packed,
    )


def trained(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that have gradients. The others are frozen: they are fetched, and never copied back."""
    return {name: each for name, each in parameters.items() if each.requires_grad}


def to_host_memory(module: torch.nn.Module) -> None:
    """Move the parameters of a newly built stage to host memory, from which a `HostStore` copies them later.

    A rank that does this after building each stage never holds two built stages on the device.
    """
    parameters = dict(module.named_parameters())
    layout = FlatLayout(parameters)
    for name, view in layout.views(layout.allocate(host_mapping)).items():
        parameters[name].data = view.copy_(parameters[name].data)


def _require_own(stages: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> None:
    """Raise ValueError if two stages have a name or a parameter in common, since each stage is fetched alone."""
    name_of: dict[torch.nn.Parameter, str] = {}
    names: set[str] = set()
    for stage, parameters in stages.items():
        for name, parameter in parameters.items():
            if name in names:
                raise ValueError(f"two parameters are called {name}, one of them at stage {stage}; name them apart")
            if parameter in name_of:
                raise ValueError(
                    f"{name} of stage {stage} is the same parameter as {name_of[parameter]}, which leaves the device "
                    "with its own stage; give each stage a copy, and declare the copies tied"
                )
            names.add(name)
            name_of[parameter] = name


# --- which elements of a stage's parameters each replica steps

GRAIN = 64
"""Shares are cut at multiples of this number of elements, which is 128 bytes in bf16, two of a CPU's largest vectors.

So a step works on whole vectors, and no two replicas write to the same cache line.
"""


def share_of(parameters: Mapping[str, Tensor], index: int, size: int) -> dict[str, slice]:
    """Name -> the slice of elements, in memory order, that replica `index` of `size` steps; it may be empty.

    Each element is in the share of exactly one replica.
    """
    ends = [sum(each.numel() for each in parameters.values()) * number // size for number in (index, index + 1)]
    share, before = {}, 0
    for name, parameter in parameters.items():
        count = parameter.numel()
        share[name] = slice(*(_cut(end - before, count) for end in ends))
        before += count
    return share


def _cut(at: int, count: int) -> int:
    """The nearest multiple of `GRAIN` at or below `at`, between 0 and the end of the parameter, `count`."""
    return count if at >= count else max(0, at) // GRAIN * GRAIN
