"""Weight updates with weights on the host: the common part for torch's and megatron.core's optimizers.

**Gradients leave the device stage by stage.** Problem: where weights live on the host, the device must not hold the
gradients of all stages at once.

Solution: a few flat buffers on the device, which the stages of the rank take in turn. A stage takes a buffer at its
first backward of a batch, and autograd adds to views of the buffer in place. The buffer is free again when the
STORE_GRAD of the stage has copied it to the host. Stages take buffers in the order of the row, always the buffer that
was given back first. So a backward waits only for the copy from that buffer (`lane_order.LaneOrder`), on CUDA also on
its stream.

**Norms.** Problem: norms are computed on the device before the gradients leave, and the norms of a stage wait for those
of the other stages. They are small, but their number grows with the depth of the model, and all other memory on the
device does not.

Solution: the norms are copied to one vector on the host, and back to the device in one copy, where they are added up in
the same order as under other schedules. The host does not wait for these copies.

**Updates.** `HostUpdate` stores the batches in flight and runs the calls of the lanes. Its subclasses differ in how
they reduce gradients and compute norms, and in the decisions of STEP.

STEP decides for all stages by which factor to multiply gradients and whether to step. The UPDATE of each stage comes
after it, with the options that the optimizer's groups had when the batch began. An eager UPDATE comes before STEP.

Gradients leave the device stage by stage, so the norms of a stage are computed before that (`NormsOnHost`). When the
gradients of tied parameters must be added up, all of them have left the device. So they are copied back for the sum and
its norms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megatron.backend.streams import streams_of
from megatron.pipeline.program.lane_order import GRADIENT_BUFFERS, Residency
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.relay.host_optimizer import HostOptimizer, Settings
from megatron.pipeline.runtime.relay.host_store import Flat, HostStage, HostStore
from megatron.pipeline.runtime.relay.input_stash import RelayLedger
from megatron.pipeline.runtime.relay.node_replicas import NodeReplicas
from megatron.pipeline.runtime.relay.resident_weights import HostVersions, ResidentWeights
from megatron.pipeline.runtime.update.gradients import norm_of

# --- norms of gradients that have left the device ---------------------------------------------------------------------

Key = TypeVar("Key", bound=Hashable)


class NormsOnHost(Generic[Key]):
    """Stores the norms of the gradients of one batch at a time on the host.

    Several threads may call the methods, one at a time, if their streams do the work in the order of the calls.

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
        for name, view in views.items():
            self._show(self._parameters[stage][name], view)

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
        for name in self._stages[stage].gradients:
            self._show(self._parameters[stage][name], None)
        self._free.append(self._buffers.pop(stage))

        def copy() -> None:
            for dtype, (span, host) in self._stages[stage].own_gradients().items():
                host.copy_(self._flat[stage][dtype][span], non_blocking=True)

        return copy

    def views(self, stage: int) -> dict[str, Tensor]:
        """The gradients of a stage by name, as views in the shapes of the parameters."""
        return self._stages[stage].gradient_layout.views(self._flat[stage])


@dataclass
class HostBatch:
    """A batch between its first forward and the last of its updates.

    Attributes:
        settings: the options of the optimizer's groups when the batch began.
        num_updates_left: the number of stages whose UPDATE has not been called.
        mean_count: the mean count of a microbatch's losses; 1 if they are means.
        factor: the factor by which updates multiply the gradients, set by STEP.
        stepped: whether STEP has been called.
    """

    info: BatchInfo
    report: BatchReport
    settings: Settings
    num_updates_left: int
    mean_count: float = 1.0
    factor: float = 1.0
    stepped: bool = False


class HostUpdate:
    """Base of the `RelayUpdate` of one rank.

    A subclass calls `_set_up` in its constructor, sets `reduces_stages`, and adds

    - `reduce_norm`;
    - `_new_report(info)`: returns the report of a new batch;
    - `_reduce(stage)`: reduces the gradients of a stage over other ranks; called if `reduces_stages`;
    - `_norms_of(stage)`: returns key -> norm for the gradients of a stage on the device;
    - `_places_of_tied()`: returns key -> (name, stage on the host) for each tied parameter of this rank;
    - `_add_tied(gradients)`: adds up the gradients of tied parameters over all copies, and returns key -> norm;
    - `_decide(batch)`: makes the decisions of STEP about a batch;
    - `_require_steppable(stage)`, optional: raises an error if the UPDATE of a stage must not be made.

    Attributes:
        residency: the residency of the schedule.
        store: the stages on the host.
        resident: the weights on the device.
        versions: the weights on the host.
        gradients: the gradients on the device.
        ledger: the bytes of the rank, for the engine.
        frozen: the stages that have only forwards, and no UPDATE.
        reduces_stages: the gradients of each stage are reduced over other ranks before they leave the device, so the
            program needs a REDUCE_GRAD for each stage.
    """

    frozen: frozenset[int] = frozenset()
    reduces_stages: bool

    def _set_up(
        self,
        modules: Mapping[int, torch.nn.Module],
        store: HostStore,
        host: HostOptimizer,
        norms: NormsOnHost,
        *,
        residency: Residency,
        show: Callable[[torch.nn.Parameter, Tensor | None], None],
        has_tied: bool,
        device: torch.device,
    ) -> None:
        """Set the attributes. `show`: as for `StageGradients`; `has_tied`: the rank has tied parameters."""
        self.residency, self.store = residency, store
        self._host, self._norms, self._device = host, norms, device
        self.resident = ResidentWeights(modules, store, num_resident=residency.stages, device=device)
        self.versions = HostVersions(store, self.resident)
        self.gradients = StageGradients(store.stages, self.resident.parameters, show=show, device=device)
        self.ledger = RelayLedger(
            always_on_device=self.resident.num_bytes + self.gradients.num_bytes,
            on_host=lambda: store.num_bytes + host.moments.num_bytes,
        )
        self._tied_replicas = store.replicas.again() if store.is_shared and has_tied else None
        self._batches: dict[int, HostBatch] = {}  # key: the version that the batch's step makes

    # Called on the main thread while a batch runs.

    def begin_batch(self, info: BatchInfo) -> None:
        self._batches[info.index + 1] = HostBatch(
            info, self._new_report(info), self._host.settings(), len(self.store.stages) - len(self.frozen)
        )

    def begin_backward(self, info: BatchInfo) -> None:
        """Do nothing: each stage takes its buffer in `accumulate`."""

    def resume_backward(self, info: BatchInfo) -> None:
        """Do nothing: batches do not overlap where weights live on the host."""

    # Called on the chain's thread.

    def reduce_grad(self, version: int, stage: int) -> None:
        self._reduce(stage)
        self._norms.note(version, self._norms_of(stage))

    @torch.no_grad()
    def reduce_embed(self, version: int) -> None:
        """Add up the gradients of tied parameters, which are on the host, and write the sums to the host."""
        places = self._places_of_tied()
        if not places:
            return
        on_host = {key: place.gradients[name] for key, (name, place) in places.items()}
        back = copied_back(on_host, self._tied_replicas, device=self._device)
        self._norms.note(version, self._add_tied(back))
        for key, (name, place) in places.items():
            place.own(name, on_host[key]).copy_(place.own(name, back[key]))

    # Called on the main thread, after the chain.

    def step(self, version: int) -> BatchReport:
        """Make the decisions for the updates of all stages."""
        batch = self._batches[version]
        self._decide(batch)
        batch.stepped = True
        self.store.versions.update(dict.fromkeys(self.frozen, version))
        self._forget(version)
        return batch.report

    # These methods are called on the main thread, and the functions that they return in a lane.

    def fetch(self, stage: int, version: int) -> Callable[[], None]:
        return self.resident.fetch(stage, version)

    def free(self, stage: int) -> Callable[[], None]:
        return self.resident.free(stage)

    def accumulate(self, stage: int) -> None:
        self.gradients.accumulate(stage)

    def store_grad(self, stage: int, version: int) -> Callable[[], None]:
        if not self.reduces_stages:  # else `reduce_grad` notes them
            self._norms.note(version, self._norms_of(stage))
        return self.gradients.store(stage)

    def update(self, stage: int, version: int) -> Callable[[], None]:
        batch = self._batches[version]
        batch.num_updates_left -= 1
        self._forget(version)

        def make() -> None:
            self._require_steppable(stage)
            if not batch.report.skipped:
                self._host.update(stage, batch.settings, factor=batch.factor)
            self.store.versions[stage] = version

        return make

    def _require_steppable(self, stage: int) -> None:
        """Raise an error if the UPDATE of a stage must not be made. The base class raises none."""

    def _forget(self, version: int) -> None:
        batch = self._batches[version]
        if batch.stepped and not batch.num_updates_left:
            del self._batches[version]

    # Called between batches, drained.

    def begin_evaluation(self) -> None:
        """Do nothing: an evaluation fetches the stages."""

    def show_newest(self) -> None:
        """Show the host's weights in the parameters, for a checkpoint."""
        self.resident.show_on_host()
