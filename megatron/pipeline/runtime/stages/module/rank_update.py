"""Make the weight versions and the weight update of a rank from a weight policy.

Stages that step together share one `ModuleUpdate` and its versions. Under stale weights (FTPipe) each stage steps
separately and has its own.

**Weights on the host.** `ModuleRelayUpdate` computes the same as `ModuleUpdate`: the mean over microbatches and
replicas, sums of the gradients of tied parameters, the exact global norm, and clipping. If a gradient is not finite on
any rank, no rank steps. The norm of a rank is summed in the order in which one stage with all parameters would sum it.

Eager updates are made before STEP, so STEP cannot clip or skip. Then a gradient that is not finite ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.relay.host_optimizer import HostOptimizer
from megatron.pipeline.runtime.relay.host_store import HostStage, HostStore
from megatron.pipeline.runtime.relay.host_update import HostBatch, HostUpdate, NormsOnHost, show_as_grad
from megatron.pipeline.runtime.stages.module.reduction import ModuleReduction
from megatron.pipeline.runtime.stages.module.stage import Counts, by_microbatches
from megatron.pipeline.runtime.stages.module.update import FrozenUpdate, ModuleUpdate
from megatron.pipeline.runtime.update.gradients import clip_factor, norm_of
from megatron.pipeline.runtime.update.optimizer_wrappers import note_step
from megatron.pipeline.runtime.update.versions import AheadVersions, WeightVersions
from megatron.pipeline.runtime.update.weight_prediction import PredictedVersions

TOGETHER = -1
"""The key of the update of a rank whose stages step together."""

OfStage = Mapping[int, Mapping[str, nn.Parameter]]
"""Stage of this rank -> name -> trained parameter. Two stages may share a parameter."""


def make_versions(weights: WeightPolicy, of_stage: OfStage, *, num_stages: int, first_version: int) -> dict[int, Any]:
    """Stage -> its weight versions; stages that step together share them."""
    if TOGETHER not in steps_of(weights, of_stage):
        plain = partial(WeightVersions, window=1)
        make = partial(AheadVersions, ahead=weights.ahead) if weights.ahead else plain
        return {index: make(own, first_version=first_version) for index, own in of_stage.items()}
    if weights.predicts:
        return dict.fromkeys(of_stage, PredictedVersions(together(of_stage), first_version=first_version))
    window = max(weights.max_live_versions(index, num_stages) for index in of_stage)
    return dict.fromkeys(of_stage, WeightVersions(together(of_stage), window=window, first_version=first_version))


def steps_of(weights: WeightPolicy, of_stage: OfStage) -> dict[int, dict[str, nn.Parameter]]:
    """Key -> the parameters that one update steps. The key is a stage, or `TOGETHER` if all stages step together."""
    if weights.refreshes:
        return {index: dict(own) for index, own in of_stage.items()}
    return {TOGETHER: together(of_stage)}


def make_updates(
    steps: Mapping[int, Mapping[str, nn.Parameter]],
    versions: Mapping[int, WeightVersions],
    stepping: Mapping[int, Mapping[str, Any]],
    *,
    weights: WeightPolicy,
    job_group: Any,
    device: torch.device | str,
    counts: Counts = by_microbatches,
    skips_unused: bool = False,
    data_parallel_group: Any = None,
    counts_in_norm: bool = True,
    **options: Any,
) -> tuple[ModuleUpdate | StageUpdates, dict[int, ModuleUpdate]]:
    """Make the weight update of a rank. Collective over the job.

    Args:
        steps: the result of `steps_of`.
        versions: the result of `make_versions`.
        stepping: key of `steps` -> arguments `optimizer` and `scheduler` of its `ModuleUpdate`.
        weights: the weight policy.
        job_group, device: as for `ModuleUpdate`.
        counts, skips_unused, data_parallel_group, counts_in_norm: as for `ModuleUpdate`.
        options: further arguments of the `ModuleUpdate` of a rank whose stages step together; else ignored.

    Returns:
        The weight update for the engine, and the updates that step, by the keys of `steps`.
    """
    common = {
        "num_grad_buffers": weights.max_gradient_buffers, "device": device, "counts": counts,
        "skips_unused": skips_unused, "data_parallel_group": data_parallel_group,
    }  # fmt: skip
    if TOGETHER not in steps:
        updates = {
            key: ModuleUpdate(own, versions=versions[key], **stepping[key], **common) for key, own in steps.items()
        }
        return StageUpdates(updates, job_group=job_group, counts_in_norm=counts_in_norm, device=device), updates
    (versions_of_rank,) = set(versions.values())
    update = ModuleUpdate(
        steps[TOGETHER], versions=versions_of_rank, job_group=job_group, counts_in_norm=counts_in_norm,
        **stepping[TOGETHER], **common, **options,
    )  # fmt: skip
    return update, {TOGETHER: update}


def together(of_stage: OfStage) -> dict[str, nn.Parameter]:
    """Name -> parameter over all stages. A parameter of several stages has the name of the first stage."""
    names = {parameter: name for own in reversed(of_stage.values()) for name, parameter in own.items()}
    return {name: parameter for own in of_stage.values() for name, parameter in own.items() if names[parameter] == name}


# --- stages that step separately


class StageUpdates(FrozenUpdate):
    """The update of a rank whose stages step separately, as under stale weights (FTPipe).

    The stages of the rank may be at different batches, so each has its own update. The report of a batch is for the
    whole rank. It is complete when all stages have stepped and the norms have been added up over the job.

    Args:
        updates: stage -> its update, made without clipping, without tied parameters, and with `data_parallel_group` as
            its only group.
        options: arguments of `FrozenUpdate`.
    """

    def __init__(self, updates: Mapping[int, ModuleUpdate], **options: Any) -> None:
        super().__init__(**options)
        self._updates = dict(updates)

    def of_stage(self, stage: int) -> ModuleUpdate:
        return self._updates[stage]

    def begin_batch(self, info: BatchInfo) -> None:
        super().begin_batch(info)
        for update in self._updates.values():
            update.begin_batch(info)

    def reduce_grad(self, version: int, stage: int) -> None:
        self._updates[stage].reduce_grad(version, stage)

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        """Complete the report of a batch that all stages have stepped. Called on the chain's thread."""
        norms, rates = zip(*(update.take_stepped(version) for update in self._updates.values()), strict=True)
        report = self._reports.pop(version)
        report.learning_rate = rates[0]
        report.skipped = not self._reduction.reduce_norm(report, sum(norms), stop_requests, losses)

    def begin_evaluation(self) -> None:
        self.show_newest()

    def show_newest(self) -> None:
        for update in self._updates.values():
            update.show_newest()


class ModuleRelayUpdate(HostUpdate):
    """The weight update of one rank. Its stages are built with `weights.of_stage(index)` in place of weight versions.

    Args:
        modules: stage -> module, for all stages of this rank in ascending order.
        store: made from the parameters of the modules, in their order. Frozen parameters are only fetched.
        residency: the residency of the schedule.
        optimizer: made from the parameters of `store`.
        scheduler, clip_grad: as for `ModuleUpdate`.
        frozen: the stages that have only forwards.
        observe: called with the norms of the gradients of each batch that is stepped, by name, before clipping.
        reduction: as for `ModuleUpdate`.

    Attributes:
        weights: the weights on the device.
        scales: always None, since a relay has no loss scale.

    Raises:
        ValueError: eager updates with clipping, an optimizer with parameters that are not in `store`, or replicas that
            share `store` without a `data_parallel_group`.
    """

    scales = None

    def __init__(
        self,
        modules: Mapping[int, torch.nn.Module],
        store: HostStore,
        *,
        residency: Residency,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        clip_grad: float = 0.0,
        frozen: Iterable[int] = (),
        observe: Callable[[Mapping[str, Tensor]], None] | None = None,
        **reduction: Any,
    ) -> None:
        if residency.is_eager and clip_grad:
            raise ValueError(
                f"an eager update is made before the norm is known, and gradients are clipped to {clip_grad:g}; use "
                "deferred updates, or do not clip"
            )
        self._reduction = ModuleReduction(**reduction)
        self.reduces_stages = self._reduction.data_parallel_group is not None
        if store.is_shared and not self.reduces_stages:
            raise ValueError(
                f"replicas on {store.replicas.host} share the store, of which each steps a part, and their gradients "
                "are not averaged; give their data_parallel_group, or each a store of its own"
            )
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.frozen = frozenset(frozen)
        self._observe = observe
        self._observed: dict[str, Tensor] = {}  # the norms of the batch between its reduction and its step
        self._clip_grad = clip_grad
        device = self._reduction.device
        names = [name for place in store.stages.values() for name in place.gradients]
        self._set_up(
            modules, store, HostOptimizer(optimizer, store), NormsOnHost(names, dtype=torch.float64, device=device),
            residency=residency, show=show_as_grad, has_tied=self._reduction.tied is not None, device=device,
        )  # fmt: skip
        self.weights = self.resident
        self._reduction.warm_up()

    def _new_report(self, info: BatchInfo) -> BatchReport:
        return BatchReport(batch=info.index, num_samples=info.num_samples)

    def _reduce(self, stage: int) -> None:
        self._reduction.average(self.gradients.flat(stage).values())

    def _norms_of(self, stage: int) -> dict[str, Tensor]:
        return self.gradients.norms(stage)

    def _places_of_tied(self) -> dict[str, tuple[str, HostStage]]:
        names = () if self._reduction.tied is None else self._reduction.tied.names
        return {
            name: (name, place) for place in self.store.stages.values() for name in place.gradients if name in names
        }

    def _add_tied(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        self._reduction.add_copies(gradients)
        return {name: norm_of(each) for name, each in gradients.items()}

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        batch = self._batches[version]
        taken = self._norms.take(version)
        norms = [norm for name, norm in taken.items() if name not in self._reduction.uncounted]
        local = torch.stack(norms).square().sum().item() if norms else 0.0
        count = self._reduction.reduce_norm(batch.report, local, stop_requests, losses)
        batch.mean_count = count / batch.info.num_microbatches
        batch.report.grad_norm /= batch.mean_count or 1.0
        if self._observe is not None:
            self._observed = {name: norm / (batch.mean_count or 1.0) for name, norm in taken.items()}
        if self.residency.is_eager and batch.mean_count != 1.0:
            raise ValueError(
                f"the losses of batch {version - 1} are sums, and eager updates are made before the count of all "
                "samples is known; use deferred updates, or return means"
            )

    def _decide(self, batch: HostBatch) -> None:
        report = batch.report
        report.learning_rate = batch.settings[0]["lr"]
        report.skipped = report.overflow or not batch.mean_count
        if not report.skipped:
            batch.factor = clip_factor(self._clip_grad, report.grad_norm) / batch.mean_count
            note_step(self.optimizer)
            if self._observe is not None:
                self._observe(self._observed)
            if self.scheduler is not None:
                self.scheduler.step()

    def _require_steppable(self, stage: int) -> None:
        if not self.residency.is_eager:
            return
        gradients = [own for _, own in self.store.stages[stage].own_gradients().values() if own.numel()]
        if not all(torch.linalg.vector_norm(each, ord=float("inf")).isfinite() for each in gradients):
            raise RuntimeError(
                f"the gradients of stage {stage} are not finite, and an eager update cannot skip the batch: other "
                "stages are updated already; use deferred updates"
            )
