"""The user's forward step, as Megatron-LM calls it: what is done around a microbatch, and the losses that go back."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

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
        """The next batch's forwards follow, by the user's function."""
        self._user, self._count, self.losses, self.num_tokens = user, 0, [], 0

    def let_go(self) -> None:
        """No batch follows."""
        self._user, self.losses = None, []

    def __call__(self, data: Iterator | None, model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple]]:
        """As megatron.core's schedules call it."""
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
