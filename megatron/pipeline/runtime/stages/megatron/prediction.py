"""Predicted weights of megatron.core's chunks: a provisional step with the gradients of a part of a batch.

The coming step is taken provisionally (`provisional_step`) with the gradients in the batch's buffer or in a copy of it,
times c m / (n s). Here n of the m microbatches of the batch are done, s is its gradient scale, and c clips
(`prediction_factor`). The result is written into the slot of the weights that the next batch uses. The step of a
parameter starts from its FP32 master, if it has one. With the distributed optimizer each replica computes its shards,
and then the replicas gather them. Where replicas own whole parameters, each computes its own, and then the replicas
exchange them.

By default a replica reads only its own gradients, so if each replica computes all weights, replicas compute at
different weights. With `reduce_partial` all replicas read the mean. Tensor ranks must agree. So they sum the gradients
of which each has a part, they clip by one norm, and if the gradients of one tensor rank overflow, all skip the
prediction. The clipping and the overflow of a tied embedding depend on its own gradient alone. Both stages have this
gradient, so the copies stay equal.

Experts that replicas share out have gradients from the microbatches of all these replicas. So a prediction that does
not read the mean divides these gradients by the number of these replicas. The norm of the stage includes the experts on
all of these replicas.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron import backend
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.pipeline.runtime.stages.megatron.groups import shares_out_experts
from megatron.pipeline.runtime.stages.megatron.optimizers import (
    DistributedSlots,
    MegatronCoreOptimizer,
    Slots,
    is_dense,
    is_distributed,
    named_parameters,
    optimizers_of,
    owners,
    separate_masters,
)
from megatron.pipeline.runtime.stages.megatron.reduction import GradientReduction, tensor_parallel_parameters
from megatron.pipeline.runtime.update.gradients import Partial, norm_squared
from megatron.pipeline.runtime.update.provisional_step import LastUpdate, ProvisionalStep, is_scale_invariant
from megatron.pipeline.runtime.update.weight_prediction import PredictedVersions, prediction_factor


class MegatronPrediction:
    """Predicts the weights of one rank's chunks.

    Args:
        chunks: the model chunks of the rank.
        optimizer: megatron.core's optimizer of the chunks.
        reduction: returns the reductions of the rank; called at predictions.
        reduce_partial: replicas predict from the mean of their gradients.
        provisional_microbatches: as in the schedule. A number: predictions do not depend on the cut into stages, so
            they clip by `clip_factor` alone; 0: they take the last update again.

    Attributes:
        versions: the predicted weights and the true weights.
        reduces: `reduce_partial`.
        clip_factor: the factor by which the last step that was not skipped clipped; None: steps clip, but there was
            none yet.
        last_update: the update that predictions take again; None: they read gradients.

    Raises:
        ValueError: a precision-aware optimizer, whose FP32 masters cannot be read.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        reduction: Callable[[], GradientReduction],
        *,
        reduce_partial: bool,
        provisional_microbatches: int | None,
    ) -> None:
        if optimizer.config.use_precision_aware_optimizer:
            raise ValueError(
                "Predicted weights start from FP32 masters, which a precision-aware optimizer does not show: leave out "
                "--use-precision-aware-optimizer, or --2bw-provisional."
            )
        self._clip_grad = optimizer.config.clip_grad
        self._optimizers = [each for each in optimizers_of(optimizer) if not each.is_stub_optimizer]
        self._chunks = chunks
        self.reduces = reduce_partial
        self._uniform = provisional_microbatches is not None
        self.last_update = LastUpdate() if provisional_microbatches == 0 else None
        self._distributed = is_distributed(optimizer)
        replicas, expert_replicas = chunks[0].dp_cp_group.size(), chunks[0].expt_dp_group.size()
        self._num_unread = 0 if reduce_partial else replicas - 1
        self._sharing = 1 if reduce_partial else replicas // expert_replicas  # replicas in a gradient of an expert
        self._reduction = reduction
        self._names = {parameter: name for name, parameter in named_parameters(chunks).items()}
        self._owners = owners(optimizer)
        slots: Slots | None = self._owners
        if self._distributed:
            for each in self._optimizers:
                separate_masters(each, share_storage=False)
            slots = DistributedSlots(chunks)
        types = {(model.main_grad.dtype, model.dtype) for model in self._names}
        self._torch_optimizers = [each.optimizer for each in self._optimizers]
        self._provisionals = [ProvisionalStep(each, types) for each in self._torch_optimizers]
        # parameter of the optimizer -> parameter of the model, and the flat part of it that the optimizer updates
        self._model_of = {own: part for each in self._optimizers for own, part in self._masters_of(each)}
        self.versions = PredictedVersions(
            named_parameters(chunks),
            stepped=frozenset(self._names[model] for own, (model, _) in self._model_of.items() if own is model),
            write_true=self._write_true,
            exchanges=self._owners is not None,
            make_slot=slots and slots.make,
            on_switch=slots and slots.switch,
        )
        if self.last_update is not None:
            self.versions.upcoming = self._upcoming
        summed, averaged = tensor_parallel_parameters(chunks)
        self._over_tensor = ((summed, dist.ReduceOp.SUM), (averaged, dist.ReduceOp.AVG))
        self.clip_factor: float | None = None if self._clip_grad > 0.0 else 1.0

    def _masters_of(self, optimizer: MegatronCoreOptimizer) -> Iterator[tuple[Tensor, tuple[Parameter, slice]]]:
        if isinstance(optimizer, FP32Optimizer):
            pairs = [(group["params"], group["params"]) for group in optimizer.optimizer.param_groups]
        elif self._distributed:
            pairs = [
                *zip(optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups, strict=True),
                *zip(optimizer.shard_fp32_groups, optimizer.model_fp32_groups, strict=True),
            ]
        else:
            pairs = [
                *zip(optimizer.fp32_from_float16_groups, optimizer.float16_groups, strict=True),
                *zip(optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups, strict=True),
            ]
        for masters, models in pairs:
            for master, model in zip(masters, models, strict=True):
                part = slice(None)
                if self._distributed:
                    within = optimizer._get_model_param_range_map(model)["param"]
                    part = slice(within.start, within.end)
                yield master, (model, part)

    @torch.no_grad()
    def predict(
        self,
        version: int,
        partial: Partial,
        embedding: Partial | None,
        *,
        num_microbatches: int,
        gradient_scale: float | None,
        can_overflow: bool,
    ) -> None:
        """Make the predicted weights of `version` from a part of the gradients of the batch before.

        Args:
            version: the version to predict.
            partial: the sum of the gradients of some microbatches.
            embedding: the same for the tied embedding, summed over both stages, if another rank has the other stage.
            num_microbatches: the number of microbatches of the whole batch.
            gradient_scale: the sum over all microbatches divided by the gradients of the batch's loss; None: it is not
                known, and the prediction equals the true weights.
            can_overflow: check that the gradients are finite; if not, the prediction equals the true weights.
        """
        gradients = {model: partial.gradients.views[model] for model in self._names}
        tied = None
        if embedding is not None:
            tied = self._reduction().tied_key
            gradients[tied] = embedding.gradients
        for model, gradient in self._partial_sums_over_tensor(gradients):
            gradients[model] = gradient
        read = [each.num_microbatches for each in (partial, embedding) if each is not None]
        parts = [each / num_microbatches for each in read]
        clips = self._clip_grad > 0.0 and not self._uniform
        squares = self._norms_squared(gradients, tied) if clips or can_overflow else None
        factors = self._factors(parts, squares if clips else None, gradient_scale=gradient_scale or 1.0)
        finite = squares.isfinite().unbind() if can_overflow else (None, None)
        knows_clipping = self.clip_factor is not None or all(map(is_scale_invariant, self._torch_optimizers))
        knows = gradient_scale is not None and knows_clipping
        with self.versions.predicting(version) as target:

            def target_of(own: Tensor) -> Tensor:
                model, part = self._model_of[own]
                return target[self._names[model]].view(-1)[part]

            def gradient_of(own: Tensor) -> tuple[Tensor, float | Tensor]:
                model, part = self._model_of[own]
                factor = factors[model is tied]
                return gradients[model].view(-1)[part], factor if is_dense(model) else factor / self._sharing

            with self.versions.true_weights():
                if knows:
                    for each in self._provisionals:
                        each.take(gradient_of, target_of, where=lambda own: finite[self._model_of[own][0] is tied])
                else:  # no step is due, since a step makes the clipping and the tokens known
                    for own in self._model_of:
                        target_of(own).copy_(own.view(-1))
            self._gather()

    def _partial_sums_over_tensor(self, gradients: dict[Parameter, Tensor]) -> list[tuple[Parameter, Tensor]]:
        """(parameter, gradient reduced over the tensor ranks) for replicated parameters; the gradient is a copy."""
        group = parallel_state.get_tensor_model_parallel_group()
        result = []
        for models, operation in self._over_tensor if group.size() > 1 else ():
            if models:
                flat = torch.cat([gradients[model].reshape(-1) for model in models])
                dist.all_reduce(flat, group=group)  # not AVG: `warm_up` has used SUM and MAX
                if operation is dist.ReduceOp.AVG:
                    flat.div_(group.size())
                parts = flat.split([model.numel() for model in models])
                result += [(model, part.view(model.shape)) for model, part in zip(models, parts, strict=True)]
        return result

    def _norms_squared(self, gradients: dict[Parameter, Tensor], tied: Parameter | None) -> Tensor:
        """The squared norms of the stage's gradients and of the tied embedding's gradient, float64 [2].

        The first norm is without the tied embedding, and with the experts of all ranks that share them out. Both are
        summed over the tensor ranks. Ranks with the same gradients have the same result.
        """
        # Each tensor rank counts its parts of divided parameters. Only the first counts the replicated parameters.
        own = filter(param_is_not_tensor_parallel_duplicate, gradients)
        counted = {model: gradients[model] for model in own if model is not tied}
        reads_shards = self._distributed and self.reduces  # the mean of other shards is not on this rank
        if reads_shards:
            counted = {
                model: counted[model].view(-1)[part] for model, part in self._model_of.values() if model in counted
            }
        dense = [each for model, each in counted.items() if is_dense(model)]
        experts = [each for model, each in counted.items() if not is_dense(model)]
        parts = dense, [gradients[tied]] if tied is not None else [], experts
        squares = torch.stack([norm_squared(each, device=backend.device()) for each in parts])
        group = parallel_state.get_tensor_model_parallel_group()
        if group.size() > 1:
            dist.all_reduce(squares[:2], group=group)
        if reads_shards:
            dist.all_reduce(squares[0], group=self._shards_group(of_experts=False))
        if shares_out_experts():
            dist.all_reduce(squares[2], group=parallel_state.get_expert_tensor_and_model_parallel_group())
            if reads_shards:
                dist.all_reduce(squares[2], group=self._shards_group(of_experts=True))
            # An expert's sum is over `_sharing` times as many microbatches, and its square grows as their number.
            squares[0] += squares[2] / self._sharing
        return squares[:2]

    def _shards_group(self, *, of_experts: bool) -> dist.ProcessGroup:
        """The replicas that share out the optimizer's state."""
        return self._chunks[0].intra_expt_dp_group if of_experts else self._chunks[0].intra_dp_cp_group

    def _factors(
        self, parts: list[float], squares: Tensor | None, *, gradient_scale: float
    ) -> list[float] | list[Tensor]:
        """The factors of the stage's gradients and of the tied embedding's gradient.

        Args:
            parts: the known share of the batch for the stage; if another rank has the tied embedding, too, also the
                share for this embedding.
            squares: the result of `_norms_squared`; None: clip by `clip_factor` alone.
            gradient_scale: as for `predict`.
        """
        last = self.clip_factor or 1.0
        if squares is None:
            return [last / part / gradient_scale for part in parts]
        return [
            prediction_factor(
                part, each, last=last, largest=self._clip_grad, num_unread=self._num_unread, loss_scale=gradient_scale
            )
            for part, each in zip(parts, squares, strict=False)
        ]

    def step(self, coefficient: float, *, with_prediction: bool) -> None:
        """Step the optimizer, whose gradients are ready. The model's parameters keep showing the predicted weights.

        Args:
            coefficient: multiplies the gradients.
            with_prediction: the next call is the prediction, which may make this step.
        """
        if not self._provisionals:
            return
        with self.versions.true_weights():
            if self.last_update is not None:
                self.last_update.begin(self._model_of)
            for each in self._provisionals:
                each.step(coefficient, puts_off=with_prediction and self.last_update is None)

    def finish(self) -> None:
        """Take the steps that are put off: no prediction follows."""
        with self.versions.true_weights():
            for each in self._provisionals:
                each.finish()

    @torch.no_grad()
    def repeat(self, version: int) -> None:
        """Make the predicted weights of `version` by taking the last update again."""
        restored, self.versions.restored = self.versions.restored, None
        with self.versions.predicting(version) as target:
            if restored is not None:
                for name, tensor in target.items():
                    tensor.copy_(restored[name])
            else:
                with self.versions.true_weights():
                    self._take_again(target)
                self._gather()
        self.last_update.end()

    def _take_again(self, target: Mapping[str, Tensor]) -> None:
        for own, (model, part) in self._model_of.items():
            self.last_update.write(own, target[self._names[model]].view(-1)[part])

    @torch.no_grad()
    def _upcoming(self) -> dict[str, Tensor] | None:
        """The next prediction of a drained run, which shows its true weights."""
        if self.versions.restored is not None:
            return dict(self.versions.restored)
        if not self.last_update.is_known:
            return None
        result = {name: torch.zeros_like(parameter.data) for parameter, name in self._names.items()}
        self._take_again(result)
        if self._distributed or self._owners is not None:  # each replica has written its part
            for parameter, name in self._names.items():
                dist.all_reduce(result[name], group=self._shards_group(of_experts=not is_dense(parameter)))
        return result

    def _write_true(self) -> None:
        """Write the masters into the model's parameters. Collective over replicas that share out the masters."""
        for each in self._optimizers:
            if not isinstance(each, FP32Optimizer):
                each._copy_main_params_to_model_params()
        self._gather()

    def _gather(self) -> None:
        if self._owners is not None:
            self._owners.exchange()
        if self._distributed:
            for chunk in self._chunks:
                chunk.start_param_sync()
