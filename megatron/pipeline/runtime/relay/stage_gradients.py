"""Gradients that leave stage by stage: a few flat buffers on the device, which the rank's stages take in turn.

A stage takes a buffer with its first backward of a batch; autograd adds to views of it in place, as to any gradient.
Its STORE_GRAD gives the buffer back once it has copied it to the host. Stages take buffers in the order of the row, and
always the buffer that was given back first: a backward waits for just that copy (`lane_order.LaneOrder`), on CUDA with
its stream, too. The norms are computed on the device, before the gradients leave.

A stage's norms wait for the other stages' norms. They are small, but their memory grows with the model's depth, unlike
all other memory on the device. So they go to the host, into one vector with a place for each, and come back in one copy
to be added up in the usual place and order. The host waits for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megatron.backend.streams import streams_of
from megatron.pipeline.program.lane_order import GRADIENT_BUFFERS
from megatron.pipeline.runtime.relay.host_store import Flat, HostStage
from megatron.pipeline.runtime.relay.node_replicas import NodeReplicas
from megatron.pipeline.runtime.update.gradients import norm_of

# --- norms of gradients that have left the device ---------------------------------------------------------------------

Key = TypeVar("Key", bound=Hashable)


class NormsOnHost(Generic[Key]):
    """The norms of one batch at a time.

    `keys`: of all that will ever be noted, in the order in which they come back. `dtype`: of the norms. Calls may come
    from several threads, one after the other, with their streams in that order.
    """

    def __init__(self, keys: Iterable[Key], *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._places = {key: place for place, key in enumerate(keys)}
        self._device = torch.device(device)
        self._host = streams_of(self._device).kept_host_buffer((len(self._places),), dtype)
        self._noted: set[Key] = set()
        self._version: int | None = None

    def note(self, version: int, norms: Mapping[Key, Tensor]) -> None:
        """Scalars on the device, of the batch that leads to `version`; of what was noted before, the new ones count."""
        assert self._version in (None, version), f"norms of version {self._version} are there, and {version} notes some"
        self._version = version
        self._noted |= norms.keys()
        ordered = sorted(((self._places[key], norm) for key, norm in norms.items()), key=lambda each: each[0])
        first = 0
        for last in range(1, len(ordered) + 1):  # runs of neighbours are one copy
            if last == len(ordered) or ordered[last][0] != ordered[last - 1][0] + 1:
                start, stop = ordered[first][0], ordered[last - 1][0] + 1
                values = torch.stack([norm for _, norm in ordered[first:last]])
                self._host[start:stop].copy_(values, non_blocking=True)
                first = last

    def take(self, version: int) -> dict[Key, Tensor]:
        """All that were noted of the batch, scalars on the device; they are forgotten here."""
        assert self._version in (None, version), f"norms of version {self._version} are there, and not of {version}"
        back = self._host.to(self._device, non_blocking=True, copy=True)
        taken = {key: back[place] for key, place in self._places.items() if key in self._noted}
        self._noted.clear()
        self._version = None
        return taken


# --- the flat buffers -------------------------------------------------------------------------------------------------

Name = TypeVar("Name")


def show_as_grad(parameter: torch.nn.Parameter, view: Tensor | None) -> None:
    """Autograd adds to the view itself, in place."""
    parameter.grad = view


def copied_back(
    on_host: Mapping[Name, Tensor], replicas: NodeReplicas | None, *, device: torch.device
) -> dict[Name, Tensor]:
    """Gradients that have left, on the device again. Of `replicas`, each has brought a share of them to the host: all
    have when they are read here, and none writes to them before all have read them.
    """
    if replicas is not None:
        replicas.barrier()
    back = {name: gradient.to(device, copy=True) for name, gradient in on_host.items()}
    if replicas is not None:
        replicas.barrier()
    return back


class StageGradients:
    """The gradient buffers of one rank.

    `stages`: stage -> its place on the host; `parameters`: stage -> name -> the parameter whose gradient it is. `show`:
    has backwards add to a view of a buffer (in the dtype of the host's gradients) for a parameter, or to nothing.
    """

    def __init__(
        self,
        stages: Mapping[int, HostStage],
        parameters: Mapping[int, Mapping[str, torch.nn.Parameter]],
        *,
        show: Callable[[torch.nn.Parameter, Tensor | None], None] = show_as_grad,
        device: torch.device | str = "cpu",
    ) -> None:
        self._stages = stages
        self._parameters = parameters
        self._show = show
        length: dict[torch.dtype, int] = {}
        for stage in stages.values():
            for dtype, count in stage.gradient_layout.num_elements.items():
                length[dtype] = max(length.get(dtype, 0), count)
        num_buffers = min(GRADIENT_BUFFERS, len(stages))
        self._free = deque(
            {dtype: torch.empty(count, dtype=dtype, device=device) for dtype, count in length.items()}
            for _ in range(num_buffers)
        )
        self.num_bytes = num_buffers * sum(count * dtype.itemsize for dtype, count in length.items())
        self._buffers: dict[int, Flat] = {}  # of the stages that have one
        self._flat: dict[int, Flat] = {}  # what each stage has added up last; its part of a buffer

    def accumulate(self, stage: int) -> None:
        """A backward of the stage follows: it adds to the stage's buffer, or to one that is zeroed for it."""
        if stage in self._buffers:
            return
        assert self._free, f"stages {list(self._buffers)} have all gradient buffers, and {stage} needs one"
        buffer = self._buffers[stage] = self._free.popleft()
        lengths = self._stages[stage].gradient_layout.num_elements
        self._flat[stage] = {dtype: buffer[dtype][:length] for dtype, length in lengths.items()}
        for flat in self._flat[stage].values():
            flat.zero_()
        views = self.views(stage)
        for name, parameter in self._parameters[stage].items():
            self._show(parameter, views[name])

    def flat(self, stage: int) -> Flat:
        """What the stage has added up, until it is on the host: dtype -> 1-d tensor."""
        return self._flat[stage]

    def norms(self, stage: int) -> dict[str, Tensor]:
        """name -> the norm of the gradient, FP64 scalars on the device: nobody has waited for them."""
        views = self.views(stage)
        return {name: norm_of(view) for name, view in views.items()}

    def store(self, stage: int) -> Callable[[], None]:
        """No backward adds to the gradients any more. Returns what copies them to the host, or this replica's share;
        when that is done, the buffer is free.
        """
        for parameter in self._parameters[stage].values():
            self._show(parameter, None)
        self._free.append(self._buffers.pop(stage))

        def copy() -> None:
            for dtype, (span, host) in self._stages[stage].own_gradients().items():
                host.copy_(self._flat[stage][dtype][span], non_blocking=True)

        return copy

    def views(self, stage: int) -> dict[str, Tensor]:
        """The same by name, in the parameters' shapes."""
        return self._stages[stage].gradient_layout.views(self._flat[stage])
