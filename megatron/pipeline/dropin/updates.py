"""What is left of Megatron-LM's training step under our schedules: the user's forward step, and who makes the update.

Under schedules that drain with every batch the update is Megatron-LM's own, behind the program's STEP. A batch's
program ends with all backwards done and nothing in flight. There the rank stands where Megatron-LM's own schedule
stands before it finishes the gradients, so that is called, and the rest of its training step follows: the norm, the
step, the learning rate. The program's reductions and its STEP have nothing to do.

Under 2bw the update is the engine's. Megatron-LM's step of a batch zeroes gradients, runs the batch, steps the
optimizer and the learning rate; under 2bw the last batch's step is made while this one runs, so the engine makes it,
and the four calls are answered for it: the objects that Megatron-LM holds keep their methods for the engine, and say to
everybody else what the engine's newest report says. So the gradient's norm, whether a batch was skipped and the
learning rate come one iteration late; losses do not, for the last stage has run all forwards of a batch when its
segment ends.
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
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule

# --- the user's forward step ------------------------------------------------------------------------------------------

UserForwardStep = Callable[..., tuple[Any, Callable[..., tuple]]]

_set_current_microbatch = getattr(schedules, "set_current_microbatch", None)  # not in all versions


class ForwardStep:
    """One stage's. A batch's microbatches come in their order, so their losses are the list that Megatron-LM returns.

    Args:
        model: the chunk, as Megatron-LM wraps it.
        chunk: its number among those of the rank; None where the rank has one.
        is_last: its losses count.
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
        """Prepare for the forwards of the next batch, by the user's function."""
        self._user, self._count, self.losses, self.num_tokens = user, 0, [], 0

    def let_go(self) -> None:
        """Drop the user's function; no batch follows."""
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
        """In this block the engine calls the methods, which are the original ones."""
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
    """Use the groups that Megatron-LM's loop uses between batches, while nothing else runs (see `reduction.py`)."""
    number = torch.zeros(2, device=backend.device())
    torch.distributed.all_reduce(number, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    torch.distributed.all_reduce(number, group=parallel_state.get_pipeline_model_parallel_group())
    torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
    streams = streams_of(backend.device())
    streams.finish(streams.record())


# --- Megatron-LM's update ---------------------------------------------------------------------------------------------


class _OneVersion:
    """The weights are what the parameters show."""

    def load(self, version: int) -> None:
        pass


class MegatronUpdate:
    """`WeightUpdate` that leaves the update to Megatron-LM.

    Args:
        chunks: the rank's, as Megatron-LM wraps them.
        config: the model's, with the scaling of losses and the function that finishes gradients.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], config: TransformerConfig) -> None:
        self._chunks = list(chunks)
        self._config = config
        self._loss_scale = 1.0  # of the one batch that runs

    def finish_batch(self, forward_steps: Sequence[ForwardStep], call: Mapping[str, Any]) -> None:
        """Finish the gradients of a batch that is drained, as Megatron-LM's schedules do at their end.

        `call`: the arguments of the schedule.
        """
        finish = self._config.finalize_model_grads_func
        if finish is None:
            return
        further = {name: call[name] for name in ("pg_collection", "force_all_reduce") if call.get(name)}
        finish(self._chunks, self._num_tokens(forward_steps), **further)

    def _num_tokens(self, forward_steps: Sequence[ForwardStep]) -> torch.Tensor | None:
        """Tokens of the batch on this rank; None where losses count by microbatch."""
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

    def begin_backward(self, info: BatchInfo) -> None:
        pass

    def resume_backward(self, info: BatchInfo) -> None:
        pass

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        pass

    def step(self, version: int) -> BatchReport:
        return BatchReport(batch=version - 1, loss_scale=self._loss_scale)

    def versions_of(self, stage: int) -> _OneVersion:
        """The weight versions that a stage uses."""
        return _OneVersion()

    # In the programs of files: Megatron-LM reduces.

    def reduce_grad(self, version: int, stage: int) -> None:
        pass

    def reduce_embed(self, version: int) -> None:
        pass

    def begin_evaluation(self) -> None:
        raise AssertionError("Megatron-LM evaluates")

    def show_newest(self) -> None:
        pass
