"""The base class of the weight updates over megatron.core, with their decisions about a batch.

The decisions must be equal on all ranks: loss scale, clipping, skipped steps, learning rate. One float64 all-reduce
gives all ranks the norm and the overflow of a batch. Then the step multiplies the gradients by one factor that unscales
and clips, and learning rate and loss scale advance. Weights may be on the device or on the host.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron import backend
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from megatron.core.utils import unwrap_model
from megatron.pipeline.program.weight_policies import WeightPolicy, weight_policy
from megatron.pipeline.runtime.contract.stage import NUM_TOKENS, BatchInfo, BatchReport
from megatron.pipeline.runtime.copied_stages import CopyRanks
from megatron.pipeline.runtime.stages.megatron.auxiliary import RouterTokens
from megatron.pipeline.runtime.stages.megatron.groups import (
    DEFAULT_TIMEOUT,
    ChainGroups,
    shares_out_experts,
)
from megatron.pipeline.runtime.stages.megatron.optimizers import is_distributed, optimizers_of, owners, shared_scaler
from megatron.pipeline.runtime.update.gradients import KEPT_SUMS, NormReduction, all_reduce_norm, clip_factor
from megatron.pipeline.runtime.update.loss_scales import LossScales


class BaseUpdate:
    """Base of the weight update of one rank.

    Args:
        optimizer: the result of `get_megatron_optimizer` for the chunks of the rank.
        scheduler: megatron.core's learning-rate schedule, counted in samples; None: a constant learning rate.
        chunks: the model chunks of the rank, which have one configuration.
        weights: the weight policy of the schedule.
        loss_names: the losses that the last stage reports, the same on all ranks.

    Attributes:
        scales: the loss scales of the batches.
        rank_metrics: as for `MegatronWeightUpdate`; metrics may be added before the first batch.
        sums: batch -> the sums over all ranks that `_complete` has made, for the last `KEPT_SUMS` batches.
        replicas_predict_apart: whether each replica predicts weights from its own gradients.
        router_tokens: the counters and biases of the rank's routers; None: nothing is counted.
    """

    replicas_predict_apart = False
    router_tokens: RouterTokens | None = None

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler | None,
        chunks: Sequence[DistributedDataParallel],
        *,
        weights: WeightPolicy,
        loss_names: tuple[str, ...],
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.weights = weight_policy(weights)
        self.loss_names = loss_names
        self._config = chunks[0].config
        self._per_token = self._config.calculate_per_token_loss
        chain = optimizers_of(optimizer)
        self._inner = chain[0] if len(chain) == 1 else optimizer
        self._scaler = shared_scaler(optimizer)
        self._clip_grad = chain[0].config.clip_grad
        self._last_norm: float | None = None  # the norm of the last batch that has stepped

    def _connect(
        self,
        timeout: timedelta | None,
        rank_metrics: Mapping[str, Callable[[], float]] | None,
        copies: CopyRanks | None = None,
    ) -> None:
        """Make the groups of the chain. Collective over the job.

        `timeout`, `rank_metrics`, `copies`: as for `MegatronWeightUpdate`.
        """
        self._timeout = timeout or DEFAULT_TIMEOUT
        if copies is not None:
            _require_copyable(self.optimizer, self._config, copies)
        self._groups = ChainGroups.create(timeout=self._timeout, copies=copies)
        self.rank_metrics = dict(rank_metrics or {})
        self.sums: dict[int, NormReduction] = {}
        self.scales = LossScales(self._scaler, delay=(self.weights.delay or 0) + 1)

    def _regroup(self, copies: CopyRanks | None) -> None:
        """End the groups of the chain and make new ones. Collective over the ranks of the job that `copies` names."""
        if copies is not None:
            _require_copyable(self.optimizer, self._config, copies)
        self._groups.close()
        self._groups = ChainGroups.create(timeout=self._timeout, copies=copies)

    def _new_report(self, info: BatchInfo) -> BatchReport:
        """Return a new report of a batch that begins, with its loss scale."""
        scale = self.scales.of_batch(info.index)
        return BatchReport(batch=info.index, loss_scale=scale, num_samples=info.num_samples)

    def loss_scale(self, batch: int) -> float:
        """The factor that multiplies the losses of a batch whose report is not complete."""
        return self._batches[batch + 1].report.loss_scale

    def _complete(
        self,
        report: BatchReport,
        norm_squared: float,
        stop_requests: int,
        losses: Mapping[str, tuple[float, float]],
        *,
        layers_squared: Sequence[float] = (),
        tokens: Sequence[float] = (),
    ) -> None:
        """Complete a batch's report with the sums over all ranks of the job. Collective, on the chain's thread.

        Raises ValueError on all ranks if tokens are counted, and the loss function has returned none.

        Args:
            report: the report of the batch, which has its loss scale.
            norm_squared: the squared norm of the scaled gradients that this rank counts.
            stop_requests: bits, see `NormReduction`.
            losses: name -> (numerator, denominator) on this rank; with per-token loss the tokens as `NUM_TOKENS`, too.
            layers_squared: this rank's part of the squared norm of each layer's scaled gradients.
            tokens: this rank's counts of the tokens of experts (`RouterTokens.take`).
        """
        world = self._groups.world
        sums = all_reduce_norm(
            norm_squared=norm_squared,
            overflow=not math.isfinite(norm_squared),
            stop_requests=stop_requests,
            losses=losses,
            loss_names=(*self.loss_names, NUM_TOKENS) if self._per_token else self.loss_names,
            group=world and world.process_group,
            device=backend.device() if world and world.uses_nccl else torch.device("cpu"),
            layers_squared=[*layers_squared, *tokens],
            rank_metrics={name: read() for name, read in self.rank_metrics.items()},
        )
        self._fill(report, sums, num_layers=len(layers_squared))

    def _fill(self, report: BatchReport, sums: NormReduction, *, num_layers: int = 0) -> None:
        """Complete a batch's report with the sums over all ranks. Raises ValueError as `_complete`."""
        self.sums[report.batch] = sums
        self.sums.pop(report.batch - KEPT_SUMS, None)
        overflow, losses = sums.num_overflows > 0, dict(sums.losses)
        num_tokens, num_microbatches = losses.pop(NUM_TOKENS, (1.0, 1.0))
        if not num_microbatches:
            raise ValueError(
                "calculate_per_token_loss: the loss function returned no number of tokens; return (sum of losses, "
                "number of tokens, numbers), or leave it out."
            )
        report.num_tokens = max(num_tokens, 1.0)
        report.grad_norm = sums.norm / report.gradient_scale
        report.overflow = self._scaler is not None and overflow
        report.stop_requests = sums.stop_requests
        of_layers = sums.layers_squared[:num_layers]
        report.layers_squared = tuple(each / report.gradient_scale**2 for each in of_layers)
        report.tokens_per_expert = sums.layers_squared[num_layers:]
        report.rank_metrics = sums.rank_metrics
        means = {name: total / count for name, (total, count) in losses.items() if count}
        report.losses = dict.fromkeys(self.loss_names, 0.0) | means
        report.nan = any(not math.isfinite(loss) for loss in report.losses.values()) or (
            self._scaler is None and overflow
        )

    def _factor(self, report: BatchReport, *, norm: float | None = None) -> float:
        """The factor that unscales, averages and clips a batch's gradients. `norm` replaces the norm in the report."""
        norm = report.grad_norm if norm is None else norm
        return 1.0 / report.gradient_scale * clip_factor(self._clip_grad, norm)

    def _note(self, report: BatchReport) -> None:
        """Write into the report the learning rate, and whether the step is skipped because of an overflow."""
        report.learning_rate = self.learning_rate
        report.skipped = report.overflow

    def _advance(self, report: BatchReport) -> None:
        """Advance the loss scale and, unless the step was skipped, the learning rate."""
        if not report.skipped and self.scheduler is not None:
            self.scheduler.step(increment=report.num_samples)
        self.scales.step(report.batch, scale=report.loss_scale, overflow=report.overflow)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step for the parameter groups that follow the schedule."""
        groups = self.optimizer.param_groups
        followers = [group for group in groups if group.get("default_config", True)] or groups
        return float(followers[0]["lr"]) if followers else 0.0

    def close(self) -> None:
        """End the groups of the chain. Call it while drained, after `close` of the engine.

        Collective: every rank of the job calls it.
        """
        self._groups.meet()  # if a member left a group early, the last reduction of another member might fail
        self._groups.close()

    # Called between batches, drained. Weight versions are saved and restored through `versions`.

    def state_dict(self) -> dict:
        """The state besides weights, optimizer and scheduler: plain numbers that are equal on all ranks."""
        routers = self.router_tokens.state_dict() if self.router_tokens and self.router_tokens.has_biases else {}
        return {"loss_scales": self.scales.state_dict(), "last_grad_norm": self._last_norm, **routers}

    def show_newest(self) -> None:
        """Show the newest weights and biases of experts; called while drained.

        With predicted weights the call is collective over the replicas.
        """
        self.versions.show_newest()
        if self.router_tokens is not None:
            self.router_tokens.show_newest()

    def restore_routers(self, state: dict | None) -> None:
        """Restore the routers' part of `state_dict`. Their newest biases are loaded with the model. Collective."""
        if self.router_tokens is not None:
            self.router_tokens.restore(self.versions.newest, state)

    def load_state_dict(self, state: dict | None) -> None:
        """Restore the result of `state_dict` of any update over megatron.core; None: the checkpoint has no such state.

        To be called after the optimizer's state was loaded.
        """
        self.scales.load_state_dict(state and state["loss_scales"])
        self._last_norm = state["last_grad_norm"] if state else None


def _require_copyable(optimizer: MegatronOptimizer, config: TransformerConfig, copies: CopyRanks) -> None:
    """Raise ValueError unless the replicas of a chunk can be copies with batches in common.

    Replicas exchange more than gradients, or hold state in parts, over megatron.core's groups of all replicas. Where
    stages are copies, ranks of these groups may be missing.
    """
    balancing = config.moe_router_load_balancing_type
    kinds = [balancing] if isinstance(balancing, str) else balancing
    sharing = config.context_parallel_size
    lacks_experts = shares_out_experts() and not copies.same_experts
    found = [
        (_is_cut_over_others(optimizer, copies), "the distributed optimizer, of which each replica has a shard"),
        (_is_owned_by_others(optimizer, copies), "an optimizer of whose state each replica has a part"),
        (copies.sharing % sharing > 0, f"context parallelism over {sharing} ranks"),
        (lacks_experts, f"expert parallelism over {config.expert_model_parallel_size} ranks"),
        (bool(config.num_moe_experts) and "global_aux_loss" in kinds, "global_aux_loss, which counts all replicas"),
        (bool(config.fp8) and config.fp8_recipe == "delayed", "delayed scales in FP8, which all replicas agree on"),
    ]
    for is_there, what in found:
        if is_there:
            raise ValueError(
                f"stages are copies that share batches, and the run has {what}: it needs the ranks of all replicas, "
                "and copies lack some, so run copies without it."
            )


def _is_cut_over_others(optimizer: MegatronOptimizer, copies: CopyRanks) -> bool:
    """Whether the state of the optimizer is cut into shards over other ranks than the copies of a chunk."""
    return is_distributed(optimizer) and any(
        not each.is_stub_optimizer and dist.get_process_group_ranks(each.data_parallel_group) != list(ranks)
        for each, ranks in zip(optimizers_of(optimizer), (copies.copies, copies.same_experts), strict=False)
    )


def _is_owned_by_others(optimizer: MegatronOptimizer, copies: CopyRanks) -> bool:
    """Whether other ranks than the copies of a chunk own its parameters."""
    shared = owners(optimizer)
    return shared is not None and shared.ranks != list(copies.copies)


# --- norms of layers


class LayersOfParameters:
    """The transformer layer of each trainable parameter of `chunks`, in a model of `num_layers` layers.

    Parameters outside of the layers (embeddings, heads) belong to no layer.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], num_layers: int) -> None:
        self.num_layers = num_layers
        self._numbers = {
            parameter: module.layer_number - 1
            for chunk in chunks
            for module in unwrap_model(chunk).modules()
            if isinstance(module, BaseTransformerLayer)
            for parameter in module.parameters()
            if parameter.requires_grad
        }
        assert all(0 <= number < num_layers for number in self._numbers.values()), "layers are numbered over the model"

    def squared_norms(self, norms: Mapping[Parameter, Tensor]) -> Tensor:
        """The squared norm of each layer, float64 [num_layers], from the norms of the gradients of parameters.

        It is 0 for a layer without parameters in `norms`.
        """
        result = torch.zeros(self.num_layers, dtype=torch.float64, device=backend.device())
        own = [(self._numbers[parameter], norm) for parameter, norm in norms.items() if parameter in self._numbers]
        if own:
            numbers = torch.tensor([number for number, _ in own], device=result.device)
            squares = torch.stack([norm for _, norm in own]).double().square()
            result.index_add_(0, numbers, squares)
        return result
