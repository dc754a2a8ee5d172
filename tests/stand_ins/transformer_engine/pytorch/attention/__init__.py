"""Attention over whole sequences, [sequence, batch, heads, channels], packed ones, [tokens, heads, channels], and parts
of sequences: with `cp_group` a rank of c has chunks r and 2c - 1 - r of 2c, and every exchange is a gather here."""

import contextlib
import math

import torch
from torch import Tensor

from ..._release import pinned
from ..distributed import gather_first_dimension, scatter_sum_first_dimension
from . import rope

__all__ = ["DotProductAttention", "rope"]

_MASKED = -10000.0


class DotProductAttention(torch.nn.Module):
    @pinned
    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, attn_mask_type="causal",
        sequence_parallel=False, tp_size=1, get_rng_state_tracker=None, tp_group=None, layer_number=None,
        attention_type="self", softmax_scale=None, cp_group=None, cp_global_ranks=None, cp_stream=None,
        cp_comm_type="p2p", window_size=None,
    ):  # fmt: skip
        super().__init__()
        self.window_size = window_size  # (places before a token that it sees, places behind it)
        self.cp_group = cp_group
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = 1.0 / math.sqrt(channels) if softmax_scale is None else softmax_scale
        self.attn_mask_type = attn_mask_type
        self.attention_dropout = attention_dropout
        draws_alike = sequence_parallel or get_rng_state_tracker is None
        self._random_numbers = contextlib.nullcontext if draws_alike else lambda: get_rng_state_tracker().fork()

    @pinned
    def forward(
        self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None, cu_seqlens_q=None,
        cu_seqlens_kv=None, max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type=None,
    ) -> Tensor:  # fmt: skip
        if qkv_format == "thd":
            lengths = _lengths(query_layer, cu_seqlens_q, max_seqlen_q)
            if lengths != _lengths(key_layer, cu_seqlens_kv, max_seqlen_kv) or attn_mask_type != "padding_causal":
                raise NotImplementedError(f"the stand-in's packed attention has no {attn_mask_type} of two lengths")
            parts = zip(*(each.split(lengths) for each in (query_layer, key_layer, value_layer)), strict=True)
            return torch.cat([self._attend(*(each[:, None] for each in part), None, "causal")[:, 0] for part in parts])
        if qkv_format is not None or cu_seqlens_q is not None:
            raise NotImplementedError(f"the stand-in's attention has no cu_seqlens in the format {qkv_format}")
        return self._attend(query_layer, key_layer, value_layer, attention_mask, attn_mask_type or self.attn_mask_type)

    def _attend(self, query_layer, key_layer, value_layer, attention_mask, attn_mask_type) -> Tensor:
        if self.cp_group is not None:
            if attn_mask_type != "causal" or self.window_size is not None:
                raise NotImplementedError(f"the stand-in's attention has no parts of sequences with {attn_mask_type}")
            places = _places(len(query_layer), self.cp_group.size())
            key_layer, value_layer = (_Whole.apply(each, places, self.cp_group) for each in (key_layer, value_layer))
            own = places[self.cp_group.rank()]
            attention_mask, attn_mask_type = torch.arange(len(key_layer)) > own[:, None], "arbitrary"
        sequence, batch, heads, _ = query_layer.shape
        repeats = heads // key_layer.shape[2]
        if repeats > 1:
            key_layer = key_layer.repeat_interleave(repeats, dim=2)
            value_layer = value_layer.repeat_interleave(repeats, dim=2)
        query, key, value = (each.flatten(1, 2).transpose(0, 1) for each in (query_layer, key_layer, value_layer))
        scores = query.new_empty(query.shape[0], sequence, key.shape[1])
        scores = torch.baddbmm(scores, query, key.transpose(1, 2), beta=0.0, alpha=self.softmax_scale)
        scores = scores.unflatten(0, (batch, heads))
        mask = self._mask(attn_mask_type, attention_mask, scores)
        if mask is not None:
            scores = scores.masked_fill(mask, _MASKED)
        weights = torch.softmax(scores.float(), dim=-1).to(value.dtype)
        with self._random_numbers():
            weights = torch.nn.functional.dropout(weights, self.attention_dropout, self.training)
        result = torch.bmm(weights.flatten(0, 1), value)
        return result.transpose(0, 1).reshape(sequence, batch, -1)

    def _mask(self, kind: str, mask: Tensor | None, scores: Tensor) -> Tensor | None:
        """What a token does not see: true, [.., queries, keys]."""
        if self.window_size is not None and (kind, self.window_size[1]) == ("causal", 0):
            own = torch.ones(scores.shape[-2:], dtype=torch.bool)
            return own.triu(1) | own.tril(-self.window_size[0] - 1)
        if self.window_size is not None:
            raise NotImplementedError(f"the stand-in's attention has no window {self.window_size} of a mask {kind}")
        if kind == "no_mask":
            return None
        if kind == "causal":
            return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if kind in ("padding", "arbitrary") and mask is not None:  # of padding [batch, 1, 1, keys]
            return mask
        raise NotImplementedError(f"the stand-in's attention has no mask {kind} where the mask is {mask}")


def _places(length: int, size: int) -> Tensor:
    """The places in the sequence of the tokens of each rank, [ranks, tokens]."""
    chunks = torch.arange(size * length).view(2 * size, -1)
    return torch.cat([chunks[:size], chunks[size:].flip(0)], dim=1)


class _Whole(torch.autograd.Function):
    """The parts of all ranks in the order of the sequence; its backward sums what the ranks' queries made of a part."""

    @staticmethod
    def forward(ctx, part: Tensor, places: Tensor, group) -> Tensor:
        ctx.places, ctx.group = places.flatten(), group
        return gather_first_dimension(part, group)[ctx.places.argsort()]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return scatter_sum_first_dimension(grad[ctx.places], ctx.group), None, None


def _lengths(tokens: Tensor, cu_seqlens: Tensor | None, longest: int | None) -> list[int]:
    """The lengths of packed sequences, which fill `tokens`, [tokens, heads, channels]. This asserts what Transformer
    Engine does, and raises where its kernels would read beyond or give too few results."""
    assert tokens.dim() == 3, "Queries, keys and values must be 3D tensors when qkv_format = thd!"
    assert cu_seqlens is not None and cu_seqlens.dim() == 1 and cu_seqlens.dtype == torch.int32, "cu_seqlens is int32"
    lengths = cu_seqlens.diff().tolist()
    if sum(lengths) != len(tokens) or longest is None or longest < max(lengths):
        raise ValueError(f"sequences of {lengths} tokens, at most {longest}, do not fill {len(tokens)}")
    return lengths
