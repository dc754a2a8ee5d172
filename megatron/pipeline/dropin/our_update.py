"""The update under 2bw: the engine's, within Megatron-LM's training step.

Megatron-LM's step of a batch zeroes gradients, runs the batch, steps the optimizer and the learning rate. Under 2bw the
last batch's step is made while this one runs, so the engine makes it, and the four calls are answered for it: the
objects that Megatron-LM holds keep their methods for the engine, and say to everybody else what the engine's newest
report says. So the gradient's norm, whether a batch was skipped and the learning rate come one iteration late; losses
do not, for the last stage has run all forwards of a batch when its segment ends.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from megatron import backend
from megatron.backend.streams import streams_of
from megatron.core import parallel_state
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule


class OurUpdate:
    """The weight update of a rank's chunks, with Megatron-LM's optimizer and scheduler in its hands.

    Args:
        chunks, optimizer, scheduler: Megatron-LM's; their methods are replaced on these objects alone.
        schedule: says which weights batches use.
        timeout: of the chain's reductions.

    Attributes:
        update: what stages and engine are given.
        newest: the report of the newest batch that has been stepped; None before the first.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        scheduler: Any,
        *,
        schedule: PipelineSchedule,
        stage: int,
        timeout: timedelta,
    ) -> None:
        self._engine_acts = False
        self._chunks, self._optimizer, self._scheduler = chunks, optimizer, scheduler
        self.newest: BatchReport | None = None
        self.update = MegatronWeightUpdate(
            list(chunks), optimizer, SimpleNamespace(step=scheduler.step), weights=schedule.weights,
            num_stages=schedule.num_stages, stage=stage, loss_names=(), timeout=timeout,
            reduce_partial=schedule.reduce_partial, uniform=schedule.provisional_microbatches is not None,
        )  # fmt: skip

    def begin(self, iteration: int) -> None:
        """After so many batches the engine steps. Behind the loading of a checkpoint, which uses the methods, and which
        may count batches as it likes. Collective.
        """
        versions = self.update.versions
        if versions.newest != iteration:
            if self.update.weights.predicts:
                versions.restart(iteration)
            else:
                versions.reset(*self.update.weights.entry_versions(iteration))
        _warm_up()
        for chunk in self._chunks:
            chunk.zero_grad_buffer = self._only_for_engine(chunk.zero_grad_buffer)
        self._optimizer.zero_grad = self._only_for_engine(self._optimizer.zero_grad)
        self._optimizer.step = self._outcome
        self._scheduler.step = self._nothing

    @contextmanager
    def engine_acts(self) -> Iterator[None]:
        """In this block the engine calls, and methods are what they were."""
        self._engine_acts = True
        try:
            yield
        finally:
            self._engine_acts = False

    def note(self, reports: Sequence[BatchReport]) -> None:
        """Take the reports that the engine has returned, oldest first."""
        if reports:
            self.newest = reports[-1]

    def _only_for_engine(self, method: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs) if self._engine_acts else None

        return call

    def _outcome(self) -> tuple[bool, float | None, None]:
        """(stepped, gradient norm, zeros in the gradient), as Megatron-LM's optimizers return them."""
        if self.newest is None or self.newest.skipped:
            return self.newest is None, None, None
        return True, self.newest.grad_norm, None

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """The engine steps the learning rate."""


def _warm_up() -> None:
    """Use the groups that Megatron-LM's loop uses between batches, while nothing else runs (`warm_up.py` says why)."""
    number = torch.zeros(2, device=backend.device())
    torch.distributed.all_reduce(number, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    torch.distributed.all_reduce(number, group=parallel_state.get_pipeline_model_parallel_group())
    torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
    streams = streams_of(backend.device())
    streams.finish(streams.record())
