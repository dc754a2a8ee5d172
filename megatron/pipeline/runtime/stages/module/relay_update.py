"""A torch optimizer on the host as the weight update of a rank whose weights live there.

It computes what `ModuleUpdate` does: the mean over the microbatches and the replicas, tied parameters added up, the
exact global norm, clipping, and a batch without a step where a gradient is not finite anywhere. But gradients leave
stage by stage, so what the norm needs of a stage is taken before, on the device, and leaves, too (`NormsOnHost`): the
norm of each of its parameters, of which the sum over a rank is taken in the order in which one stage with all these
parameters would take it. The gradients of tied parameters, which have both left by then, come back for a moment to be
added up, and give their norms.

STEP decides for all stages: how to clip, whether to step at all. UPDATE of a stage follows that, with what the
optimizer's groups said when the batch began. Where updates are eager they are made before, so nothing may be decided:
a gradient that is not finite ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.relay.host_optimizer import HostOptimizer, Settings
from megatron.pipeline.runtime.relay.host_store import HostStore
from megatron.pipeline.runtime.relay.resident_weights import ResidentWeights
from megatron.pipeline.runtime.relay.stage_gradients import NormsOnHost, StageGradients, copied_back
from megatron.pipeline.runtime.stages.module.reduction import ModuleReduction, TiedParameter, clip_factor
from megatron.pipeline.runtime.update.gradients import norm_of


@dataclass
class _PendingUpdates:
    """A batch between its first forward and the last of its updates.

    `mean_count`: the mean count of a microbatch's losses; 1 where they are means. `factor`, `skipped`: the decisions of
    STEP.
    """

    report: BatchReport
    settings: Settings
    num_updates_left: int
    num_microbatches: int
    mean_count: float = 1.0
    factor: float = 1.0
    skipped: bool = False
    stepped: bool = False


class ModuleRelayUpdate:
    """The weight update of one rank. Its stages are built with `weights.of_stage(index)` in the place of versions.

    `modules`: stage -> its module, all on this rank, ascending. `store`: made of their parameters; `optimizer`: made of
    the store's. `residency`: of the schedule. `scheduler`, `clip_grad`, groups and the rest: as for `ModuleUpdate`.

    Raises:
        ValueError: eager updates with clipping, an optimizer of other parameters than the store's, or replicas of one
            store without a group.
    """

    def __init__(
        self,
        modules: Mapping[int, torch.nn.Module],
        store: HostStore,
        *,
        residency: Residency,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        clip_grad: float = 0.0,
        data_parallel_group: Any = None,
        counts_in_norm: bool = True,
        job_group: Any = None,
        tied: TiedParameter | None = None,
        loss_names: tuple[str, ...] = ("loss",),
        device: torch.device | str = "cpu",
    ) -> None:
        if residency.is_eager and clip_grad:
            raise ValueError(
                f"an eager update is made before the norm is known, and gradients are clipped to {clip_grad:g}; use "
                "deferred updates, or do not clip"
            )
        if store.is_shared and data_parallel_group is None:
            raise ValueError(
                f"replicas on {store.replicas.host} share the store, of which each steps a part, and their gradients "
                "are not averaged; give their data_parallel_group, or each a store of its own"
            )
        self.store = store
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.residency = residency
        self._is_eager = residency.is_eager
        self._clip_grad = clip_grad
        self._host = HostOptimizer(optimizer, store)
        parameters = {stage: dict(module.named_parameters()) for stage, module in modules.items()}
        self.weights = ResidentWeights(modules, store, num_resident=residency.stages, device=device)
        self.gradients = StageGradients(store.stages, parameters, device=device)
        names = [name for named in parameters.values() for name in named]
        self._norms = NormsOnHost(names, dtype=torch.float64, device=device)
        self._tied = tied
        self._reduction = ModuleReduction(
            data_parallel_group=data_parallel_group,
            job_group=job_group,
            tied=tied,
            counts_in_norm=counts_in_norm,
            loss_names=loss_names,
            device=torch.device(device),
        )
        self._pending: dict[int, _PendingUpdates] = {}  # by the version that the batch leads to
        self._tied_replicas = store.replicas.again() if store.is_shared and tied is not None else None
        self._reduction.warm_up()

    # --- a batch

    def begin_batch(self, info: BatchInfo) -> None:
        report = BatchReport(batch=info.index, num_samples=info.num_samples)
        self._pending[info.index + 1] = _PendingUpdates(
            report, self._host.settings(), len(self.store.stages), info.num_microbatches
        )

    def begin_backward(self, info: BatchInfo) -> None:
        """Nothing to do: each stage takes its own buffer in `accumulate`."""

    def resume_backward(self, info: BatchInfo) -> None:
        """Nothing to do: batches do not interrupt one another here."""

    def reduce_grad(self, version: int, stage: int) -> None:
        self._reduction.average(self.gradients.flat(stage).values())
        self._norms.note(version, self.gradients.norms(stage))

    def reduce_embed(self, version: int) -> None:
        if self._tied is None:
            return
        places = {name: place for place in self.store.stages.values() for name in place.gradients}
        on_host = {name: places[name].gradients[name] for name in self._tied.names}
        back = copied_back(on_host, self._tied_replicas, device=self._reduction.device)
        self._reduction.add_copies(back)  # on the device, which groups join
        for name, each in back.items():
            self._norms.note(version, {name: norm_of(each)})
            place = places[name]
            place.own(name, place.gradients[name]).copy_(place.own(name, each))

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        pending = self._pending[version]
        taken = self._norms.take(version)
        norms = [norm for name, norm in taken.items() if name not in self._reduction.uncounted]
        local = torch.stack(norms).square().sum().item() if norms else 0.0
        count = self._reduction.reduce_norm(pending.report, local, stop_requests, losses)
        pending.mean_count = count / pending.num_microbatches
        pending.report.grad_norm /= pending.mean_count or 1.0
        if self._is_eager and pending.mean_count != 1.0:
            raise ValueError(
                f"the losses of batch {version - 1} are sums, and eager updates are made before it is known what they "
                "count; use deferred updates, or return means"
            )

    def step(self, version: int) -> BatchReport:
        pending = self._pending[version]
        report = pending.report
        report.learning_rate = pending.settings[0]["lr"]
        report.skipped = pending.skipped = report.overflow or not pending.mean_count
        if not report.skipped:
            pending.factor = clip_factor(self._clip_grad, report.grad_norm) / pending.mean_count
            self._host.note_step()
            if self.scheduler is not None:
                self.scheduler.step()
        pending.stepped = True
        self._forget(version)
        return report

    # --- the words of the host

    def fetch(self, stage: int, version: int) -> Callable[[], None]:
        return self.weights.fetch(stage, version)

    def free(self, stage: int) -> Callable[[], None]:
        return self.weights.free(stage)

    def accumulate(self, stage: int) -> None:
        self.gradients.accumulate(stage)

    def store_grad(self, stage: int, version: int) -> Callable[[], None]:
        if self._reduction.data_parallel_group is None:  # else when they are reduced
            self._norms.note(version, self.gradients.norms(stage))
        return self.gradients.store(stage)

    def update(self, stage: int, version: int) -> Callable[[], None]:
        pending = self._pending[version]
        pending.num_updates_left -= 1
        self._forget(version)

        def make() -> None:
            if self._is_eager:
                self._require_finite(stage)
            if not pending.skipped:
                self._host.update(stage, pending.settings, factor=pending.factor)
            self.store.versions[stage] = version

        return make

    # --- drained

    def begin_evaluation(self) -> None:
        """Nothing to do: stages are fetched."""

    def show_newest(self) -> None:
        self.weights.show_on_host()

    def _forget(self, version: int) -> None:
        pending = self._pending[version]
        if pending.stepped and not pending.num_updates_left:
            del self._pending[version]

    def _require_finite(self, stage: int) -> None:
        gradients = [own for _, own in self.store.stages[stage].own_gradients().values() if own.numel()]
        if not all(torch.linalg.vector_norm(each, ord=float("inf")).isfinite() for each in gradients):
            raise RuntimeError(
                f"the gradients of stage {stage} are not finite, and an eager update cannot leave the batch out: other "
                "stages have made theirs; use deferred updates"
            )
