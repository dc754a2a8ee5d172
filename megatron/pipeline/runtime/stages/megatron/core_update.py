"""The base class of the weight updates over megatron.core: groups, decisions, and state in checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.pipeline.program.weight_policies import WeightPolicy, weight_policy
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.stages.megatron.decisions import Decisions
from megatron.pipeline.runtime.stages.megatron.groups import DEFAULT_TIMEOUT, ChainGroups
from megatron.pipeline.runtime.stages.megatron.optimizers import optimizers_of
from megatron.pipeline.runtime.stages.megatron.router_tokens import RouterTokens


class CoreUpdate:
    """Base of the weight update of one rank.

    Args:
        optimizer: the result of `get_megatron_optimizer` for the chunks of the rank.
        scheduler: megatron.core's learning-rate schedule, counted in samples; None: a constant learning rate.
        chunks: the model chunks of the rank, which have one configuration.
        weights: the weight policy of the schedule.
        loss_names: the losses that the last stage reports, the same on all ranks.

    Attributes:
        replicas_predict_apart: whether each replica predicts weights from its own gradients.
        router_tokens: what the routers of the rank count, and their biases; None: nothing is counted.
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
        self._per_token = chunks[0].config.calculate_per_token_loss
        chain = optimizers_of(optimizer)
        self._inner = chain[0] if len(chain) == 1 else optimizer
        self._last_norm: float | None = None  # the norm of the last batch that has stepped

    def _connect(
        self,
        timeout: timedelta | None,
        rank_metrics: Mapping[str, Callable[[], float]] | None,
    ) -> None:
        """Make the groups of the chain and the decisions that use them. Collective over the job.

        `timeout`, `rank_metrics`: as for `MegatronWeightUpdate`.
        """
        self._timeout = timeout or DEFAULT_TIMEOUT
        self._groups = ChainGroups.create(timeout=self._timeout)
        self._decisions = Decisions(
            self.optimizer, self.scheduler, delay=self.weights.delay or 0, world=self._groups.world,
            loss_names=self.loss_names, rank_metrics=rank_metrics, per_token=self._per_token,
        )  # fmt: skip

    def _new_report(self, info: BatchInfo) -> BatchReport:
        """Return a new report of a batch that begins, with its loss scale."""
        return self._decisions.begin(info)

    def loss_scale(self, batch: int) -> float:
        """The factor that multiplies the losses of a batch whose report is not complete."""
        return self._batches[batch + 1].report.loss_scale

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step for the parameter groups that follow the schedule."""
        return self._decisions.learning_rate

    def close(self) -> None:
        """End the groups of the chain. Call it while drained, after `close` of the engine.

        Collective: every rank of the job calls it.
        """
        dist.barrier()  # if a member left a group early, the last reduction of another member might fail
        self._groups.close()

    # Called between batches, drained. Weight versions are saved and restored through `versions`.

    def state_dict(self) -> dict:
        """The state besides weights, optimizer and scheduler: plain numbers that are equal on all ranks."""
        routers = self.router_tokens.state_dict() if self.router_tokens and self.router_tokens.has_biases else {}
        return {"loss_scales": self._decisions.scales.state_dict(), "last_grad_norm": self._last_norm, **routers}

    def show_newest(self) -> None:
        """Show the newest weights and biases of experts; called while drained.

        With predicted weights the call is collective over the replicas.
        """
        self.versions.show_newest()
        if self.router_tokens is not None:
            self.router_tokens.show_newest()

    def restore_routers(self, state: dict | None) -> None:
        """Restore what `state_dict` has of routers, whose newest biases are loaded with the model. Collective."""
        if self.router_tokens is not None:
            self.router_tokens.restore(self.versions.newest, state)

    def load_state_dict(self, state: dict | None) -> None:
        """Restore the result of `state_dict` of any update over megatron.core; None: the checkpoint has none.

        To be called after the optimizer's state was loaded.
        """
        self._decisions.scales.load_state_dict(state and state["loss_scales"])
        self._last_norm = state["last_grad_norm"] if state else None
