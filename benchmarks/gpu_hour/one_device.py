"""What the parts that train a GPT on one device share: sizes, the plain loops beside the engine, and rounds.

megatron.core has to be importable before this module is, so a part imports it in `run`, after `begin`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.common.tables import spread
from benchmarks.gpu import orders
from benchmarks.gpu_hour.process import free
from benchmarks.gpu_hour.result import Result, seconds_of
from benchmarks.gpu_ranks import CLIP_GRAD, Contender, chunk_with_optimizer, data, forward_step, timed
from megatron import backend
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

SIZES = {
    "small": {"layers": 4, "hidden_size": 512, "heads": 8, "seq_length": 512, "micro_batch_size": 2},
    "middle": {"layers": 8, "hidden_size": 1536, "heads": 12, "seq_length": 1024, "micro_batch_size": 4},
    "large": {"layers": 4, "hidden_size": 4096, "heads": 32, "seq_length": 1024, "micro_batch_size": 4},
}
"""Small layers, where the host shows, to large ones, where it must not."""
TINY = {
    "small": {"layers": 1, "hidden_size": 32, "heads": 2, "seq_length": 16, "micro_batch_size": 2},
    "large": {"layers": 2, "hidden_size": 64, "heads": 4, "seq_length": 16, "micro_batch_size": 2},
}
"""The sizes of a rehearsal."""


def sizes(result: Result) -> dict[str, dict]:
    """Name -> size of a GPT, from the smallest to the largest."""
    if result.content["rehearsal"]:
        return {name: {**size, "vocab_size": 64} for name, size in TINY.items()}
    return {name: {**size, "vocab_size": 8192} for name, size in SIZES.items()}


class Loop:
    """A plain torch loop over the module and the optimizer of the engine's stage, which waits for nothing.

    `delay`: 1: gradients are those at the weights before the newest, as under 2bw. `dtype`, `config`: as for
    `chunk_with_optimizer`.
    """

    def __init__(
        self, name: str, model: dict, *, delay: int = 0, dtype: torch.dtype = torch.bfloat16, **config: object
    ) -> None:
        self.name = name
        self.chunk, self.optimizer = chunk_with_optimizer(model, 1, dtype=dtype, **config)
        self.forward_step, self.data = forward_step(model, backend.device()), data(model, backend.device())
        self._model, self._recorded = model, []
        self._older = [each.detach().clone() for each in self.chunk.parameters()] if delay else None

    def run(self, num_microbatches: int) -> None:
        """Train one batch."""
        newest = self._show_older() if self._older else None
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._recorded.append(torch.stack(list(self.microbatches(num_microbatches))))
        self.step()
        self._older = newest

    def microbatches(self, num_microbatches: int) -> Iterator[Tensor]:
        """Run the forwards and backwards of a batch, and yield their losses."""
        for _ in range(num_microbatches):
            losses, loss_function = self.forward_step(self.data, self.chunk)
            loss, numbers = loss_function(losses)
            (loss / num_microbatches).backward()
            yield numbers["lm loss"]

    @torch.no_grad()
    def step(self) -> None:
        """Clip on the device, with the sums in the engine's order, and step."""
        self.optimizer.prepare_grads()
        gradients = [each.grad for each in self.optimizer.get_parameters()]
        norm = torch.stack(torch._foreach_norm(gradients)).double().square().sum().sqrt()
        torch._foreach_mul_(gradients, (CLIP_GRAD / (norm + 1e-6)).clamp(max=1.0).float())
        self.optimizer.step_with_ready_grads()

    def finish(self) -> None:
        """Nothing is in flight between batches."""

    def close(self) -> None:
        """There are no threads."""

    @property
    def losses(self) -> list[float]:
        """The losses of all batches. Waits for the device."""
        return [each.double().mean().item() for each in self._recorded]

    @torch.no_grad()
    def _show_older(self) -> list[Tensor]:
        """Put the older weights into the parameters. The optimizer has masters of the newest, which are returned."""
        newest = [each.detach().clone() for each in self.chunk.parameters()]
        torch._foreach_copy_(list(self.chunk.parameters()), self._older)
        return newest


class MegatronCore(Loop):
    """The same with megatron.core's schedule, as Megatron-LM's training step calls it."""

    def __init__(self, name: str, model: dict, **config: object) -> None:
        super().__init__(name, model, **config)
        self.chunk.config.finalize_model_grads_func = finalize_model_grads

    def microbatches(self, num_microbatches: int) -> Iterator[Tensor]:
        """Run the forwards and backwards of a batch, and yield their losses."""
        numbers = forward_backward_no_pipelining(
            forward_step_func=self.forward_step, data_iterator=self.data, model=[self.chunk],
            num_microbatches=num_microbatches, seq_length=self._model["seq_length"],
            micro_batch_size=self._model["micro_batch_size"],
        )  # fmt: skip
        yield from (each["lm loss"] for each in numbers)

    def step(self) -> None:
        """Clip and step by megatron.core, which without Apex and Transformer Engine waits for each parameter's norm."""
        self.optimizer.step()


def engine(name: str, model: dict) -> Contender:
    """This project's engine with the schedule `name`."""
    return Contender(name, model, backend_name=backend.process_group_backend(), device=backend.device())


def flops_per_token(model: dict) -> float:
    """The operations of forward and backward, as `flops_per_sample` of megatron/trainer/report/metrics.py counts."""
    layers, width = model["layers"], model["hidden_size"]
    weights = 12 * layers * width**2 + width * model["vocab_size"]
    return 6.0 * (weights + 2 * layers * model["seq_length"] * width)


def product_rate(result: Result) -> list[float]:
    """Operations a second of a product of square matrices in BF16, which this process reaches."""
    size, count = (64, 2) if result.content["rehearsal"] else (8192, 10)
    first, second = (torch.randn(size, size, device=backend.device(), dtype=torch.bfloat16) for _ in range(2))
    return [2 * size**3 / each for each in seconds_of(lambda: first @ second, repeats=5, count=count)]


def product_shapes(model: dict) -> list[tuple[int, int]]:
    """The (rows, columns) of the weights of a layer's four products."""
    width = model["hidden_size"]
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]


def extent(result: Result, **full: int) -> dict[str, int]:
    """The numbers of rounds and of what is in one; in a rehearsal two rounds of one each."""
    return {name: 2 if name == "rounds" else 1 for name in full} if result.content["rehearsal"] else full


def num_microbatches(result: Result) -> int:
    """The microbatches of a batch."""
    return 2 if result.content["rehearsal"] else 8


def trained(contenders: Mapping[str, object], num_microbatches: int, *, rounds: int, batches: int) -> dict:
    """Name -> the seconds of a batch in each round; the contenders take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for order in orders([*contenders], rounds):
        for name in order:
            seconds[name].append(timed(contenders[name], num_microbatches, batches))
    return seconds


def alternated(calls: Mapping[str, Callable[[], object]], *, rounds: int, count: int) -> dict[str, list[float]]:
    """Name -> the seconds of a call in each round; the calls take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for order in orders([*calls], rounds):
        for name in order:
            seconds[name] += seconds_of(calls[name], repeats=1, count=count)
    return seconds


def ratios(seconds: Mapping[str, list[float]], name: str, other: str) -> list[float]:
    """The seconds of `name` over those of `other`, round by round."""
    return [a / b for a, b in zip(seconds[name], seconds[other], strict=True)]


def shown(times: Mapping[str, Iterable[float]], digits: int, scale: float = 1.0) -> str:
    """Each name with its median, least and greatest value."""
    return ", ".join(f"{name} {spread([scale * each for each in values], digits)}" for name, values in times.items())


@contextmanager
def may_not_fit(result: Result, what: str) -> Iterator[None]:
    """A block that may run out of the device's memory. Then that is said, its memory is freed, and the part goes on."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        result.add(f"{what}: out of memory, so there are no figures ({first_sentence(error)})")
    free()


def first_sentence(error: Exception) -> str:
    """What an error of torch says, without its long explanations."""
    return str(error).splitlines()[0].split(". ")[0]
