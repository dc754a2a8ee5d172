"""The losses of a stage over megatron.core: the tensor from which a backward starts, and the reported numbers.

On the last stage `loss_func(output_tensor)` returns `(loss, numbers)`, or `(loss, num_tokens, numbers)` if the loss is
a sum over tokens. `numbers` is a dict of the values to report, each a scalar or a tensor `[sum, count]`. The loss of a
batch is the mean over its microbatches, or with `calculate_per_token_loss` in the configuration the mean over all of
its tokens. Each of the ranks that share a microbatch (context parallelism) returns its part of the loss, of the sum of
losses, and of the number of tokens.
"""

from collections import defaultdict

import torch
from torch import Tensor

from megatron import backend
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.pipeline.runtime.contract.stage import NUM_TOKENS, Microbatch


class StageLosses:
    """The losses of one stage. `names`: the numbers to report; others are ignored."""

    def __init__(self, config: TransformerConfig, names: tuple[str, ...]) -> None:
        self._per_token = config.calculate_per_token_loss
        self._names = {*names, NUM_TOKENS}
        self._recorded: dict[int, list[dict[str, Tensor]]] = defaultdict(list)  # by batch

    def parts(self, microbatch: Microbatch) -> int:
        """The divisor of the loss of a microbatch. With per-token loss it is 1, since gradients are divided later."""
        return 1 if self._per_token else microbatch.num_microbatches

    def to_differentiate(self, microbatch: Microbatch, outputs: tuple, *, record: bool) -> Tensor:
        """The loss from which a backward starts, for the outputs of the loss function.

        `record`: also record the numbers of the microbatch.
        """
        if len(outputs) == 3:
            loss, num_tokens, numbers = outputs
            if self._per_token:
                numbers = numbers | {NUM_TOKENS: num_tokens}
            else:
                loss = loss / _over_context(torch.as_tensor(num_tokens)).clamp(min=1)
        else:
            loss, numbers = outputs
        if record and parallel_state.get_tensor_model_parallel_rank() == 0:
            self.record(microbatch, {name: _pair(value) for name, value in numbers.items()})
        # Each context parallel rank has a part of a loss, and gradients are averaged over these ranks; with per-token
        # loss they are summed.
        shares = 1 if self._per_token else parallel_state.get_context_parallel_world_size()
        return loss / (self.parts(microbatch) / shares)

    def record(self, microbatch: Microbatch, pairs: dict[str, Tensor]) -> None:
        """Record numbers of a microbatch for the report of its batch: name -> [sum, count]."""
        if pairs := {name: pair for name, pair in pairs.items() if name in self._names}:
            self._recorded[microbatch.batch].append(pairs)

    def take(self, batch: int) -> dict[str, tuple[float, float]]:
        """Remove and return the sums of the reported numbers of a batch: name -> (sum, count), summed in float64."""
        records = self._recorded.pop(batch, [])
        sums = {}
        for name in {name: None for record in records for name in record}:
            pairs = torch.stack([record[name] for record in records if name in record])
            numerator, denominator = pairs.double().sum(dim=0).tolist()
            sums[name] = (numerator, denominator)
        return sums

    def drop(self, batch: int) -> None:
        """Forget the numbers of a batch, which begins again."""
        self._recorded.pop(batch, None)

    def clear(self) -> None:
        """Forget all numbers."""
        self._recorded.clear()


def _over_context(num_tokens: Tensor) -> Tensor:
    """The number of tokens on all ranks that share a microbatch."""
    group = parallel_state.get_context_parallel_group()
    if group.size() > 1:
        num_tokens = num_tokens.to(backend.device(), copy=True)
        torch.distributed.all_reduce(num_tokens, group=group)
    return num_tokens


def _pair(value: Tensor | float) -> Tensor:
    """The tensor [sum, count] of a reported number, FP32 and detached. A scalar has the count 1.

    Raises:
        ValueError: a tensor with more than two elements.
    """
    value = torch.as_tensor(value).detach().float().reshape(-1)
    if value.numel() == 1:
        return torch.cat([value, torch.ones_like(value)])
    if value.numel() != 2:
        raise ValueError(
            f"A loss function reported a tensor of {value.numel()} elements: report a scalar or a tensor [sum, count]."
        )
    return value.clone()
