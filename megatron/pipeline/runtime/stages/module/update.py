"""Weight updates over torch's optimizers, and the update of a rank whose stages are all frozen.

`ModuleUpdate`. On the chain's thread the gradients of a batch are averaged over replicas, the gradients of tied
parameters are added up, and the exact global norm is computed over all ranks of the job. The step clips by this norm
and writes the next weight version. If a gradient is not finite on any rank, no rank steps: the new version is an alias
of the version before, and the learning rate does not advance.

If losses are sums, the gradients are sums until the step. The count of the batch over all replicas comes with the norm.
The step divides the norm and the gradients by the count and then clips. A batch with count 0 makes no step. A
prediction is made before the norm of its batch, so it divides by the count of the last batch that has stepped.

`FrozenUpdate` never changes the weights. Its rank takes part in the reduction of the norm, with a norm of 0, because
the reports come with it. The rank does not wait for the norm: the step comes first, and the new version equals the
version before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.pipeline.program.weight_policies import Ahead
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.stages.module.reduction import ModuleReduction
from megatron.pipeline.runtime.stages.module.stage import Counts, by_microbatches
from megatron.pipeline.runtime.update.gradients import (
    KEPT_SUMS,
    Batch,
    DeviceUpdate,
    GradientBuffer,
    GradientBuffers,
    NormReduction,
    Partial,
    clip_factor,
    norm_squared,
)
from megatron.pipeline.runtime.update.loss_scales import LossScales
from megatron.pipeline.runtime.update.optimizer_wrappers import GapAware
from megatron.pipeline.runtime.update.provisional_step import (
    LastUpdate,
    PartialStep,
    ProvisionalStep,
    is_scale_invariant,
)
from megatron.pipeline.runtime.update.versions import AheadVersions, Make, Slot, WeightVersions
from megatron.pipeline.runtime.update.weight_prediction import PredictedVersions, WeightPredictor, prediction_factor


@dataclass
class _Batch(Batch):
    unused: list[str] | None = None  # names of the gradients that no replica has written
    norm_squared: Tensor | None = None  # set by a step before the norm is reduced
    mean_count: float | None = None  # the mean count of a microbatch's losses; None: not known yet


class ModuleUpdate(DeviceUpdate):
    """The weight update of one rank, or of one stage where stages step separately.

    The constructor uses each group once and is collective over them. The groups are used on the chain's thread, so they
    may be used for nothing else.

    Args:
        parameters: name -> parameter: the parameters of `versions` and of `optimizer`.
        versions: the weight versions. For `AheadVersions` the constructor sets the function that makes weights ahead.
        optimizer: a torch optimizer, or `GapAware` over one.
        scheduler: a torch learning-rate scheduler over the torch optimizer; None: a constant learning rate.
        clip_grad: the global norm to which gradients are clipped; 0: no clipping.
        num_grad_buffers: the delay of the weight policy in batches + 1: 1 with flushes, 2 under 2bw.
        reduce_partial: predictions read the mean of the gradients over the replicas. `versions` are
            `PredictedVersions`.
        provisional_microbatches: as in the schedule. A number: predictions do not depend on the cut into stages, so
            they clip by the factor of the last step alone and not by the norm of the stage's gradients; 0: they read no
            gradients and take the last update again.
        skips_unused: if no microbatch of a batch has used a parameter, on any replica, its gradient is None in the
            step. Then the optimizer skips the parameter, as in a single process.
        counts: gives the count of losses to provisional steps and to steps before the norm.
        scales: the loss scales, by which the gradients are multiplied; `optimizer` is then `MasterWeights`, and the
            norm comes before the step. None: gradients are not scaled.
        observe: called with the gradients of each batch that is stepped, by name, before they are clipped.
        reduction: the arguments of `ModuleReduction`: groups, losses, the tied parameter, and the device of the
            parameters.

    Attributes:
        scales: as given.
        sums: batch -> the sums over all ranks, for the last `KEPT_SUMS` batches whose norm came before the step.
        mean_count: the mean count of a microbatch's losses in the last batch with a positive count that has stepped.
            Predictions divide by it. Set it before the first batch to the expected value, or to None: then predictions
            equal the newest weights until the first such batch.
        clip_factor: the factor by which the last step clipped; None: steps clip, but there was none yet.

    Raises:
        ValueError: `versions` are `AheadVersions`, and `optimizer` cannot make weights ahead.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        versions: WeightVersions,
        optimizer: torch.optim.Optimizer | GapAware,
        scheduler: Any = None,
        clip_grad: float = 0.0,
        num_grad_buffers: int = 2,
        reduce_partial: bool = False,
        provisional_microbatches: int | None = None,
        skips_unused: bool = False,
        counts: Counts = by_microbatches,
        scales: LossScales | None = None,
        observe: Callable[[Mapping[str, Tensor]], None] | None = None,
        **reduction: Any,
    ) -> None:
        buffers = GradientBuffers(parameters, num_buffers=num_grad_buffers, notes_writes=skips_unused)
        super().__init__(
            versions, buffers, reduces_partial=reduce_partial, reads_gradients=provisional_microbatches != 0
        )
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scales = scales
        self._clip_grad = clip_grad
        self._reduction = ModuleReduction(**reduction)
        self._uniform = provisional_microbatches is not None
        self._skips_unused = skips_unused
        self._counts = counts
        self._observe = observe
        self.sums: dict[int, NormReduction] = {}
        self.mean_count: float | None = 1.0
        self._predicts = isinstance(versions, PredictedVersions)
        self.last_update = LastUpdate()
        types = {(each.dtype, each.dtype) for each in parameters.values()} if self._predicts else ()
        self._provisional = ProvisionalStep(optimizer, types)
        self._names = {parameter: name for name, parameter in parameters.items()}
        self.clip_factor: float | None = None if clip_grad else 1.0
        if isinstance(versions, AheadVersions):
            versions.make_with(self._maker(versions.ahead, parameters))
        self._reduction.warm_up()

    def regroup(self, **changes: Any) -> None:
        """Let reductions span other ranks, for example when the program changes to or from one with copies.

        Call it while drained, on all ranks of the new groups. `changes`: the new values of `data_parallel_group`,
        `copies_group`, `job_group`, `counts_in_norm` and `tied`; the others stay.
        """
        assert not self._batches, "what is in flight is reduced over the ranks of before"
        self._reduction = replace(self._reduction, **changes)
        self._reduction.warm_up()

    def _maker(self, ahead: Ahead, parameters: Mapping[str, torch.nn.Parameter]) -> Make:
        """The function that writes weights ahead of a version (see `AheadVersions.make_with`)."""
        if ahead is Ahead.PREDICTION:
            inner = self.optimizer.optimizer if isinstance(self.optimizer, GapAware) else self.optimizer
            predictor = WeightPredictor(inner, scheduler=self.scheduler)
            return lambda version, horizon, weights, targets: predictor.predict(
                horizon, [(each, weights[name], targets[name]) for name, each in parameters.items()]
            )
        step = PartialStep(self.optimizer, parameters)

        def make(version: int, unstepped: int, weights: Slot, targets: Slot) -> None:
            batch = self._batches[version + 1]  # the batch that is not complete
            counted = self._counts(batch.info.index, unstepped)
            step.take(batch.buffer.views, batch.info.num_microbatches / counted if counted else 0.0, targets)

        return make

    def _new_batch(self, info: BatchInfo) -> _Batch:
        scale = 1.0 if self.scales is None else self.scales.of_batch(info.index)
        return _Batch(info, BatchReport(batch=info.index, num_samples=info.num_samples, loss_scale=scale))

    def begin_forward(self, info: BatchInfo, version: int) -> None:
        """Store the shown weights for gap-aware steps, if other weights are expected at the step of the batch.

        Called only where stages step separately.
        """
        if isinstance(self.optimizer, GapAware) and version < info.index:
            self.optimizer.remember(info.index)

    def reduce_grad(self, version: int, stage: int) -> None:
        batch = self._batches[version]
        if self._skips_unused:
            batch.unused = self._reduction.unused_everywhere(batch.buffer)
        self._reduction.over_data(batch.buffer)

    def reduce_embed(self, version: int) -> None:
        tied = self._reduction.tied
        if tied is not None and tied.group is not None:
            self._reduction.add_copies(self._batches[version].buffer.views)

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        batch = self._batches[version]
        stepped = batch.buffer is None
        tied = self._reduction.tied
        if tied is not None and tied.group is None:  # no REDUCE_EMBED for a single rank
            assert not stepped, "tied copies are added up before the step"
            self._reduction.add_copies(batch.buffer.views)
        local = (batch.norm_squared if stepped else self._norm_squared(batch.buffer)).item()
        sums = self._reduction.sums(local, stop_requests, losses)
        if stepped:
            self._reduction.complete(batch.report, sums)
            del self._batches[version]
        else:
            self._complete(batch, sums)

    def _complete(self, batch: _Batch, sums: NormReduction) -> None:
        """Complete the report of a batch that has not stepped, so that it can step."""
        self.sums[batch.info.index] = sums
        self.sums.pop(batch.info.index - KEPT_SUMS, None)
        count = self._reduction.complete(batch.report, sums)
        batch.mean_count = count / batch.info.num_microbatches
        batch.report.grad_norm /= (batch.mean_count or 1.0) * batch.report.loss_scale

    def sums_of_newest(self) -> NormReduction | None:
        """Return the sums over all ranks for the batch whose step has made the newest version; None: not known."""
        return self.sums.get(self.versions.newest - 1)

    def go_on_from(self, version: int, sums: NormReduction | None) -> list[BatchReport]:
        """Make the steps up to `version`, drop all batches in flight, and continue from `version`. Nothing may run.

        When a rank is lost, some ranks may have made the next version and others not, although all have reduced its
        gradients. The ranks with the sums over all ranks pass the sums to the others. Under 2bw the last stage reduces
        a batch before it steps with the batch before, so it may have two steps to make.

        Args:
            version: the newest version that a rank has made.
            sums: the sums for the batch whose step makes `version`.

        Returns:
            The reports of the batches whose steps were made here.
        """
        assert not self._predicts, "what was predicted is not taken back"
        reports = []
        for made in range(self.versions.newest + 1, version + 1):
            batch = self._batches[made]
            if batch.mean_count is None:
                known = self.sums.get(made - 1) or sums
                assert known is not None, "a rank has stepped with sums that it does not know"
                self._complete(batch, known)
            reports.append(self.step(made))
        for batch in self._batches.values():
            if batch.buffer is not None:
                self._gradients.give_back(batch.buffer)
        self._batches.clear()
        self._gradients.show(None)
        return reports

    def take_stepped(self, version: int) -> tuple[float, float]:
        """Remove a batch that has stepped, and return the squared norm of its gradients and its learning rate.

        Called instead of `reduce_norm` where the norms of several updates are added up.
        """
        batch = self._batches.pop(version)
        return batch.norm_squared.item(), batch.report.learning_rate

    def step(self, version: int, *, with_prediction: bool = False) -> BatchReport:
        batch = self._batches[version]
        report = batch.report
        is_reduced, size = batch.mean_count is not None, batch.info.num_microbatches
        if not is_reduced and self._clip_grad:
            raise ValueError("clipping needs the global norm before the step, which this weight policy takes after it")
        mean_count = batch.mean_count if is_reduced else self._counts(batch.info.index, size) / size
        report.learning_rate = self.optimizer.param_groups[0]["lr"]
        report.skipped = report.overflow or not mean_count
        self.mean_count = mean_count or self.mean_count
        if mean_count not in (0.0, 1.0):
            batch.buffer.divide(mean_count)
        if not is_reduced:  # now, since a gap-aware step changes the gradients
            batch.norm_squared = self._norm_squared(batch.buffer)
        if not report.skipped:
            self._write(version, batch, with_prediction=with_prediction)
        elif not self._predicts:
            self.versions.alias(version, of=version - 1)
        if self.scales is not None:
            self.scales.step(batch.info.index, scale=report.loss_scale, overflow=report.overflow)
        buffer, batch.buffer = batch.buffer, None
        if is_reduced:
            del self._batches[version]
        self._gradients.give_back(buffer)
        return report

    def _write(self, version: int, batch: _Batch, *, with_prediction: bool) -> None:
        if self._observe is not None:
            self._observe(batch.buffer.views)
        if self._clip_grad:
            self.clip_factor = clip_factor(self._clip_grad, batch.report.grad_norm)
            if self.clip_factor < 1.0 and self.scales is None:
                batch.buffer.scale(self.clip_factor)
        if self.scales is not None:  # both in FP32
            self.optimizer.factor = (self.clip_factor or 1.0) / batch.report.loss_scale
        unused = batch.unused
        if self._skips_unused and unused is None:  # one replica
            unused = batch.buffer.untouched()
        running = self._gradients.shown
        self._gradients.show(batch.buffer, without=unused or ())
        with self.versions.true_weights() if self._predicts else self.versions.making(version):
            if self._predicts and not self.reads_gradients:
                self.last_update.begin(self._names)
            if isinstance(self.optimizer, GapAware):
                self.optimizer.step_of(version - 1)
            elif self._predicts:
                self._provisional.step(puts_off=with_prediction and self.reads_gradients)
            else:
                self.optimizer.step()
        self._gradients.show(running if running is not batch.buffer else None)
        if self.scheduler is not None:
            self.scheduler.step()

    def close(self) -> None:
        """Show the newest weights in the parameters, and remove their gradients and hooks.

        Called while drained, or after an error. If a step was put off until a prediction that has not begun, it is
        taken now.
        """
        if self._provisional.due:
            with self.versions.true_weights():
                self._provisional.finish()
        self.versions.show_newest()
        self._gradients.close()

    def _predict(self, version: int, batch: _Batch, partial: Partial, ties: Partial | None) -> None:
        stepped: set[Tensor] = set()
        knows_clipping = self.clip_factor is not None or is_scale_invariant(self.optimizer)
        if knows_clipping and self.mean_count is not None:  # else the size of the step is not known
            stepped.update(parameter for group in self.optimizer.param_groups for parameter in group["params"])
        table: dict[str, tuple[Tensor, float | Tensor, Tensor]] = {}  # name -> gradient, factor, whether to step
        tied = {} if ties is None else {self._reduction.tied_key: ties.gradients}  # with a norm of their own
        of_stage = {name: each for name, each in partial.gradients.views.items() if name not in tied}
        for part, gradients in ((partial, of_stage), (ties, tied)):
            if not gradients or not stepped:
                continue
            squares = norm_squared(gradients.values(), device=self._reduction.device)
            factor = self._factor(part.num_microbatches / batch.info.num_microbatches, squares)
            is_finite = squares.isfinite()
            table.update({name: (each, factor, is_finite) for name, each in gradients.items()})
        names = self._names
        with self.versions.predicting(version) as target, self.versions.true_weights():
            for parameter, name in names.items():
                if parameter not in stepped:
                    target[name].copy_(parameter)
            if stepped:
                self._provisional.take(
                    lambda parameter: table[names[parameter]][:2],
                    lambda parameter: target[names[parameter]],
                    where=lambda parameter: table[names[parameter]][2],
                )

    def _repeat(self, version: int) -> None:
        with self.versions.predicting(version) as target, self.versions.true_weights():
            for parameter, name in self._names.items():
                self.last_update.write(parameter, target[name])
        self.last_update.end()

    def values_before_step(self) -> dict[str, Tensor]:
        """Name -> value before the last step, for a prediction that repeats this step; empty if none repeats it."""
        return {self._names[parameter]: before for parameter, before in self.last_update.before.items()}

    def restore_before_step(self, values: Mapping[str, Tensor]) -> None:
        """Restore `values_before_step`."""
        self.last_update.before = {
            parameter: values[name].to(parameter.device) for parameter, name in self._names.items() if name in values
        }

    def _factor(self, part: float, squares: Tensor) -> float | Tensor:
        """The factor for the gradients of a part of the batch with this squared norm."""
        last = self.clip_factor or 1.0
        if not self._clip_grad or self._uniform:
            return last / part / self.mean_count
        group = None if self.reduces_partial else self._reduction.data_parallel_group
        num_unread = 0 if group is None else torch.distributed.get_world_size(group) - 1
        return prediction_factor(
            part,
            squares,
            last=last,
            largest=self._clip_grad,
            num_unread=num_unread,
            dtype=torch.float64,
            loss_scale=self.mean_count,
        )

    def _norm_squared(self, buffer: GradientBuffer) -> Tensor:
        return buffer.norm_squared(leave_out=self._reduction.uncounted)


class FrozenUpdate:
    """The weight update of a rank whose stages are all frozen. Its reports have a learning rate of 0.

    Args:
        reduction: the arguments of `ModuleReduction`, of which `job_group` is the only group.
    """

    def __init__(self, **reduction: Any) -> None:
        self._reduction = ModuleReduction(**reduction)
        self._reports: dict[int, BatchReport] = {}  # key: the version that the batch's step makes
        self._reduction.warm_up()

    def begin_batch(self, info: BatchInfo) -> None:
        self._reports[info.index + 1] = BatchReport(batch=info.index, num_samples=info.num_samples)

    def step(self, version: int) -> BatchReport:
        """Return the report of the batch, which `reduce_norm` completes."""
        return self._reports[version]

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        self._reduction.reduce_norm(self._reports.pop(version), 0.0, stop_requests, losses)

    def begin_evaluation(self) -> None:
        """Do nothing: the parameters always show the newest weights."""

    def show_newest(self) -> None:
        """Do nothing: the parameters always show the newest weights."""
