"""Text generation with a GPT of megatron.core, one token at a time.

megatron.core's static inference context keeps the attention keys and values of earlier tokens, so a new token costs one
forward of length 1. The context holds as many tokens as the model has positions. When it is full, the later half of the
sequence is computed again in a new context, and the generation continues from there.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.inference.contexts import StaticInferenceContext

_COLDEST = 1e-6
"""The lowest temperature. A smaller divisor could make logits infinite, and would not change the chosen token."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The options for drawing the next token from the logits.

    Attributes:
        temperature: divisor of the logits; 0 takes the likeliest token (greedy).
        top_k: draw among the k likeliest tokens; 0 means all.
        top_p: draw among the fewest likeliest tokens whose probabilities add up to at least this value; 1 means all
            (Holtzman et al. 2020).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not _COLDEST <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature} must be 0 (greedy), or finite and at least {_COLDEST:g}")
        if self.top_k < 0:
            raise ValueError(f"top-k {self.top_k} must be 0 (all tokens) or greater")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p} must be greater than 0 and at most 1 (all tokens)")


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> int:
    """Draw a token id from logits (one dimension, any floating-point dtype; -inf excludes an id)."""
    logits = logits.float()
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.numel():
        least = torch.topk(logits, sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probabilities = torch.softmax(logits, dim=-1)
    if sampling.top_p < 1:
        ordered, indices = torch.sort(probabilities, descending=True, stable=True)
        before = torch.cumsum(ordered, dim=-1) - ordered
        probabilities = probabilities.index_fill(0, indices[before >= sampling.top_p], 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


class TextGenerator:
    """A generator of tokens with a whole GPTModel in evaluation mode, without pipeline or tensor parallelism.

    Args:
        num_positions: largest number of tokens of a sequence.
        vocab_size: number of token ids; higher ids are padding of the embedding and are never drawn.
    """

    def __init__(self, model: torch.nn.Module, *, num_positions: int, vocab_size: int, device: torch.device) -> None:
        if num_positions < 2:
            raise ValueError(f"the model knows {num_positions} positions; generation needs at least 2")
        self._model = model.eval()
        self._num_positions, self._vocab_size, self._device = num_positions, vocab_size, device
        self._new_context()

    def stream(self, prompt: Sequence[int], num_tokens: int, sampling: Sampling, *, seed: int = 0) -> Iterator[int]:
        """Yield `num_tokens` ids that continue `prompt`, each as soon as it is drawn.

        Raises ValueError for an empty prompt, for ids outside the vocabulary, and for a prompt with more ids than the
        model has positions.
        """
        self._check(prompt)
        generator = torch.Generator().manual_seed(seed)
        sequence, fresh = list(prompt), list(prompt)
        self._new_context()
        for _ in range(num_tokens):
            if self._context.sequence_len_offset + len(fresh) > self._num_positions:
                fresh = sequence[-(self._num_positions // 2) :]
                self._new_context()
            token = sample(self._next_logits(fresh), sampling, generator)
            sequence.append(token)
            fresh = [token]
            yield token

    def _check(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise ValueError("the prompt has no tokens, and there is no end-of-document token to start from")
        if len(prompt) > self._num_positions:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, but the model knows {self._num_positions} positions; shorten it"
            )
        for token in prompt:
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"the prompt holds token id {token}, beyond the vocabulary of {self._vocab_size}")

    def _new_context(self) -> None:
        self._context = StaticInferenceContext(1, self._num_positions)

    @torch.no_grad()
    def _next_logits(self, tokens: list[int]) -> Tensor:
        """The logits of the next token, float32 [vocabulary] on the CPU; `tokens` are appended to the context."""
        start, length = self._context.sequence_len_offset, len(tokens)
        ids = torch.tensor([tokens], device=self._device)
        positions = torch.arange(start, start + length, device=self._device).unsqueeze(0)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=self._device).triu(1) if start == 0 else None
        logits = self._model(ids, positions, mask, inference_context=self._context, runtime_gather_output=True)
        self._context.sequence_len_offset += length
        self._context.enable_decode_mode()
        return logits[0, -1, : self._vocab_size].float().cpu()
