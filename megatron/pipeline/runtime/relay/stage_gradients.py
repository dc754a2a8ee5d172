"""Gradients that leave the device stage by stage, and their norms.

Problem: where weights live on the host, the device must not hold the gradients of all stages at once.

Solution: a few flat buffers on the device, which the stages of the rank take in turn. A stage takes a buffer at its
first backward of a batch, and autograd adds to views of the buffer in place. The buffer is free again when the
STORE_GRAD of the stage has copied it to the host. Stages take buffers in the order of the row, always the buffer that
was given back first. So a backward waits only for the copy from that buffer (`lane_order.LaneOrder`), on CUDA also on
its stream.

Problem: norms are computed on the device before the gradients leave, and the norms of a stage wait for those of the
other stages. They are small, but their number grows with the depth of the model, and all other memory on the device
does not.

Solution: the norms are copied to one vector on the host, and back to the device in one copy, where they are added up in
the same order as under other schedules. The host does not wait for these copies.
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
    """Stores the norms of the gradients of one batch at a time on the host.

    Calls may come from several threads, but not at the same time, and their streams must be ordered in the same way.

    Args:
        keys: the keys of all norms, in the order in which `take` returns them.
        dtype: the dtype of the norms.
        device: the device of the norms.
    """

    def __init__(self, keys: Iterable[Key], *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._places = {key: place for place, key in enumerate(keys)}
        self._device = torch.device(device)
        self._host = streams_of(self._device).kept_host_buffer((len(self._places),), dtype)
        self._noted: set[Key] = set()
        self._version: int | None = None

    def note(self, version: int, norms: Mapping[Key, Tensor]) -> None:
        """Store norms, scalars on the device, of the batch whose step makes `version`.

        A norm replaces the norm that was stored under the same key.
        """
        assert self._version in (None, version), f"norms of version {self._version} are there, and {version} notes some"
        self._version = version
        self._noted |= norms.keys()
        ordered = sorted(((self._places[key], norm) for key, norm in norms.items()), key=lambda each: each[0])
        first = 0
        for last in range(1, len(ordered) + 1):  # one copy for each run of neighbours
            if last == len(ordered) or ordered[last][0] != ordered[last - 1][0] + 1:
                start, stop = ordered[first][0], ordered[last - 1][0] + 1
                values = torch.stack([norm for _, norm in ordered[first:last]])
                self._host[start:stop].copy_(values, non_blocking=True)
                first = last

    def take(self, version: int) -> dict[Key, Tensor]:
        """Remove and return all norms of the batch whose step makes `version`: key -> scalar on the device."""
        assert self._version in (None, version), f"norms of version {self._version} are there, and not of {version}"
        back = self._host.to(self._device, non_blocking=True, copy=True)
        taken = {key: back[place] for key, place in self._places.items() if key in self._noted}
        self._noted.clear()
        self._version = None
        return taken


# --- the flat buffers -------------------------------------------------------------------------------------------------

Name = TypeVar("Name")


def show_as_grad(parameter: torch.nn.Parameter, view: Tensor | None) -> None:
    """Make autograd add the gradient of `parameter` to `view` in place; None: no backward follows."""
    parameter.grad = view


def copied_back(
    on_host: Mapping[Name, Tensor], replicas: NodeReplicas | None, *, device: torch.device
) -> dict[Name, Tensor]:
    """Copy gradients from the host back to the device. Collective over `replicas`.

    Each of `replicas` has written a share of the gradients to the host. The barriers make all shares present before
    they are read, and keep replicas from writing before all have read.
    """
    if replicas is not None:
        replicas.barrier()
    back = {name: gradient.to(device, copy=True) for name, gradient in on_host.items()}
    if replicas is not None:
        replicas.barrier()
    return back


class StageGradients:
    """The gradient buffers of one rank on the device.

    Args:
        stages: stage -> the stage on the host.
        parameters: stage -> name -> parameter.
        show: called with a parameter and a view of a buffer; makes backwards add the parameter's gradient to the view,
            which has the dtype of the host's gradients. Called with None when no backward follows.
        device: the device of the buffers.

    Attributes:
        num_bytes: the bytes of all buffers.
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
        self._buffers: dict[int, Flat] = {}  # stage -> the buffer that it has taken
        self._flat: dict[int, Flat] = {}  # stage -> its part of the buffer that it took last

    def accumulate(self, stage: int) -> None:
        """Make backwards of the stage add to its buffer. If it has none, it takes a free buffer, which is zeroed."""
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
        """The gradients of a stage before STORE_GRAD has copied them: dtype -> 1-d tensor."""
        return self._flat[stage]

    def norms(self, stage: int) -> dict[str, Tensor]:
        """Name -> the norm of the gradient: float64 scalars on the device, possibly still being computed."""
        views = self.views(stage)
        return {name: norm_of(view) for name, view in views.items()}

    def store(self, stage: int) -> Callable[[], None]:
        """End the backwards of a stage, and give its buffer back.

        Returns the function that copies the gradients, or this replica's share, to the host. The next stage that takes
        the buffer must wait for this copy.
        """
        for parameter in self._parameters[stage].values():
            self._show(parameter, None)
        self._free.append(self._buffers.pop(stage))

        def copy() -> None:
            for dtype, (span, host) in self._stages[stage].own_gradients().items():
                host.copy_(self._flat[stage][dtype][span], non_blocking=True)

        return copy

    def views(self, stage: int) -> dict[str, Tensor]:
        """The gradients of a stage by name, as views in the shapes of the parameters."""
        return self._stages[stage].gradient_layout.views(self._flat[stage])
