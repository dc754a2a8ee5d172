"""The record of a run on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.checkpoint.checkpoint import CheckpointPosition, CheckpointWriter
from megatron.trainer.data.microbatches import MicrobatchIterator
from megatron.trainer.report.log import Reporter
from megatron.trainer.start_up.model_and_optimizer import ModelAndOptimizer, Update
from megatron.trainer.start_up.program import TrainingProgram

if TYPE_CHECKING:
    from megatron.trainer.changes.decisions import ChangeDecisions
    from megatron.trainer.changes.prefix_cache import PrefixCache


@dataclass
class Run:
    """The parts of a run on one rank, and its position (`position` counts over the whole run)."""

    args: TrainConfig
    program: TrainingProgram
    model_and_optimizer: ModelAndOptimizer
    engine: PipelineEngine
    reporter: Reporter
    writer: CheckpointWriter | None
    datasets: list
    vocab_size: int
    decisions: ChangeDecisions | None = None
    cache: PrefixCache | None = None
    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0
    flops: float = 0.0
    saved_iteration: int | None = None
    is_kept_out_of_collections: bool = False  # by gc.freeze, when it began to train

    def go_on_with(self, args: TrainConfig) -> None:
        """Take over another configuration of the run, whose arrangement has changed."""
        self.args = self.reporter.args = args
        if self.decisions is not None:
            self.decisions.go_on_with(args)

    @property
    def chunks(self) -> list[torch.nn.Module]:
        return self.model_and_optimizer.chunks

    @property
    def optimizer(self) -> MegatronOptimizer:
        return self.model_and_optimizer.optimizer

    @property
    def scheduler(self) -> OptimizerParamScheduler:
        return self.model_and_optimizer.scheduler

    @property
    def update(self) -> Update:
        return self.model_and_optimizer.update

    @property
    def stages(self) -> list[MegatronStage]:
        return self.model_and_optimizer.stages

    def position(self) -> CheckpointPosition:
        """Where the run stands, as a checkpoint records it."""
        return CheckpointPosition(
            iteration=self.iteration,
            consumed_train_samples=self.consumed_samples,
            consumed_valid_samples=self.consumed_valid_samples,
            num_floating_point_operations_so_far=self.flops,
        )

    def samples(self, index: int, name: str, consumed: int) -> list[MicrobatchIterator]:
        """Microbatches of dataset `index` (0 training, 1 validation, 2 test) from sample `consumed` on, by own stage.

        Validation data begin again at their end: a resumed run that evaluates at other intervals has them sized for
        those, and its position from before. Those of which every evaluation takes all begin anew with it.
        """
        if getattr(self.datasets[index], "starts_over", False):
            consumed = 0
        return [
            MicrobatchIterator(
                self.args, self.datasets[index], fields=self.program.fields_provider(self.args), name=name,
                consumed_samples=consumed, vocab_size=self.vocab_size, stage=stage.index, num_stages=stage.num_stages,
                repeats=name == "validation",
            )
            for stage in self.stages
        ]  # fmt: skip
