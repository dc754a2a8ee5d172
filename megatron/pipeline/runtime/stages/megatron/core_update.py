"""What the weight updates over megatron.core have in common: groups, decisions, and their state in checkpoints."""

from collections.abc import Callable, Mapping
from datetime import timedelta

import torch.distributed as dist

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.pipeline.program.weight_policies import WeightPolicy, weight_policy
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.stages.megatron.decisions import Decisions
from megatron.pipeline.runtime.stages.megatron.groups import DEFAULT_TIMEOUT, ChainGroups
from megatron.pipeline.runtime.stages.megatron.optimizers import single_optimizer


class CoreUpdate:
    """The weight update of one rank.

    Args:
        optimizer: what `get_megatron_optimizer` returned for the rank's chunks.
        scheduler: megatron.core's learning-rate schedule, counted in samples; None keeps the learning rate.
        weights: the policy of the schedule.
        loss_names: the losses that the last stage reports, the same on all ranks.
    """

    replicas_predict_apart = False

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler | None,
        *,
        weights: WeightPolicy,
        loss_names: tuple[str, ...],
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.weights = weight_policy(weights)
        self.loss_names = loss_names
        self._inner = single_optimizer(optimizer)
        self._last_norm: float | None = None  # exact norm of the newest batch whose chain has ended

    def _connect(self, timeout: timedelta | None, rank_metrics: Mapping[str, Callable[[], float]] | None) -> None:
        """Make the chain's groups and the decisions over them. Collective over the job.

        `timeout`: that of the chain's collectives; default: ten minutes. `rank_metrics`: name -> a measurement of this
        rank, read once a batch on the chain's thread; the values of all ranks come with the batch's report. The same
        names on all ranks.
        """
        self._timeout = timeout or DEFAULT_TIMEOUT
        self._groups = ChainGroups.create(timeout=self._timeout)
        self._decisions = Decisions(
            self.optimizer, self.scheduler, delay=self.weights.delay or 0, world=self._groups.world,
            loss_names=self.loss_names, rank_metrics=rank_metrics,
        )  # fmt: skip

    def _new_report(self, info: BatchInfo) -> BatchReport:
        """Choose the loss scale of a batch that begins."""
        return self._decisions.begin(info)

    def loss_scale(self, batch: int) -> float:
        """The factor on the losses of a running batch."""
        return self._batches[batch + 1].report.loss_scale

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step, of the groups that follow the schedule."""
        return self._decisions.learning_rate

    def close(self) -> None:
        """End the groups of the chain, drained. Collective: every rank of the job calls it, after the engine's."""
        dist.barrier()  # a group that one member has left may fail another that is still at its last reduction
        self._groups.close()

    # Called between batches, drained. Weight versions are saved and restored through `versions`.

    def state_dict(self) -> dict:
        """The state beside megatron.core's optimizer, scheduler and the weights; plain numbers, equal on all ranks."""
        return {"loss_scales": self._decisions.scales.state_dict(), "last_grad_norm": self._last_norm}

    def load_state_dict(self, state: dict | None) -> None:
        """Restore `state_dict`, also another update's, after the optimizer's state; None: the checkpoint has none."""
        self._decisions.scales.load_state_dict(state and state["loss_scales"])
        self._last_norm = state["last_grad_norm"] if state else None
