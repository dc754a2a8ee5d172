"""Weight updates over megatron.core's DDP and optimizers, cut into the instructions of a pipeline program.

Problem: megatron.core finishes a batch in one go (`finalize_model_grads`, `optimizer.step`): every rank waits for every
other between two batches. Under 2bw the next batch is already running then, with older weights, its own gradients and,
in FP16, its own loss scale.

Solution: the parts are called one by one. The chain (`reduce_*`, on a thread of its own, on groups of its own) works on
the gradient slot of the batch that has ended; `step` scales by the one coefficient that unscales and clips, steps
megatron.core's optimizer into a weight slot that no graph in flight refers to, and advances the learning rate.
PipeDream-2BW (Narayanan et al. 2021), sections 3.1 and 3.2: W(t+1) = W(t) - update(g(W(t-1))).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron import backend
from megatron.backend.streams import Milestone, streams_of
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.pipeline.program.weight_policies import FLUSH, WeightPolicy, weight_policy
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.stages.megatron.decisions import Decisions
from megatron.pipeline.runtime.stages.megatron.groups import DEFAULT_TIMEOUT, ChainGroups
from megatron.pipeline.runtime.stages.megatron.optimizers import (
    CoreGradientBuffers,
    LayersOfParameters,
    copy_gradients,
    gradients_of,
    single_optimizer,
    steps_parameters_in_place,
    weight_versions,
)
from megatron.pipeline.runtime.stages.megatron.prediction import MegatronPrediction, PartialEmbedding, PartialGradients
from megatron.pipeline.runtime.stages.megatron.reduction import GradientReduction, warm_up
from megatron.pipeline.runtime.update.versions import WeightVersions


@dataclass
class _BatchInFlight:
    """A batch between its first forward and its completed report."""

    info: BatchInfo
    report: BatchReport
    gradients_ready: Milestone
    norm_reduced: Milestone
    slot: int | None = None
    partial: PartialGradients | None = None  # what a prediction reads, where that is not the slot
    partial_embedding: PartialEmbedding | None = None
    norm_squared: Tensor | None = None  # of this rank's scaled gradients; None until they have been made ready
    layers_squared: Tensor | None = None  # of each layer, where they are asked for
    applied: bool = False
    stepped: bool = False


class MegatronWeightUpdate:
    """`WeightUpdate` of one rank's DDP-wrapped chunks and their megatron.core optimizer.

    With the distributed optimizer `step` ends with the all-gather of the new weights over the replicas, on the thread
    that computes: it is part of STEP and not hidden, for the forward that needs these weights is the next instruction.

    Args:
        chunks: the rank's model chunks, each wrapped in megatron.core's DDP without overlapped reductions.
        optimizer: what `get_megatron_optimizer` returned for them.
        scheduler: megatron.core's learning-rate schedule, counted in samples; None keeps the learning rate.
        weights: the policy of the schedule; it decides how many versions live and which scale a batch uses.
        num_stages, stage: length of the pipeline and this rank's place, which bound the versions under ``stash``.
        loss_names: the losses that the last stage reports, the same on all ranks.
        single_gradient_buffer: do without the second gradient buffer of 2bw: a batch's gradients are applied when the
            next batch's first backward needs the buffer, clipped with the norm of the batch before (the very first
            batch waits for its own norm). So that first backward waits until the gradients of the batch before are
            reduced: the time of these reductions is not hidden, and the program does not show this wait.
        reduce_partial: that of the schedule, whose weights are predicted.
        uniform: predictions do not depend on the cut into stages: each clips as the step before did, and not by its
            stage's own gradients.
        timeout: that of the chain's collectives; default: ten minutes.
        rank_metrics: name -> a measurement of this rank, read once a batch on the chain's thread; the values of all
            ranks come with the batch's report. The same names on all ranks.
        layers: reports have the gradient norms of these layers; None: of no layer.
        allocating: a context around the allocations, before the first collective, in which a rank that fails can tell
            the others.

    Raises:
        ValueError: a configuration that this update cannot drive exactly.
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
        uniform: bool = False,
        timeout: timedelta | None = None,
        rank_metrics: Mapping[str, Callable[[], float]] | None = None,
        layers: LayersOfParameters | None = None,
        allocating: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.chunks = chunks
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.weights = weight_policy(weights)
        self.loss_names = loss_names
        rule = self.weights
        self._inner = single_optimizer(optimizer)
        self._scaler = getattr(self._inner, "grad_scaler", None)
        self._clip_grad = self._inner.config.clip_grad
        self._single_gradient_buffer = single_gradient_buffer and rule.overlaps_updates
        self._check(chunks)
        self._prediction: MegatronPrediction | None = None
        with allocating():
            if rule.predicts:
                self._prediction = MegatronPrediction(
                    chunks, self._inner, lambda: self._reduction, reduce_partial=reduce_partial, uniform=uniform
                )
                self.versions = self._prediction.versions
            else:
                self.versions = weight_versions(chunks, self._inner, window=rule.max_live_versions(stage, num_stages))
            self._gradients = CoreGradientBuffers(chunks)
        self._copy_newest = steps_parameters_in_place(self._inner)
        self._streams = streams_of(backend.device())
        self._timeout = timeout or DEFAULT_TIMEOUT
        self._groups = ChainGroups.create(timeout=self._timeout)
        self._reduction = GradientReduction(chunks, self._inner, self._gradients.buffers, self._groups)
        self._decisions = Decisions(
            optimizer, scheduler, delay=rule.delay or 0, world=self._groups.world, loss_names=loss_names,
            rank_metrics=rank_metrics
        )  # fmt: skip
        self._scales = self._decisions.scales
        self._layers = layers
        self._batches: dict[int, _BatchInFlight] = {}
        self._last_norm: float | None = None  # exact norm of the newest batch whose chain has ended
        shards = isinstance(self._inner, DistributedOptimizer)
        warm_up(
            chunks, self._reduction, self._gradients[0], self._groups.world, distributed_optimizer=shards,
            reduces_partial=self._prediction is not None and self._prediction.reduces,
        )  # fmt: skip

    def _check(self, chunks: list[DistributedDataParallel]) -> None:
        for chunk in chunks:
            if chunk.ddp_config.overlap_grad_reduce or chunk.ddp_config.overlap_param_gather:
                raise ValueError(
                    "DistributedDataParallelConfig sets overlap_grad_reduce or overlap_param_gather: the pipeline "
                    "program reduces gradients itself, so leave both off."
                )
            if chunk.config.calculate_per_token_loss or chunk.ddp_config.average_in_collective:
                raise ValueError(
                    "calculate_per_token_loss and average_in_collective are not supported: gradients are averaged over "
                    "microbatches and replicas, so turn both off."
                )
            if chunk.expert_parallel_buffers:
                raise ValueError("Expert parallelism is not supported: set its size to 1.")
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
            assert self._clip_grad == 0.0 and self._scaler is None, (
                "stages that update alone: clipping and loss scaling are refused"
            )

    # Called on the main thread while a batch runs.

    def begin_batch(self, info: BatchInfo) -> None:
        """Choose the loss scale of a batch that begins."""
        report = self._decisions.begin(info)
        self._batches[info.index] = _BatchInFlight(info, report, Milestone(self._streams), Milestone(self._streams))

    def loss_scale(self, batch: int) -> float:
        """The factor on the losses of a running batch."""
        return self._batches[batch].report.loss_scale

    def begin_backward(self, info: BatchInfo) -> None:
        """Give the batch a zeroed gradient buffer and let backwards add to it."""
        if self._single_gradient_buffer and info.index - 1 in self._batches:
            self._apply_early(self._batches[info.index - 1])
        batch = self._batches[info.index]
        batch.slot = self._gradients.take()
        self._gradients.show(batch.slot)
        self._gradients.start_accumulation()

    def resume_backward(self, info: BatchInfo) -> None:
        """Let backwards add to the batch's gradient buffer again."""
        assert not self._single_gradient_buffer, "the program comes back to a batch whose gradients are applied"
        self._gradients.show(self._batches[info.index].slot)

    # Called on the chain thread.

    def reduce_grad(self, version: int, stage: int) -> None:
        """Average the gradients that make `version` over the data-parallel replicas."""
        self._reduction.over_data(self._gradients[self._batches[version - 1].slot])

    def reduce_embed(self, version: int) -> None:
        """Add up the tied word embeddings' gradients of the first and the last stage."""
        self._reduction.over_embedding(self._gradients[self._batches[version - 1].slot])

    @torch.no_grad()
    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        """Complete the batch's report by one float64 all-reduce over the job: norm, overflow, losses, stop requests."""
        batch = self._batches[version - 1]
        self._prepare(batch)
        self._decisions.complete(
            batch.report, batch.norm_squared.item(), stop_requests, losses,
            layers_squared=() if batch.layers_squared is None else batch.layers_squared.tolist(),
        )  # fmt: skip
        batch.norm_reduced.reach()
        if batch.stepped:
            del self._batches[version - 1]

    def _prepare(self, batch: _BatchInFlight) -> None:
        """Run the gradients' last reductions and their norm, on the thread that needs them first."""
        if batch.norm_squared is None:
            slot = self._gradients[batch.slot]
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

    def step(self, version: int) -> BatchReport:
        """Make weight `version` and free its gradient buffer; skipped where a loss scale overflowed."""
        batch = self._batches[version - 1]
        if not batch.applied:
            self._apply(batch, self._coefficient(batch))
        batch.stepped = True
        self._last_norm = batch.report.grad_norm
        if batch.norm_reduced.is_reached:
            del self._batches[version - 1]
        return batch.report

    def _coefficient(self, batch: _BatchInFlight) -> float:
        """The factor that unscales and clips the batch's gradients."""
        return self._decisions.coefficient(batch.report, norm=self._last_norm if self._single_gradient_buffer else None)

    def _apply_early(self, batch: _BatchInFlight) -> None:
        """Free the only gradient buffer: apply its gradients before their own norm is known."""
        if batch.applied:
            return
        wait = batch.gradients_ready if self._last_norm is not None or self._clip_grad == 0.0 else batch.norm_reduced
        if not wait.wait(self._timeout.total_seconds()):
            raise TimeoutError(
                f"The gradients of batch {batch.info.index} were not reduced within {self._timeout}: another rank has "
                "not joined the reduction."
            )
        self._apply(batch, self._coefficient(batch))

    @torch.no_grad()
    def _apply(self, batch: _BatchInFlight, coefficient: float) -> None:
        self._prepare(batch)
        version = batch.info.index + 1
        report = batch.report
        self._decisions.note(report)
        if report.overflow and self._prediction is None:
            self.versions.alias(version, of=version - 1)
        elif not report.overflow:
            running = self._gradients.shown
            self._gradients.show(batch.slot)
            copy_gradients(self._inner)
            if coefficient != 1.0:
                torch._foreach_mul_(gradients_of(self._inner), coefficient)
            if self._prediction is None:
                with self.versions.making(version, copy=self._copy_newest):
                    self._inner.step_with_ready_grads()
            else:
                self._prediction.step()
                self._prediction.clip_factor = coefficient * report.loss_scale
            self._inner.zero_grad(set_to_none=True)
            self._gradients.show(running)
        self._decisions.advance(report)
        self._gradients.release(batch.slot)
        batch.applied = True

    # Predictions.

    def hold(self, version: int, num_microbatches: int) -> None:
        """Keep a copy of the gradients of batch ``version - 1`` after this many of its backwards."""
        batch = self._batches[version - 1]
        batch.partial = PartialGradients(self._gradients.copy_of(batch.slot), num_microbatches)

    def hold_embed(self, version: int, num_microbatches: int) -> None:
        """Keep a copy of the gradients of the tied embeddings of the first and the last stage alone; see `hold`."""
        batch = self._batches[version - 1]
        batch.partial_embedding = self._prediction.hold_embedding(self._gradients[batch.slot], num_microbatches)

    def reduce_partial(self, version: int) -> None:
        """Average the kept gradients over the data-parallel replicas."""
        self._prediction.reduce(self._batches[version - 1].partial)

    def reduce_partial_embed(self, version: int) -> None:
        """Add up the kept gradients of the tied embeddings."""
        self._prediction.reduce_embedding(self._batches[version - 1].partial_embedding)

    def predict(self, version: int, num_microbatches: int) -> None:
        """Make the predicted weights of `version` from the kept gradients, else from `num_microbatches`' gradients."""
        batch = self._batches[version - 1]
        self._prediction.predict(
            version,
            batch.partial or PartialGradients(self._gradients[batch.slot], num_microbatches),
            batch.partial_embedding,
            num_microbatches=batch.info.num_microbatches,
            loss_scale=batch.report.loss_scale,
            can_overflow=self._scaler is not None,
        )
        batch.partial = batch.partial_embedding = None

    @property
    def replicas_predict_apart(self) -> bool:
        """Whether each replica predicts from its own gradients."""
        shards = isinstance(self._inner, DistributedOptimizer)
        return self._prediction is not None and not shards and not self._prediction.reduces

    def begin_evaluation(self) -> None:
        self.show_newest()

    def show_newest(self) -> None:
        """Drained: show the newest weights in the parameters, for an evaluation or a checkpoint. Collective over the
        replicas where they are predicted.
        """
        self.versions.show_newest()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step, of the groups that follow the schedule."""
        return self._decisions.learning_rate

    def versions_of(self, stage: int) -> WeightVersions:
        """The weight versions that a stage of the rank uses."""
        return self.versions

    def close(self) -> None:
        """End the groups of the chain, drained. Collective: every rank of the job calls it, after the engine's."""
        dist.barrier()  # a group that one member has left may fail another that is still at its last reduction
        self._groups.close()

    # Called between batches, drained. Weight versions are saved and restored through `versions`.

    def state_dict(self) -> dict:
        """The state beside megatron.core's optimizer, scheduler and the weights; plain numbers, equal on all ranks."""
        state = {"loss_scales": self._scales.state_dict(), "last_grad_norm": self._last_norm}
        return state if self._prediction is None else {**state, "clip_factor": self._prediction.clip_factor}

    def load_state_dict(self, state: dict | None) -> None:
        """Restore `state_dict`, after the optimizer's state; None: the checkpoint has none."""
        self._scales.load_state_dict(state and state["loss_scales"])
        self._last_norm = state["last_grad_norm"] if state else None
        if self._prediction is not None and self._clip_grad > 0.0 and state and "clip_factor" in state:
            self._prediction.clip_factor = state["clip_factor"]
