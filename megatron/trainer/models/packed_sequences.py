"""Sequences of several documents, one after the other: their attention masks and the positions of their tokens.

Problem: a document must neither attend to earlier documents nor continue their positions, on every stage of a pipeline,
in layers of Transformer Engine and in local layers; and local attention does not take such sequences.

Solution: megatron.core's `PackedSeqParams` say where documents begin. With them its rotary embeddings start anew at
each document, for both kinds of layers, and Transformer Engine's attention keeps documents apart. Local attention gets
a mask from the same document borders and the window, made once for all layers of a stage. Between stages, tensors are
[s, 1, h] as usual.
"""

from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from megatron import backend
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.trainer.models.context_parallel import mixed_into_attention


class PackedSequence(PackedSeqParams):
    """The documents of one sequence."""

    @cached_property
    def _masks(self) -> dict[int | None, Tensor]:
        lengths = self.cu_seqlens_q.diff()
        document = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        others = document[:, None] != document[None, :]
        return {None: (others | torch.ones_like(others).triu(1))[None, None]}

    def mask(self, before: int | None) -> Tensor:
        """The attention mask: bool [1, 1, s, s], True where a query does not attend to a token.

        These are later tokens, tokens of other documents, and tokens more than `before` places before the query.
        """
        if before not in self._masks:
            whole = self._masks[None]
            self._masks[before] = whole | torch.ones_like(whole).tril(-before - 1)
        return self._masks[before]


def packed_sequence(cu_seqlens: Tensor) -> PackedSequence:
    """The documents of a microbatch of one sequence of s tokens.

    Args:
        cu_seqlens: int32 [1, s + 1]: the first token of each document, ascending from 0, padded with s.
    """
    [borders] = cu_seqlens.tolist()
    # The exact length: with s, megatron.core would use the rotary positions of the whole sequence for each document.
    longest = max(end - begin for begin, end in pairwise(borders))
    own = cu_seqlens[0, : borders.index(borders[-1]) + 1].to(backend.device(), non_blocking=True)
    return PackedSequence(
        qkv_format="thd", cu_seqlens_q=own, cu_seqlens_kv=own, max_seqlen_q=longest, max_seqlen_kv=longest
    )


class _Packed:
    """A mixin for an attention over whole sequences, with megatron.core's signatures."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        softmax = self.scale_mask_softmax
        window, softmax.window_size = softmax.window_size, None  # megatron.core's window would replace the mask
        self._before = None if window is None else window[0]

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        """Compute the attention, as the wrapped class does; the tensors are [s, heads, width]."""
        query, key, value = (each.unsqueeze(1) for each in (query, key, value))
        return super().forward(query, key, value, packed_seq_params.mask(self._before), attn_mask_type, attention_bias)


def taking_packed_sequences(spec: ModuleSpec) -> ModuleSpec:
    """The specification of a layer whose attention keeps the documents of a sequence apart."""
    return mixed_into_attention(spec, _Packed)
