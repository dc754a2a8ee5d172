"""The part of a weight update that is the same for torch's and megatron.core's optimizers, with weights on the host.

`HostUpdate` stores the batches in flight and runs the calls of the lanes. Its subclasses differ in how they reduce
gradients and compute norms, and in the decisions of STEP.

STEP decides for all stages by which factor to multiply gradients and whether to step. The UPDATE of each stage comes
after it, with the options that the optimizer's groups had when the batch began. An eager UPDATE comes before STEP.

Gradients leave the device stage by stage, so the norms of a stage are computed before that (`NormsOnHost`). When the
gradients of tied parameters must be added up, all of them have left the device. So they are copied back for the sum and
its norms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.relay.host_optimizer import HostOptimizer, Settings
from megatron.pipeline.runtime.relay.host_store import HostStore
from megatron.pipeline.runtime.relay.resident_weights import ResidentWeights
from megatron.pipeline.runtime.relay.stage_gradients import NormsOnHost, StageGradients, copied_back


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

    A subclass sets the attributes, calls `_keep_tied` in its constructor, and adds

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
        gradients: the gradients on the device.
        reduces_stages: the gradients of each stage are reduced over other ranks before they leave the device, so the
            program needs a REDUCE_GRAD for each stage.
    """

    residency: Residency
    store: HostStore
    resident: ResidentWeights
    gradients: StageGradients
    reduces_stages: bool
    _host: HostOptimizer
    _norms: NormsOnHost

    def _keep_tied(self, *, has_tied: bool, device: torch.device) -> None:
        self._device = device
        self._tied_replicas = self.store.replicas.again() if self.store.is_shared and has_tied else None
        self._batches: dict[int, HostBatch] = {}  # key: the version that the batch's step makes

    # Called on the main thread while a batch runs.

    def begin_batch(self, info: BatchInfo) -> None:
        self._batches[info.index + 1] = HostBatch(
            info, self._new_report(info), self._host.settings(), len(self.store.stages)
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
