"""Attention over whole sequences, [sequence, batch, heads, channels]."""

import contextlib
import math

import torch
from torch import Tensor

from ..._release import pinned
from . import rope

__all__ = ["DotProductAttention", "rope"]

_MASKED = -10000.0


class DotProductAttention(torch.nn.Module):
    @pinned
    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, attn_mask_type="causal",
        sequence_parallel=False, tp_size=1, get_rng_state_tracker=None, tp_group=None, layer_number=None,
        attention_type="self", softmax_scale=None,
    ):  # fmt: skip
        super().__init__()
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = 1.0 / math.sqrt(channels) if softmax_scale is None else softmax_scale
        self.attn_mask_type = attn_mask_type
        self.attention_dropout = attention_dropout
        draws_alike = sequence_parallel or get_rng_state_tracker is None
        self._random_numbers = contextlib.nullcontext if draws_alike else lambda: get_rng_state_tracker().fork()

    @pinned
    def forward(self, query_layer, key_layer, value_layer, attention_mask=None, attn_mask_type=None) -> Tensor:
        sequence, batch, heads, _ = query_layer.shape
        repeats = heads // key_layer.shape[2]
        if repeats > 1:
            key_layer = key_layer.repeat_interleave(repeats, dim=2)
            value_layer = value_layer.repeat_interleave(repeats, dim=2)
        query, key, value = (each.flatten(1, 2).transpose(0, 1) for each in (query_layer, key_layer, value_layer))
        scores = query.new_empty(query.shape[0], sequence, key.shape[1])
        scores = torch.baddbmm(scores, query, key.transpose(1, 2), beta=0.0, alpha=self.softmax_scale)
        scores = scores.unflatten(0, (batch, heads))
        mask = self._mask(attn_mask_type or self.attn_mask_type, attention_mask, scores)
        if mask is not None:
            scores = scores.masked_fill(mask, _MASKED)
        weights = torch.softmax(scores.float(), dim=-1).to(value.dtype)
        with self._random_numbers():
            weights = torch.nn.functional.dropout(weights, self.attention_dropout, self.training)
        result = torch.bmm(weights.flatten(0, 1), value)
        return result.transpose(0, 1).reshape(sequence, batch, -1)

    @staticmethod
    def _mask(kind: str, mask: Tensor | None, scores: Tensor) -> Tensor | None:
        """What a token does not see: true, [.., queries, keys]."""
        if kind == "no_mask":
            return None
        if kind == "causal":
            return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if kind in ("padding", "arbitrary") and mask is not None:  # of padding [batch, 1, 1, keys]
            return mask
        raise NotImplementedError(f"the stand-in's attention has no mask {kind} where the mask is {mask}")
