"""The host's copy of a rank's stages: their weights, and the gradients that arrive from the device.

Problem: where weights live on the host, the device has the weights of a few stages only, and the optimizer steps
tensors of the host. A copy should be one call for each stage, and on CUDA it needs memory from which the device copies
while the host goes on.

Solution: each stage has flat weights and flat gradients in such memory (`Streams.kept_host_buffer`: pinned on CUDA; on
a CPU the "device" is the process's private memory and the host a shared mapping, so that the two can be told apart from
outside). `parameters` belong to the host, and an optimizer steps them. They are views of the weights, or, with masters,
FP32 tensors beside weights of lower precision, which are written from the masters behind each step. The optimizer's
state lies in such memory, too (`HostMoments`).

Replicas on a node have one store, in memory that all of them have mapped (`node_replicas`). Each replica brings its
share of a stage's elements to the host's gradients and steps that share (`share_of`), so no weight or moment is kept
twice.

A stage has one place for gradients. It is free again when the stage's update is complete, which is before the stage can
be fetched for its next batch.

`FlatLayout` places the tensors of a stage in one flat tensor for each dtype. Every view begins at a multiple of
`ALIGNMENT` bytes, as torch's own memory does: a kernel may add in another order where its operands begin elsewhere, and
results have to be equal, bit for bit, to those without the host.
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

Flat = Mapping[torch.dtype, Tensor]


class FlatLayout:
    """The places of tensors of these names and shapes. `dtype`: that of all tensors; None: each keeps its own. `parts`:
    each flat tensor is padded so that it can be cut into this many equal, aligned parts.

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

    def allocate(self, make: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> dict[torch.dtype, Tensor]:
        """One flat tensor for each dtype, made by `make(shape, dtype)`."""
        return {dtype: make((count,), dtype) for dtype, count in self.num_elements.items()}

    def spans(self, parts: Mapping[str, slice]) -> dict[torch.dtype, slice]:
        """dtype -> the slice of the flat tensor from the first to the last of these elements of the tensors."""
        found: dict[torch.dtype, slice] = {}
        for name, part in parts.items():
            dtype, start, _ = self._places[name]
            if part.stop > part.start:
                first = found[dtype].start if dtype in found else start + part.start
                found[dtype] = slice(first, start + part.stop)
        return {dtype: found.get(dtype, slice(0, 0)) for dtype in self.num_elements}

    def views(self, flat: Flat) -> dict[str, Tensor]:
        """name -> its part of the flat tensors, in its shape."""
        return {
            name: flat[dtype][start : start + shape.numel()].view(shape)
            for name, (dtype, start, shape) in self._places.items()
        }


LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class HostStage:
    """A stage on the host. `flat`, `flat_gradients`: dtype -> 1-d tensor; `weights`, `gradients`: name -> view;
    `masters`: name -> FP32 view, for those weights that have one. `share`: name -> the elements that this process steps
    where others step the rest, else None.
    """

    layout: FlatLayout
    flat: dict[torch.dtype, Tensor]
    weights: dict[str, Tensor]
    gradient_layout: FlatLayout
    flat_gradients: dict[torch.dtype, Tensor]
    gradients: dict[str, Tensor]
    master_layout: FlatLayout
    masters: dict[str, Tensor]
    share: dict[str, slice] | None

    def own(self, name: str, tensor: Tensor) -> Tensor:
        """What this process steps of a tensor of a parameter's shape: the tensor itself, or a 1-d view of a part."""
        return tensor if self.share is None else tensor.detach().view(-1)[self.share[name]]

    def own_gradients(self) -> dict[torch.dtype, tuple[slice, Tensor]]:
        """dtype -> where the same elements lie in the flat gradients, and their view there: what STORE_GRAD brings."""
        layout = self.gradient_layout
        spans = (
            {dtype: slice(None) for dtype in layout.num_elements} if self.share is None else layout.spans(self.share)
        )
        return {dtype: (span, self.flat_gradients[dtype][span]) for dtype, span in spans.items()}

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes + self.gradient_layout.num_bytes + self.master_layout.num_bytes


class HostStore:
    """The stages of one rank on the host.

    `stages`: stage -> name -> parameter, with their initial values, which are copied; names are different ones over all
    stages. `masters`: FP32 parameters stand for weights of lower precision: new ones, or by name those that there are,
    which move into the host's memory. `gradient_dtype`: of the gradients; None: of the weights. `first_version`: what
    the values are. `replicas`: those with which the store is shared; then making it is collective, and the values of
    the first one count. `gathers`: they fetch shares of weights, of which their devices gather the whole.

    Attributes:
        stages: stage -> its place on the host.
        parameters: name -> the host's parameter: what an optimizer is to be made of.
        is_shared, replicas: whether other replicas have it, too, and with this one which (else None).
        gathers: whether there are any to gather from.
        versions: stage -> the version that its weights have.

    Raises:
        ValueError: two stages have a name or a parameter in common.
    """

    def __init__(
        self,
        stages: Mapping[int, Mapping[str, torch.nn.Parameter]],
        *,
        device: torch.device | str = "cpu",
        masters: bool | Mapping[str, Tensor] = False,
        gradient_dtype: torch.dtype | None = None,
        first_version: int = 0,
        replicas: NodeReplicas | None = None,
        gathers: bool = False,
    ) -> None:
        _require_own(stages)
        self.is_shared = replicas is not None and replicas.size > 1
        self.gathers = gathers and self.is_shared
        self.replicas = replicas if self.is_shared else None
        self.make = replicas.buffer if self.is_shared else streams_of(torch.device(device)).kept_host_buffer
        self.stages: dict[int, HostStage] = {}
        self.parameters: dict[str, Tensor] = {}
        self.versions = dict.fromkeys(stages, first_version)
        for stage, parameters in stages.items():
            share = share_of(parameters, replicas.index, replicas.size) if self.is_shared else None
            parts = replicas.size if self.gathers else 1
            place = self.stages[stage] = _place_of(parameters, gradient_dtype, masters, self.make, share, parts)
            for name, parameter in parameters.items():
                weight, master = place.weights[name], place.masters.get(name)
                if not self.is_shared or replicas.index == 0:
                    weight.copy_(parameter.detach())
                    if master is not None:
                        master.copy_((masters[name] if isinstance(masters, Mapping) else weight).detach())
                self.parameters[name] = self._parameter(parameter, weight, master, masters, name)
        if self.is_shared:
            replicas.barrier()

    def _parameter(
        self,
        parameter: torch.nn.Parameter,
        weight: Tensor,
        master: Tensor | None,
        masters: bool | Mapping[str, Tensor],
        name: str,
    ) -> Tensor:
        if master is None or not isinstance(masters, Mapping):
            values = weight if master is None else master
            return torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
        masters[name].data = master
        return masters[name]

    @property
    def num_bytes(self) -> int:
        """The bytes of weights, gradients and masters; an optimizer's moments come on top."""
        return sum(stage.num_bytes for stage in self.stages.values())

    def newest_tensors(self) -> dict[str, Tensor]:
        """name -> weight, of all stages: the host's own, not a copy."""
        return {name: weight for stage in self.stages.values() for name, weight in stage.weights.items()}

    @torch.no_grad()
    def write_weights(self, stage: int) -> None:
        """Write this process's share of the low-precision weights from their masters; called after a step."""
        place = self.stages[stage]
        for name, weight in place.weights.items():
            parameter = self.parameters[name]
            if parameter.dtype != weight.dtype:
                place.own(name, weight).copy_(place.own(name, parameter))


def _place_of(
    parameters: Mapping[str, Tensor],
    gradient_dtype: torch.dtype | None,
    masters: bool | Mapping[str, Tensor],
    make: Callable[[tuple[int, ...], torch.dtype], Tensor],
    share: dict[str, slice] | None,
    parts: int,
) -> HostStage:
    def has_master(name: str) -> bool:
        return name in masters if isinstance(masters, Mapping) else masters and parameters[name].dtype in LOW_PRECISION

    layout, gradient_layout = FlatLayout(parameters, parts=parts), FlatLayout(parameters, dtype=gradient_dtype)
    master_layout = FlatLayout({name: parameters[name] for name in parameters if has_master(name)}, dtype=torch.float32)
    flat, flat_gradients = layout.allocate(make), gradient_layout.allocate(make)
    return HostStage(
        layout,
        flat,
        layout.views(flat),
        gradient_layout,
        flat_gradients,
        gradient_layout.views(flat_gradients),
        master_layout,
        master_layout.views(master_layout.allocate(make)),
        share,
    )


def to_host_memory(module: torch.nn.Module) -> None:
    """Move the parameters of a stage that has just been built to the host, until a `HostStore` copies them.

    A rank that does so stage by stage never has more than one of them where they are built, be it the device or, on a
    CPU, the process's private memory.
    """
    parameters = dict(module.named_parameters())
    layout = FlatLayout(parameters)
    for name, view in layout.views(layout.allocate(host_mapping)).items():
        parameters[name].data = view.copy_(parameters[name].data)


def _require_own(stages: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> None:
    """Raises ValueError if two stages share a parameter: each stage is fetched and freed alone."""
    name_of: dict[torch.nn.Parameter, str] = {}
    names: set[str] = set()
    for stage, parameters in stages.items():
        for name, parameter in parameters.items():
            if name in names:
                raise ValueError(f"two parameters are called {name}, one of them at stage {stage}; name them apart")
            if parameter in name_of:
                raise ValueError(
                    f"{name} of stage {stage} is {name_of[parameter]}, which would be gone with its own stage; give "
                    "the stage a copy, and say that the two are tied"
                )
            names.add(name)
            name_of[parameter] = name


# --- which elements of a stage's parameters each replica steps

GRAIN = 64
"""Elements: 128 bytes of bf16, which is twice a CPU's largest vector. Shares are cut at multiples of it, so that a step
goes through them in whole vectors, and no two replicas write to one line of a cache.
"""


def share_of(parameters: Mapping[str, Tensor], index: int, size: int) -> dict[str, slice]:
    """name -> the elements, in memory order, that replica `index` of `size` steps; none, for some of them. Together
    the replicas have each element once.
    """
    ends = [sum(each.numel() for each in parameters.values()) * number // size for number in (index, index + 1)]
    share, before = {}, 0
    for name, parameter in parameters.items():
        count = parameter.numel()
        share[name] = slice(*(_cut(end - before, count) for end in ends))
        before += count
    return share


def _cut(at: int, count: int) -> int:
    """The nearest cut at or below `at` in a parameter of `count` elements, at most its end."""
    return count if at >= count else max(0, at) // GRAIN * GRAIN
