"""The update of a rank whose megatron.core chunks are all frozen: weights do not change, and batches pass through.

The rank takes part in the norm, to which it adds nothing, because the norm brings the reports; it does not wait for it,
so the step of a batch comes before its norm. Learning rate and loss scale advance with the reports, as on every other
rank, since callers may ask the rank for them and its part of a checkpoint contains them.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.pipeline.program.weight_policies import FLUSH, WeightPolicy, weight_policy
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.stages.megatron.decisions import Decisions
from megatron.pipeline.runtime.stages.megatron.groups import DEFAULT_TIMEOUT, ChainGroups
from megatron.pipeline.runtime.stages.megatron.reduction import warm_up_common


class _NoVersions:
    """Weight versions without weights, for checkpoints."""

    newest = 0

    def show_newest(self) -> None:
        """They are shown."""

    def newest_tensors(self) -> dict[str, Tensor]:
        return {}

    def slot_of(self, version: int) -> int:
        return 0

    def reset(self, *versions: int) -> None:
        """Nothing to forget."""

    def live(self) -> list[int]:
        return [0]

    def tensors(self, version: int) -> dict[str, Tensor]:
        return {}

    def restore(self, mapping: dict[int, dict[str, Tensor]]) -> None:
        """Nothing to restore."""


class MegatronFrozenUpdate:
    """`WeightUpdate` of a rank without trainable parameters.

    Args:
        chunks: the rank's, each wrapped in megatron.core's DDP.
        optimizer: megatron.core's, of no parameters; its groups have the learning rates.
        num_layers: of the model, where the norms of layers come with the reports; 0: they do not.
        scheduler, weights, loss_names, timeout, rank_metrics: as for `MegatronWeightUpdate`.
    """

    replicas_predict_apart = False

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler | None = None,
        *,
        weights: WeightPolicy = FLUSH,
        num_layers: int = 0,
        loss_names: tuple[str, ...] = ("lm loss",),
        timeout: timedelta | None = None,
        rank_metrics: Mapping[str, Callable[[], float]] | None = None,
    ) -> None:
        self.chunks = chunks
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.weights = weight_policy(weights)
        self.loss_names = loss_names
        self._nothing = (0.0,) * num_layers
        self._groups = ChainGroups.create(timeout=timeout or DEFAULT_TIMEOUT)
        self._decisions = Decisions(
            optimizer, scheduler, delay=self.weights.delay or 0, world=self._groups.world, loss_names=loss_names,
            rank_metrics=rank_metrics,
        )  # fmt: skip
        self._last_norm: float | None = None
        self._reports: dict[int, BatchReport] = {}  # by the version that the batch leads to
        self.versions = _NoVersions()
        with torch.no_grad():
            warm_up_common(chunks, self._groups.world)

    def begin_batch(self, info: BatchInfo) -> None:
        """A batch begins; its loss scale is not known here yet, nor needed."""
        self._reports[info.index + 1] = BatchReport(batch=info.index, num_samples=info.num_samples)

    def step(self, version: int) -> BatchReport:
        """The report of the batch; `reduce_norm` completes it."""
        return self._reports[version]

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        """Complete the batch's report; advance learning rate and loss scale."""
        report = self._reports.pop(version)
        report.loss_scale = self._decisions.scales.of_batch(report.batch)
        self._decisions.complete(report, 0.0, stop_requests, losses, layers_squared=self._nothing)
        self._decisions.note(report)
        self._decisions.advance(report)
        self._last_norm = report.grad_norm

    def begin_evaluation(self) -> None:
        """Nothing to do: the weights are always the newest."""

    def show_newest(self) -> None:
        """They are shown."""

    @property
    def learning_rate(self) -> float:
        """See `MegatronWeightUpdate.learning_rate`."""
        return self._decisions.learning_rate

    def close(self) -> None:
        """End the groups, drained. Collective, as `MegatronWeightUpdate.close`."""
        dist.barrier()
        self._groups.close()

    def state_dict(self) -> dict:
        """The part of `MegatronWeightUpdate`'s state that is equal on all ranks."""
        return {"loss_scales": self._decisions.scales.state_dict(), "last_grad_norm": self._last_norm}

    def load_state_dict(self, state: dict | None) -> None:
        self._decisions.scales.load_state_dict(state and state["loss_scales"])
        self._last_norm = state["last_grad_norm"] if state else None
