"""The executor where each stage steps by itself, and keeps one version of its weights (FTPipe, Table 1)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.runtime.contract.stage import GraphStage
from megatron.pipeline.runtime.graph_executor import GraphExecutor


class StagewiseExecutor(GraphExecutor):
    """Executes rows on stages of a graph whose update is `StageUpdates`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._begun: dict[int, int] = {}  # stage -> the batch of its last backward
        self._with_gradients: set[tuple[int, int]] = set()  # stages and batches whose gradients have begun
        self._begun_forward: dict[int, int] = {}  # the same of its last forward
        self._num_stepped: Counter[int] = Counter()  # version -> stages

    def _show_weights(self, stage: GraphStage, instruction: Instruction) -> None:
        if instruction.horizon:
            stage.load_ahead(instruction.version, instruction.horizon)
        elif instruction.unstepped:
            self._require_whole(instruction, instruction.version)
            stage.load_provisional(instruction.version, instruction.unstepped)
        else:
            stage.load_version(instruction.version)
        batch = self._microbatches[instruction.microbatch].batch
        if self._begun_forward.get(stage.index) != batch:
            self._begun_forward[stage.index] = batch
            self._update.of_stage(stage.index).begin_forward(self._batches[batch], instruction.version)

    def _accumulate_for(self, stage: int, batch: int) -> None:
        if self._begun.get(stage) == batch:
            return
        update, info = self._update.of_stage(stage), self._batches[batch]
        if (stage, batch) in self._with_gradients:
            update.resume_backward(info)
        else:
            self._with_gradients.add((stage, batch))
            update.begin_backward(info)
        self._begun[stage] = batch

    def _step(self, instruction: Instruction) -> None:
        stage, version = instruction.stage, instruction.version
        self._late_chain.raise_error()
        self._update.of_stage(stage).step(version)
        self._with_gradients.discard((stage, version - 1))
        self._newest[stage] = version
        self._num_stepped[version] += 1
        if self._num_stepped[version] == len(self._stages):
            del self._num_stepped[version]
            self.reports[version - 1] = self._update.step(version)
            self._forget_batch(version - 1)
