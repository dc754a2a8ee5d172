"""The weight update of a rank whose weights live on the host, without its optimizer's numbers.

`HostUpdate` keeps the batches and answers the words of the lanes. What differs between a torch optimizer and
megatron.core's is for its subclasses: how gradients are reduced, which norms they have, and how STEP decides about a
batch.

STEP decides for all stages: how to clip, whether to step at all. UPDATE of a stage follows that, with the options that
the optimizer's groups had when the batch began. An eager UPDATE is made before. Gradients leave stage by stage, so what
the norm needs of a stage is taken before, on the device (`NormsOnHost`). The gradients of tied parameters have all left
by then: they come back for a moment to be added up, and give their norms.
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

    `settings`: the options of the optimizer's groups when it began. `factor`: STEP's, on its gradients. `mean_count`:
    the mean count of a microbatch's losses; 1 where they are means.
    """

    info: BatchInfo
    report: BatchReport
    settings: Settings
    num_updates_left: int
    mean_count: float = 1.0
    factor: float = 1.0
    stepped: bool = False


class HostUpdate:
    """`RelayUpdate` of one rank. Subclasses set the attributes, call `_keep_tied`, and add

    - `reduce_norm`;
    - `_new_report(info)`: the report of a new batch;
    - `_reduce(stage)`: reduces a stage's gradients over other ranks, where `reduces_stages` says so;
    - `_norms_of(stage)`: key -> the norm of each of its gradients on the device;
    - `_places_of_tied()`: key -> name and place on the host of each tied parameter;
    - `_add_tied(gradients)`: adds up those gradients over all ranks, and returns their norms by key;
    - `_decide(batch)`: STEP's decisions about a batch;
    - `_require_steppable(stage)`: raises an error before an UPDATE that must not be made.

    Attributes:
        residency: that of the schedule.
        store, resident, gradients: the host's side; weights and gradients on the device.
        reduces_stages: the gradients of a stage are reduced over other ranks before they leave, so the program needs a
            REDUCE_GRAD for each.
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
        self._batches: dict[int, HostBatch] = {}  # by the version that each leads to

    # Called on the main thread while a batch runs.

    def begin_batch(self, info: BatchInfo) -> None:
        self._batches[info.index + 1] = HostBatch(
            info, self._new_report(info), self._host.settings(), len(self.store.stages)
        )

    def begin_backward(self, info: BatchInfo) -> None:
        """Nothing to do: each stage takes its own buffer in `accumulate`."""

    def resume_backward(self, info: BatchInfo) -> None:
        """Nothing to do: batches do not interrupt one another here."""

    # Called on the chain's thread.

    def reduce_grad(self, version: int, stage: int) -> None:
        self._reduce(stage)
        self._norms.note(version, self._norms_of(stage))

    @torch.no_grad()
    def reduce_embed(self, version: int) -> None:
        """Add up the gradients of tied parameters, which are on the host."""
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
        """Decide about all updates of the batch."""
        batch = self._batches[version]
        self._decide(batch)
        batch.stepped = True
        self._forget(version)
        return batch.report

    # The words of the host are called on the main thread; the functions that they return, in their lane.

    def fetch(self, stage: int, version: int) -> Callable[[], None]:
        return self.resident.fetch(stage, version)

    def free(self, stage: int) -> Callable[[], None]:
        return self.resident.free(stage)

    def accumulate(self, stage: int) -> None:
        self.gradients.accumulate(stage)

    def store_grad(self, stage: int, version: int) -> Callable[[], None]:
        if not self.reduces_stages:  # else when they are reduced
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
        """Raise an error before an UPDATE of the stage that must not be made. Here every UPDATE may be made."""

    def _forget(self, version: int) -> None:
        batch = self._batches[version]
        if batch.stepped and not batch.num_updates_left:
            del self._batches[version]

    # Called between batches, drained.

    def begin_evaluation(self) -> None:
        """Nothing to do: stages are fetched."""

    def show_newest(self) -> None:
        """Show the host's weights in the parameters, for a checkpoint."""
        self.resident.show_on_host()
