"""The update under schedules that drain with every batch: Megatron-LM's own, behind the program's STEP.

A batch's program ends with all backwards done and nothing in flight. There the rank stands where Megatron-LM's own
schedule stands before it finishes the gradients, so that is called, and the rest of its training step follows: the
norm, the step, the learning rate. The program's reductions and its STEP have nothing to do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron import backend
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.pipeline.dropin.forward_step import ForwardStep
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport


class _OneVersion:
    """The weights are what the parameters show."""

    def load(self, version: int) -> None:
        pass


class TheirUpdate:
    """`WeightUpdate` that leaves the update to Megatron-LM.

    Args:
        chunks: the rank's, as Megatron-LM wraps them.
        config: the model's, which says how losses are scaled and what finishes gradients.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], config: TransformerConfig) -> None:
        self._chunks = list(chunks)
        self._config = config
        self._loss_scale = 1.0  # of the one batch that runs

    def finish_batch(self, forward_steps: Sequence[ForwardStep], call: Mapping[str, Any]) -> None:
        """Finish the gradients of a batch that is drained, as Megatron-LM's schedules do at their end.

        `call`: what the schedule was called with.
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
        """What a stage asks for its weights."""
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
