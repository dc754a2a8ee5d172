"""Weight updates over megatron.core's DDP and optimizers, split into the instructions of a pipeline program.

Problem: megatron.core reduces the gradients of a batch and steps in one sequence (`finalize_model_grads`,
`optimizer.step`), in which every rank waits for the others. Under 2bw the next batch is already running then, with
older weights, its own gradients and, in FP16, its own loss scale.

Solution: call the parts one by one. The chain runs `reduce_grad`, `reduce_embed` and `reduce_norm` on the gradient slot
of the batch that has ended, on its own thread and groups. Then `step` multiplies the gradients by one coefficient that
unscales and clips, steps megatron.core's optimizer into a weight slot to which no graph in flight refers, and advances
the learning rate. PipeDream-2BW (Narayanan et al. 2021), sections 3.1 and 3.2: W(t+1) = W(t) - update(g(W(t-1))).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from megatron import backend
from megatron.backend.streams import Milestone, streams_of
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.pipeline.program.weight_policies import FLUSH, WeightPolicy
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.copied_stages import CopyRanks
from megatron.pipeline.runtime.stages.megatron.auxiliary import RouterTokens
from megatron.pipeline.runtime.stages.megatron.base_update import BaseUpdate, LayersOfParameters
from megatron.pipeline.runtime.stages.megatron.groups import is_formed
from megatron.pipeline.runtime.stages.megatron.optimizers import (
    CoreGradientBuffers,
    copy_gradients,
    gradients_of,
    is_distributed,
    multiply_elsewhere,
    optimizers_of,
    owners,
    steps_parameters_in_place,
    weight_versions,
)
from megatron.pipeline.runtime.stages.megatron.prediction import MegatronPrediction
from megatron.pipeline.runtime.stages.megatron.reduction import GradientReduction, probes, warm_up
from megatron.pipeline.runtime.stages.megatron.redundant_shards import (
    RedundantShards,
    gather_weights,
    is_steppable,
    step_own_shards,
)
from megatron.pipeline.runtime.stages.megatron.shard_copies import Flats
from megatron.pipeline.runtime.update.gradients import Batch, DeviceUpdate, NormReduction, Partial
from megatron.pipeline.runtime.update.muon import Muon
from megatron.pipeline.runtime.update.versions import WeightVersions


@dataclass(kw_only=True)
class _Batch(Batch):
    gradients_ready: Milestone
    norm_reduced: Milestone
    norm_squared: Tensor | None = None  # of this rank's scaled gradients; None until `_prepare` has run
    layers_squared: Tensor | None = None  # of each layer, if `layers` is given
    applied: bool = False  # the optimizer has stepped with the gradients, or the step was skipped
    stepped: bool = False  # `step` has been called
    with_prediction: bool = False  # a prediction directly follows the step
    on_trial: bool = False  # an optimistic step has to leave the gradients as they are, in their buffer
    coefficient: float = 1.0  # by which such a step has multiplied the gradients
    of_copies: list[Flats | None] | None = None  # the reduced gradients of the shards of which this rank has copies


class MegatronWeightUpdate(BaseUpdate, DeviceUpdate):
    """`PredictingUpdate` of one rank's DDP-wrapped chunks and their megatron.core optimizer.

    With the distributed optimizer `step` ends with the all-gather of the new weights over the replicas, on the main
    thread; where replicas own whole parameters (`owners`), it ends with their exchange. It is not overlapped with
    computation, since the next instruction is the forward that needs these weights.

    Args:
        chunks: the model chunks of the rank, each wrapped in megatron.core's DDP without overlapped reductions.
        optimizer: the result of `get_megatron_optimizer` for the chunks.
        scheduler: megatron.core's learning-rate schedule, counted in samples; None: a constant learning rate.
        weights: the weight policy of the schedule.
        num_stages, stage: the number of stages and the stage of this rank; they bound the versions under ``stash``.
        loss_names: the losses that the last stage reports, the same on all ranks.
        single_gradient_buffer: use one gradient buffer instead of two under 2bw. The gradients of a batch are applied
            when the first backward of the next batch needs the buffer, clipped by the norm of the batch before (the
            first batch of a run waits for its own norm, and with per-token loss every batch for its number of tokens).
            This backward first waits until these gradients are reduced, so that the reductions are not overlapped with
            computation. The program does not show this wait.
        reduce_partial: predictions read the mean of the gradients over the replicas.
        provisional_microbatches: as in the schedule. A number: predictions do not depend on the cut into stages, so
            they clip by the factor of the last step alone and not by the norm of the stage's gradients; 0: they read no
            gradients and take the last update again.
        timeout: the timeout of the chain's collectives; default: ten minutes.
        copies: in a program with copies of stages, the ranks over which reductions go; None: those of megatron.core's
            groups. Gradients are then summed, since copies share the microbatches of a batch.
        rank_metrics: name -> function that returns a measurement of this rank, called once per batch on the chain's
            thread. The report of the batch has the values of all ranks. The names are the same on all ranks.
        counts_tokens: count the tokens of experts, if the model has any.
        layers: the layers whose gradient norms come with the reports; None: no layers.
        allocating: a context around the allocations, before the first collective, in which a rank that fails can tell
            the others.

    Raises:
        ValueError: a configuration under which this update would not be exact.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler | None = None,
        *,
        weights: WeightPolicy = FLUSH,
        num_stages: int = 1,
        stage: int = 0,
        loss_names: tuple[str, ...] = ("lm loss",),
        single_gradient_buffer: bool = False,
        reduce_partial: bool = False,
        provisional_microbatches: int | None = None,
        timeout: timedelta | None = None,
        rank_metrics: Mapping[str, Callable[[], float]] | None = None,
        counts_tokens: bool = True,
        layers: LayersOfParameters | None = None,
        copies: CopyRanks | None = None,
        allocating: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        BaseUpdate.__init__(self, optimizer, scheduler, chunks, weights=weights, loss_names=loss_names)
        self.chunks = chunks
        rule = self.weights
        self._single_gradient_buffer = single_gradient_buffer and rule.overlaps_updates
        self._tokens_per_sample: float | None = None  # in the last batch that has stepped
        self._check(chunks)
        self._owners = owners(self._inner)
        self._prediction: MegatronPrediction | None = None
        with allocating():
            if rule.predicts:
                self._prediction = MegatronPrediction(
                    chunks,
                    self._inner,
                    lambda: self._reduction,
                    reduce_partial=reduce_partial,
                    provisional_microbatches=provisional_microbatches,
                )
                versions = self._prediction.versions
            else:
                window = rule.max_live_versions(stage, num_stages)
                versions = weight_versions(chunks, self._inner, window=window, slots=self._owners)
            DeviceUpdate.__init__(
                self,
                versions,
                CoreGradientBuffers(chunks),
                reduces_partial=rule.predicts and reduce_partial,
                reads_gradients=provisional_microbatches != 0,
            )
        if counts_tokens and chunks[0].config.num_moe_experts:
            window = rule.max_live_versions(stage, num_stages)
            self.router_tokens = RouterTokens(chunks, window=window, lag=int(rule.predicts))
            assert not (rule.updates_alone and self.router_tokens.has_biases), "biases wait for the counts of all ranks"
        self._copy_newest = steps_parameters_in_place(self._inner)
        self.shards: RedundantShards | None = None
        self._gathers = True
        self._streams = streams_of(backend.device())
        self._connect(timeout, rank_metrics, copies)
        self._layers = layers
        self._begin_reductions()
        for optimizer in (getattr(each, "optimizer", None) for each in optimizers_of(self._inner)):
            if isinstance(optimizer, Muon) and is_formed(parallel_state.get_tensor_model_parallel_group()):
                optimizer.orthogonalization.warm_up(probes(), backend.device())

    def _begin_reductions(self) -> None:
        self._reduction = GradientReduction(self.chunks, self._inner, self._gradients.buffers, self._groups)
        warm_up(
            self.chunks, self._reduction, self._gradients[0], self._groups,
            distributed_optimizer=is_distributed(self._inner), owners=self._owners,
            reduces_partial=self.reduces_partial,
        )  # fmt: skip

    def regroup(self, copies: CopyRanks | None) -> None:
        """Let the program change to or from one with copies (see the class). Call it while drained.

        Weights, gradient buffers, optimizer and loss scales stay. Collective over the ranks of the job that are left.
        Raises ValueError as the constructor does.
        """
        assert not self._batches, "what is in flight is reduced over the ranks of before"
        self._regroup(copies)
        if copies is None and not self._per_token:  # a process that was built alone has a factor of 1
            for buffer in self._gradients.buffers:
                buffer.gradient_scaling_factor = 1.0 / self._groups.num_replicas
        self._begin_reductions()

    def keep_shards(
        self, before: RedundantShards | None = None, sources: Sequence[Sequence[int]] = (), *, copies: bool = True
    ) -> None:
        """Prepare to hand over this rank's shards of the optimizer, and with `copies` other ranks' shards, too.

        This is for `--redundant-optimizer`. Call it while drained. Collective over the ranks with the same stages.

        Args:
            before: this rank's shards from the update whose state is taken over; None: it has none of these shards.
            sources: for dense weights and experts, for each shard of `before` the rank that hands it over; empty:
                nothing is taken over.
        """
        if not copies and not is_steppable(self._inner):
            return
        self.shards = RedundantShards(
            self.chunks, self._inner, self.versions, self._groups, copies=copies,
            last_update=self._prediction and self._prediction.last_update,
        )  # fmt: skip
        if sources:
            self.shards.take_over(before, sources)
        self.shards.make_copies()

    def _check(self, chunks: list[DistributedDataParallel]) -> None:
        for chunk in chunks:
            if chunk.ddp_config.overlap_grad_reduce or chunk.ddp_config.overlap_param_gather:
                raise ValueError(
                    "DistributedDataParallelConfig sets overlap_grad_reduce or overlap_param_gather: the pipeline "
                    "program reduces gradients itself, so leave both off."
                )
            if chunk.ddp_config.average_in_collective:
                raise ValueError(
                    "average_in_collective is not supported: the chain sums gradients over replicas, so turn it off."
                )
        if self._single_gradient_buffer and self.weights.predicts:
            raise ValueError(
                "A single gradient buffer cannot be combined with predicted weights, which read the gradients that it "
                "gives away early: keep both buffers, or do not predict."
            )
        if self._single_gradient_buffer and self.weights.delay > 1:
            raise ValueError(
                f"A single gradient buffer goes with a delay of one batch, and {self.weights} has one of "
                f"{self.weights.delay}: a drain would change by which norm gradients are clipped, so keep the buffers."
            )
        if self._single_gradient_buffer and self._scaler is not None:
            raise ValueError(
                "A single gradient buffer cannot be combined with loss scaling, since gradients are applied before the "
                "other stages have reported an overflow: use bf16 or keep the second buffer."
            )
        if self.weights.updates_alone:
            assert self._clip_grad == 0.0 and self._scaler is None and not self._per_token, (
                "stages that update alone: clipping, loss scaling and per-token loss are refused"
            )

    # Called on the main thread while a batch runs.

    def _new_batch(self, info: BatchInfo) -> _Batch:
        streams = self._streams
        return _Batch(info, self._new_report(info), gradients_ready=Milestone(streams), norm_reduced=Milestone(streams))

    def begin_backward(self, info: BatchInfo) -> None:
        """Give the batch a zeroed gradient buffer, and make backwards add to it."""
        if self._single_gradient_buffer and info.index in self._batches:
            self._apply_early(self._batches[info.index])
        super().begin_backward(info)

    def resume_backward(self, info: BatchInfo) -> None:
        """Make backwards add to the batch's gradient buffer again."""
        assert not self._single_gradient_buffer, "the program comes back to a batch whose gradients are applied"
        super().resume_backward(info)

    # Called on the chain thread.

    def reduce_grad(self, version: int, stage: int) -> None:
        """Average the gradients of batch ``version - 1`` over the replicas, or with per-token loss sum them."""
        self._reduction.over_data(self._batches[version].buffer)

    def reduce_embed(self, version: int) -> None:
        """Add up the gradients of the word embedding that two stages share."""
        self._reduction.over_embedding(self._batches[version].buffer)

    @torch.no_grad()
    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        """Complete the batch's report by one all-reduce of norm, overflow, losses and stop requests over the job."""
        batch = self._batches[version]
        self._prepare(batch)
        if self.shards is not None:
            batch.of_copies = self.shards.exchange(batch.buffer)
        tokens = self.router_tokens
        self._complete(
            batch.report, batch.norm_squared.item(), stop_requests, losses,
            layers_squared=() if batch.layers_squared is None else batch.layers_squared.tolist(),
            tokens=() if tokens is None else tokens.take(batch.info.index),
        )  # fmt: skip
        batch.norm_reduced.reach()
        if batch.stepped:
            del self._batches[version]

    def _fill(self, report: BatchReport, sums: NormReduction, *, num_layers: int = 0) -> None:
        super()._fill(report, sums, num_layers=num_layers)
        if self.router_tokens is not None:
            report.tokens_per_expert = self.router_tokens.by_layer(report.tokens_per_expert)

    def _prepare(self, batch: _Batch) -> None:
        """Run the last reductions of the batch's gradients and compute their norm, if that has not been done.

        The chain's thread calls it in `reduce_norm`; under ``stash`` the main thread calls it before, in `step`.
        """
        if batch.norm_squared is None:
            slot = batch.buffer
            self._reduction.over_embedding_copies(slot)
            self._reduction.over_tensor(slot)
            if self._layers is None:
                batch.norm_squared = self._reduction.local_norm_squared(slot)
            else:
                norms = self._reduction.local_norms(slot)
                batch.norm_squared = self._reduction.norm_squared(norms)
                batch.layers_squared = self._layers.squared_norms(norms)
            batch.gradients_ready.reach()

    # Called on the main thread, after the chain.

    def step(self, version: int, *, with_prediction: bool = False) -> BatchReport:
        """Make weight `version` from the gradients of batch ``version - 1``, and free their buffer.

        After an overflow of scaled gradients the weights do not change. `with_prediction`: as for `PredictingUpdate`;
        the buffer is read until the prediction, before which no batch takes it.
        """
        batch = self._batches[version]
        batch.with_prediction = with_prediction
        if not batch.applied:
            self._apply(batch, self._coefficient(batch))
        batch.stepped = True
        if self.router_tokens is not None:
            self.router_tokens.step(version, batch.report.tokens_per_expert)
        self._last_norm = batch.report.grad_norm
        if self._per_token:
            self._tokens_per_sample = batch.report.num_tokens / batch.info.num_samples
        if batch.norm_reduced.is_reached:
            del self._batches[version]
        return batch.report

    def _coefficient(self, batch: _Batch) -> float:
        """The factor that unscales and clips the batch's gradients."""
        return self._factor(batch.report, norm=self._last_norm if self._single_gradient_buffer else None)

    def _apply_early(self, batch: _Batch) -> None:
        """Apply the gradients in the only gradient buffer before their own norm is known, to free the buffer."""
        if batch.applied:
            return
        knows_factor = not self._per_token and (self._last_norm is not None or self._clip_grad == 0.0)
        wait = batch.gradients_ready if knows_factor else batch.norm_reduced
        if not wait.wait(self._timeout.total_seconds()):
            raise TimeoutError(
                f"The gradients of batch {batch.info.index} were not reduced within {self._timeout}: another rank has "
                "not joined the reduction."
            )
        self._apply(batch, self._coefficient(batch))

    @torch.no_grad()
    def _apply(self, batch: _Batch, coefficient: float) -> None:
        self._prepare(batch)
        version = batch.info.index + 1
        report = batch.report
        self._note(report)
        broken: RuntimeError | None = None
        if self.shards is not None:
            self.shards.step(None if report.overflow else batch.of_copies, coefficient)
        if report.overflow and self._prediction is None:
            self.versions.alias(version, of=version - 1)
        elif not report.overflow:
            running = self._gradients.shown
            self._gradients.show(batch.buffer)
            copy_gradients(self._inner)
            if self._prediction is None:
                gradients = gradients_of(self._inner)
                if coefficient != 1.0 and batch.on_trial:
                    multiply_elsewhere(self._inner, coefficient)
                elif coefficient != 1.0 and gradients:
                    torch._foreach_mul_(gradients, coefficient)
                with self.versions.making(version, copy=self._copy_newest):
                    if self.shards is not None:
                        broken = self._step_shards()
                    else:
                        self._inner.step_with_ready_grads()
                    if self._owners is not None:
                        self._owners.exchange()
            else:
                self._prediction.step(coefficient, with_prediction=batch.with_prediction)
                self._prediction.clip_factor = coefficient * report.gradient_scale
            self._inner.zero_grad(set_to_none=True)
            self._gradients.show(running)
        self._advance(report)
        if not batch.on_trial:
            self._gradients.give_back(batch.buffer)
        batch.applied = True
        if broken is not None:
            raise broken

    def _step_shards(self) -> RuntimeError | None:
        """Step this rank's shards, and gather the weights.

        If a rank is lost during the gather, the steps are complete nevertheless. Returns the error of the gather, or
        None.
        """
        step_own_shards(self._inner)
        try:
            if self._gathers:
                gather_weights(self.chunks)
        except RuntimeError as error:
            return error
        return None

    def _predict(self, version: int, batch: _Batch, partial: Partial, partial_embed: Partial | None) -> None:
        self._prediction.predict(
            version, partial, partial_embed, num_microbatches=batch.info.num_microbatches,
            gradient_scale=self._estimated_scale(batch), can_overflow=self._scaler is not None,
        )  # fmt: skip

    def _estimated_scale(self, batch: _Batch) -> float | None:
        """`gradient_scale` of the gradients that a prediction reads, as if they were of all microbatches of `batch`.

        Its tokens are not counted yet: its samples count as those of the last batch that has stepped; None: none has.
        """
        if not self._per_token:
            return batch.report.loss_scale
        if self._tokens_per_sample is None:
            return None
        tokens = self._tokens_per_sample * batch.info.num_samples
        if not self.reduces_partial and self._groups.data is not None:
            tokens /= self._groups.data.size
        return batch.report.loss_scale * tokens

    def _repeat(self, version: int) -> None:
        self._prediction.repeat(version)

    @property
    def replicas_predict_apart(self) -> bool:
        """Whether each replica predicts from its own gradients, so that predicted weights differ between replicas."""
        shares = is_distributed(self._inner) or self._owners is not None
        return self._prediction is not None and self.reads_gradients and not shares and not self._prediction.reduces

    def versions_of(self, stage: int) -> WeightVersions:
        """The weight versions of a stage of the rank: the same for all its stages."""
        return self.versions

    @property
    def is_drained(self) -> bool:
        """Whether no batch is in flight, so that the newest weights are complete."""
        return not self._batches

    @property
    def newest_version(self) -> int:
        """The newest version that a step has made. The one after it may be predicted already."""
        newest = self._batches.get(self.versions.newest)
        return self.versions.newest - bool(self._prediction and newest and not newest.applied)

    def sums_of_newest(self) -> NormReduction | None:
        """Return the sums over all ranks for the batch whose step has made the newest version; None: not known."""
        return self.sums.get(self.newest_version - 1)

    def go_on_from(self, version: int, sums: NormReduction | None) -> list[BatchReport]:
        """Make the steps up to `version`, drop all batches in flight, and continue from `version`. Nothing may run.

        When a rank is lost, some ranks may have made the next version and others not, although all have reduced its
        gradients. The ranks with the sums over all ranks pass the sums to the others. Under 2bw the last stage reduces
        a batch before it steps with the batch before, so it may have two steps to make.

        Args:
            version: the newest version that a rank has made.
            sums: the sums for the batch whose step makes `version`.

        Returns:
            The reports of the batches whose steps were made or completed here.
        """
        self._gathers = False  # the groups are broken; the ranks that take over the shards gather the weights
        if self._prediction is not None:
            self._prediction.finish()
        newest = self._batches.get(self.newest_version)
        reports = [] if newest is None or newest.stepped or not newest.applied else [self.step(self.newest_version)]
        for made in range(self.newest_version + 1, version + 1):
            batch, known = self._batches[made], sums if made == version else self.sums[made - 1]
            assert batch.norm_squared is not None and known is not None
            self._fill(batch.report, known)
            batch.norm_reduced.reach()
            reports.append(self.step(made))
        for batch in self._batches.values():
            if batch.buffer is not None and not batch.applied:
                self._gradients.give_back(batch.buffer)
        self._batches.clear()
        if self._prediction is not None:
            self._prediction.versions.go_back_to(version)
        if self.router_tokens is not None:
            self.router_tokens.abandon()
        return reports

    def state_dict(self) -> dict:
        """The state of `BaseUpdate`, and under predicted weights the clip factor and the tokens of the last step."""
        state = super().state_dict()
        if self._prediction is None:
            return state
        tokens = {"tokens_per_sample": self._tokens_per_sample} if self._per_token else {}
        return {**state, "clip_factor": self._prediction.clip_factor, **tokens}

    def load_state_dict(self, state: dict | None) -> None:
        super().load_state_dict(state)
        if self._prediction is not None and self._clip_grad > 0.0 and state and "clip_factor" in state:
            self._prediction.clip_factor = state["clip_factor"]
        self._tokens_per_sample = (state or {}).get("tokens_per_sample")
