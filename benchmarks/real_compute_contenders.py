"""The contenders of `real_compute.py`, each of which trains the same two-stage model, one global batch in each call.

`Contender.run(num_microbatches)` runs one batch with its optimizer step, as a training loop would call it. `finish()`
drains a contender after a round, and is not timed.
"""

import abc
import itertools
import time
from collections.abc import Callable, Collection, Iterator

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.common.gpt import (
    Data,
    Model,
    adamw,
    apply,
    chunk_with_optimizer,
    forward_step,
    gpt_chunk,
    is_last_stage,
    microbatch,
)
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor
from megatron.core.utils import get_attr_wrapped_model
from megatron.pipeline import Pipeline
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate
from megatron.pipeline.schedules import Schedule


class Contender(abc.ABC):
    """A way to train the model. `losses`: on the last stage, the mean losses of all reported batches."""

    name: str

    def __init__(self, model: Model) -> None:
        self.model = model
        self.losses: list[float] = []

    def data(self) -> Iterator[Data]:
        """An endless iterator over 64 microbatches, made in advance and equal for every contender."""
        return itertools.cycle([microbatch(self.model, index) for index in range(64)])

    @abc.abstractmethod
    def run(self, num_microbatches: int) -> None: ...

    def finish(self) -> None:  # noqa: B027 - most are at rest after each batch
        pass


class StageAlone(Contender):
    """The limit: a stage's own forwards, backwards and step, at the same time as the other stage's, without
    communication.

    Inputs and output gradients are fixed. `step_seconds`: the seconds of each batch's step.
    """

    name = "limit"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._chunk, self._optimizer = chunk_with_optimizer(model)
        self._set_input = get_attr_wrapped_model(self._chunk, "set_input_tensor")
        self._data = self.data()
        shape = (model.seq_length, model.micro_batch_size, model.hidden_size)
        self._hidden = torch.randn(shape)
        self._output_grad = torch.randn(shape) * 1e-4
        self.step_seconds: list[float] = []

    def run(self, num_microbatches: int) -> None:
        self._chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        for _ in range(num_microbatches):
            if parallel_state.is_pipeline_first_stage():
                output = apply(self._chunk, self.model, next(self._data))
                deallocate_output_tensor(output, deallocate_pipeline_outputs=True)
                custom_backward(output, self._output_grad)
            else:
                self._set_input(self._hidden.clone().requires_grad_())
                (apply(self._chunk, self.model, next(self._data)).mean() / num_microbatches).backward()
        start = time.perf_counter()
        self._optimizer.prepare_grads()  # `step` would also take the norm over both stages, which is communication
        self._optimizer.step_with_ready_grads()
        self.step_seconds.append(time.perf_counter() - start)


class Engine(Contender):
    """This project's engine."""

    def __init__(self, model: Model, preset: str, *, predict: bool = False) -> None:
        super().__init__(model)
        self.name = f"{preset} provisional" if predict else preset
        rank = parallel_state.get_pipeline_model_parallel_rank()
        schedule = Schedule.preset(preset, num_stages=2, predict=predict)
        chunk, optimizer = chunk_with_optimizer(model)
        update = MegatronWeightUpdate([chunk], optimizer, weights=schedule.weights, num_stages=2, stage=rank)
        stage = MegatronStage(
            chunk,
            forward_step(model),
            update,
            seq_length=model.seq_length,
            micro_batch_size=model.micro_batch_size,
            data_iterator=self.data(),
        )
        self._engine = PipelineEngine(schedule, stage, update)

    def run(self, num_microbatches: int) -> None:
        self._take(self._engine.run_batch(num_microbatches, num_microbatches * self.model.micro_batch_size))

    def finish(self) -> None:
        self._take(self._engine.drain())

    def _take(self, reports: list) -> None:
        self.losses += [report.losses["lm loss"] for report in reports]


class MegatronCore(Contender):
    """megatron.core's forward_backward_pipelining_without_interleaving, as Megatron-LM's training step calls it."""

    name = "megatron.core 1F1B"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._chunk, self._optimizer = chunk_with_optimizer(model)
        self._data = self.data()

    def run(self, num_microbatches: int) -> None:
        self._chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        numbers = get_forward_backward_func()(
            forward_step_func=forward_step(self.model),
            data_iterator=self._data,
            model=[self._chunk],
            num_microbatches=num_microbatches,
            seq_length=self.model.seq_length,
            micro_batch_size=self.model.micro_batch_size,
        )
        self._optimizer.step()
        if numbers:
            self.losses.append(sum(number["lm loss"].item() for number in numbers) / num_microbatches)


class TorchPipelining(Contender):
    """torch.distributed.pipelining's GPipe or 1F1B, with torch's AdamW."""

    def __init__(self, model: Model, schedule_class: type[ScheduleGPipe] | type[Schedule1F1B]) -> None:
        super().__init__(model)
        self.name = "torch " + schedule_class.__name__.removeprefix("Schedule")
        self._module = _TorchStage(model)
        parameters = self._module.parameters()
        self._optimizer = adamw(model, parameters)
        self._data = self.data()
        self._schedule_class = schedule_class
        self._schedules: dict[int, ScheduleGPipe | Schedule1F1B] = {}

    def run(self, num_microbatches: int) -> None:
        if num_microbatches not in self._schedules:
            rank = parallel_state.get_pipeline_model_parallel_rank()
            stage = PipelineStage(self._module, rank, 2, torch.device("cpu"))
            self._schedules[num_microbatches] = self._schedule_class(
                stage, num_microbatches, loss_fn=lambda losses, target: losses.mean()
            )
        schedule = self._schedules[num_microbatches]
        self._optimizer.zero_grad()
        batch = list(itertools.islice(self._data, num_microbatches))
        if is_last_stage():
            labels = torch.cat([data.labels for data in batch])
            losses: list[torch.Tensor] = []
            schedule.step(labels=labels, target=labels, losses=losses, return_outputs=False)
            self.losses.append(torch.stack(losses).mean().item())
        else:
            schedule.step(torch.cat([data.tokens for data in batch]))
        self._optimizer.step()


class _TorchStage(torch.nn.Module):
    """The chunk in the form of torch.distributed.pipelining, which passes received tensors as arguments."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model
        self.gpt = gpt_chunk(model)

    def forward(self, received: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is None:
            return apply(self.gpt, self._model, Data(received, received))
        self.gpt.set_input_tensor(received)
        return apply(self.gpt, self._model, Data(labels, labels))


class Library(Contender):
    """`megatron.pipeline.Pipeline` over the same module as torch.distributed.pipelining, with torch's AdamW."""

    def __init__(self, model: Model, preset: str) -> None:
        super().__init__(model)
        self.name = f"library {preset}"
        self._module, self._preset, self._data = _LibraryStage(model), preset, self.data()
        parameters = list(self._module.parameters())
        self._optimizer = adamw(model, parameters)
        self._pipeline: Pipeline | None = None

    def run(self, num_microbatches: int) -> None:
        if self._pipeline is None or self._pipeline.num_microbatches != num_microbatches:
            if self._pipeline is not None:
                self._pipeline.close()
            self._pipeline = Pipeline(
                self._module,
                self._preset,
                num_microbatches,
                loss=self._module.loss,
                optimizer=lambda _: self._optimizer,
            )
        batch = list(itertools.islice(self._data, num_microbatches))
        tokens, labels = (torch.cat([getattr(data, name) for data in batch]) for name in ("tokens", "labels"))
        self._take([self._pipeline.step((tokens, labels))])

    def finish(self) -> None:
        self._take(self._pipeline.drain())

    def _take(self, reports: list) -> None:
        self.losses += [report.loss for report in reports if report is not None]


class _LibraryStage(_TorchStage):
    """The chunk in the form of `Pipeline`. The last stage returns its input, and `loss` runs the chunk, which computes
    the loss itself."""

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        return received if is_last_stage() else super().forward(received)

    def loss(self, received: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(received, labels).mean()


CONTENDERS: dict[str, Callable[[Model], Contender]] = {
    "limit": StageAlone,
    "2bw": lambda model: Engine(model, "2bw"),
    "2bw provisional": lambda model: Engine(model, "2bw", predict=True),
    "flush": lambda model: Engine(model, "flush"),
    "library 2bw": lambda model: Library(model, "2bw"),
    "library flush": lambda model: Library(model, "flush"),
    "megatron.core 1F1B": MegatronCore,
    "torch 1F1B": lambda model: TorchPipelining(model, Schedule1F1B),
    "torch GPipe": lambda model: TorchPipelining(model, ScheduleGPipe),
}
"""Name -> the function that makes the contender, in the order of the table."""


def contenders(model: Model, names: Collection[str]) -> list[Contender]:
    """Make the contenders with the given names. Collective: both ranks must call it, since engines connect to peers."""
    return [make(model) for name, make in CONTENDERS.items() if name in names]
