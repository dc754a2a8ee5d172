"""The parts of Megatron-LM's training step under a schedule: the user's forward step, and the weight update.

Under schedules that drain with every batch, Megatron-LM makes the update, after the program's STEP. A batch's program
ends with all backwards done and nothing in flight. This is the state in which Megatron-LM's own schedule finishes the
gradients, so its function for that is called, and the rest of its training step follows: the norm, the step, the
learning rate. The program's reductions and its STEP are no-ops.

Under 2bw the engine makes the update. Megatron-LM's training step zeroes gradients, runs the batch, and steps the
optimizer and the learning rate. Under 2bw the step of the last batch is made while the current batch runs, so the
engine makes it. The methods that Megatron-LM would call for these steps are replaced on its objects: they work for the
engine, and every other caller gets the values of the engine's newest report. So the gradient norm, the skipping of a
batch and the learning rate are reported one iteration late. Losses are reported in time, since the last stage has run
all forwards of a batch when the batch's segment ends.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron import backend
from megatron.backend.streams import streams_of
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport, WeightUpdate
from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule

# --- the user's forward step ------------------------------------------------------------------------------------------

UserForwardStep = Callable[..., tuple[Any, Callable[..., tuple]]]

_set_current_microbatch = getattr(schedules, "set_current_microbatch", None)  # not in all versions


class ForwardStep:
    """The user's forward step for one stage, with the losses of its batch.

    The forwards of a batch run in the order of its microbatches, so `losses` is the list that Megatron-LM's schedule
    returns.

    Args:
        model: the model chunk, as Megatron-LM wraps it.
        chunk: the chunk's number on its rank; None if the rank has one chunk.
        is_last: whether the stage is the last one, whose losses are recorded.
    """

    def __init__(self, model: torch.nn.Module, *, chunk: int | None, is_last: bool) -> None:
        self._chunk = chunk
        self._is_last = is_last
        self._mark_first = getattr(model, "set_is_first_microbatch", None)
        self._user: UserForwardStep | None = None
        self._count = 0
        self.losses: list[Any] = []
        self.num_tokens: Tensor | int = 0

    def begin_batch(self, user: UserForwardStep) -> None:
        """Prepare for the forwards of the next batch with the user's function `user`."""
        self._user, self._count, self.losses, self.num_tokens = user, 0, [], 0

    def let_go(self) -> None:
        """Drop the user's function and the losses. Call it after the last batch."""
        self._user, self.losses = None, []

    def __call__(self, data: Iterator | None, model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple]]:
        """Call the user's function as megatron.core's schedules do."""
        if self._count == 0 and self._mark_first is not None:
            self._mark_first()
        if _set_current_microbatch is not None:
            _set_current_microbatch(model, self._count)
        if self._chunk is not None and hasattr(parallel_state, "set_virtual_pipeline_model_parallel_rank"):
            parallel_state.set_virtual_pipeline_model_parallel_rank(self._chunk)
        self._count += 1
        output, loss_function = self._user(data, model)
        return output, self._recording(loss_function) if self._is_last else loss_function

    def _recording(self, loss_function: Callable[[Tensor], tuple]) -> Callable[[Tensor], tuple]:
        def record(output: Tensor) -> tuple:
            outputs = loss_function(output)
            self.losses.append(outputs[-1])
            if len(outputs) == 3:
                self.num_tokens = self.num_tokens + outputs[1]
            return outputs

        return record


# --- the engine's update ----------------------------------------------------------------------------------------------


class EngineUpdate:
    """The weight update of a rank's chunks by the engine, which calls Megatron-LM's optimizer and scheduler.

    Args:
        chunks, optimizer, scheduler: Megatron-LM's objects. Methods are replaced on these objects alone.
        schedule: the schedule, whose policy decides the weight version of each batch.
        stage: the rank's position in the pipeline.
        timeout: the longest time of a reduction in the chain.

    Attributes:
        update: the update for stages and engine.
        newest: the report of the newest batch that has been stepped; None before the first step.
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
            reduce_partial=schedule.reduce_partial, provisional_microbatches=schedule.provisional_microbatches,
        )  # fmt: skip

    def begin(self, iteration: int) -> None:
        """Hand the optimizer's methods to the engine, which steps from now on, after `iteration` batches.

        Call it after a checkpoint is loaded, since loading uses the original methods and sets the number of batches.
        Collective: every rank of the job must call it.
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
        self._scheduler.step = lambda *args, **kwargs: None  # the engine steps the learning rate

    @contextmanager
    def engine_acts(self) -> Iterator[None]:
        """A block in which the engine acts: calls of the replaced methods reach the original methods."""
        self._engine_acts = True
        try:
            yield
        finally:
            self._engine_acts = False

    def note(self, reports: Sequence[BatchReport]) -> None:
        """Keep the newest of the reports that the engine has returned. `reports`: oldest first."""
        if reports:
            self.newest = reports[-1]

    def _only_for_engine(self, method: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs) if self._engine_acts else None

        return call

    def _outcome(self) -> tuple[bool, float | None, None]:
        """The newest step's (stepped, gradient norm, zeros in the gradient), as Megatron-LM's optimizers return it."""
        if self.newest is None or self.newest.skipped:
            return self.newest is None, None, None
        return True, self.newest.grad_norm, None


def _warm_up() -> None:
    """Use each process group of Megatron-LM's loop once, while no other communication runs.

    See `runtime/stages/megatron/reduction.py`.
    """
    number = torch.zeros(2, device=backend.device())
    torch.distributed.all_reduce(number, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    torch.distributed.all_reduce(number, group=parallel_state.get_pipeline_model_parallel_group())
    torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
    streams = streams_of(backend.device())
    streams.finish(streams.record())


# --- Megatron-LM's update ---------------------------------------------------------------------------------------------


class _OneVersion:
    """The one weight version of a stage: the values of its parameters, so nothing has to be loaded."""

    def load(self, version: int) -> None:
        pass


class MegatronUpdate(WeightUpdate):
    """A `WeightUpdate` that leaves the update to Megatron-LM.

    Its steps are no-ops, and so are its reductions, which a program from a file may contain.

    Args:
        chunks: the rank's model chunks, as Megatron-LM wraps them.
        config: the model's configuration, with the scaling of losses and the function that finishes gradients.
    """

    router_tokens = None  # Megatron-LM's own end of a batch counts them

    def __init__(self, chunks: Sequence[torch.nn.Module], config: TransformerConfig) -> None:
        self._chunks = list(chunks)
        self._config = config
        self._loss_scale = 1.0  # of the running batch; batches do not overlap

    def finish_batch(self, forward_steps: Sequence[ForwardStep], call: Mapping[str, Any]) -> None:
        """Finish the gradients of a drained batch, as Megatron-LM's schedules do at their end.

        `call`: the arguments with which Megatron-LM calls its schedule.
        """
        finish = self._config.finalize_model_grads_func
        if finish is None:
            return
        further = {name: call[name] for name in ("pg_collection", "force_all_reduce") if call.get(name)}
        finish(self._chunks, self._num_tokens(forward_steps), **further)

    def _num_tokens(self, forward_steps: Sequence[ForwardStep]) -> torch.Tensor | None:
        """The number of tokens of the batch on this rank; None if losses are averaged by microbatch."""
        if not self._config.calculate_per_token_loss:
            return None
        count = torch.zeros([], dtype=torch.int, device=backend.device())
        for each in forward_steps:
            count += each.num_tokens
        return count

    # `WeightUpdate`

    def begin_batch(self, info: BatchInfo) -> None:
        scale = self._config.grad_scale_func
        one = torch.ones((), device=backend.device())
        self._loss_scale = 1.0 if scale is None else float(scale(one))

    def loss_scale(self, batch: int) -> float:
        """The factor on the losses of the running batch."""
        return self._loss_scale

    def step(self, version: int) -> BatchReport:
        return BatchReport(batch=version - 1, loss_scale=self._loss_scale)

    def versions_of(self, stage: int) -> _OneVersion:
        """The weight versions that a stage uses."""
        return _OneVersion()

    def begin_evaluation(self) -> None:
        raise AssertionError("Megatron-LM evaluates")
