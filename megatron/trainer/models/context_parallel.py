"""Attention of local layers with context parallelism, where ranks share the sequences of a microbatch.

Problem: megatron.core splits every sequence into 2c chunks (`get_batch_on_this_cp_rank`), and rank r of c has the
tokens of chunks r and 2c - 1 - r. A query attends to keys of all ranks. megatron.core's own attention takes whole
sequences; only Transformer Engine's takes such parts.

Solution: a class that wraps any attention over whole sequences. `EXCHANGES` has the ways in which its ranks exchange
data:

- `all_gather` gathers the keys and values of all ranks, in sequence order. A rank computes the scores of its own
  queries, with a mask by their positions in the sequence. The backward reduces the gradients of keys and values and
  scatters them. The number of heads does not matter (Llama 3, arXiv 2407.21783, section 3.3.2).
- `a2a` trades parts of sequences for heads, by an all-to-all before the attention and another one after it: a rank
  computes whole sequences for 1/c of its heads (DeepSpeed Ulysses, arXiv 2309.14509).

The exchanges run on the computing thread, and nothing hides them.
"""

import copy
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.tensor_parallel import all_to_all_hp2sp, all_to_all_sp2hp, gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec, get_module

# --- the order of the sequence ----------------------------------------------------------------------------------------


def in_order(tokens: Tensor, size: int) -> Tensor:
    """Reorder the rows [s, ...] of all ranks from rank order to sequence order."""
    chunks = tokens.unflatten(0, (size, 2, -1))
    return torch.cat([chunks[:, 0].flatten(0, 1), chunks[:, 1].flip(0).flatten(0, 1)])


def by_rank(tokens: Tensor, size: int) -> Tensor:
    """Reorder rows from sequence order to rank order: the inverse of `in_order`."""
    chunks = tokens.unflatten(0, (2, size, -1))
    return torch.stack([chunks[0], chunks[1].flip(0)], dim=1).flatten(0, 2)


@lru_cache(maxsize=16)
def mask_of_rank(length: int, rank: int, size: int, window: tuple[int, int] | None, device: torch.device) -> Tensor:
    """The mask of a rank's queries: bool [1, 1, length / size, length], True where a query does not attend to a key.

    These are later keys, and keys before the window. `window`: (keys before the query's own, keys after it), as in
    megatron.core.
    """
    before, behind = window or (length, 0)
    places = torch.arange(length, device=device)
    own = by_rank(places, size).chunk(size)[rank][:, None]
    return ((places > own + behind) | (places < own - before))[None, None]


# --- the exchanges between ranks --------------------------------------------------------------------------------------


class _Gathers:
    """The exchange `all_gather`."""

    def __init__(self, attention: nn.Module, *, group: torch.distributed.ProcessGroup, is_causal: bool) -> None:
        self._group, self._is_causal, softmax = group, is_causal, attention.scale_mask_softmax
        softmax.attn_mask_type = AttnMaskType.padding  # so that a kernel reads the mask
        self._window, softmax.window_size = softmax.window_size, None  # it would take the queries for a whole sequence

    def __call__(
        self, attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        size = self._group.size()
        key, value = (in_order(gather_from_sequence_parallel_region(each, group=self._group), size)
                      for each in (key, value))  # fmt: skip
        if mask is None and self._is_causal:
            mask = mask_of_rank(len(key), self._group.rank(), size, self._window, key.device)
        # A copy, since the queries may be a view of a tensor with this rank's keys, which would be kept for the
        # backward.
        return attend(query.contiguous(), key, value, mask)


class _SharesHeads:
    """The exchange `a2a`."""

    def __init__(self, attention: nn.Module, *, group: torch.distributed.ProcessGroup, is_causal: bool) -> None:
        self._group = group
        size = group.size()
        for name in (
            "num_attention_heads_per_partition", "num_query_groups_per_partition", "hidden_size_per_partition"
        ):  # fmt: skip
            whole = getattr(attention, name)
            if whole % size:
                raise ValueError(
                    f"--cp-comm-type a2a shares out heads over {size} ranks, and {name} is {whole}; use all_gather"
                )
            setattr(attention, name, whole // size)
        attention.scale_mask_softmax.register_forward_pre_hook(self._own_sinks)

    def _own_sinks(self, softmax: nn.Module, inputs: tuple) -> tuple:
        """The softmax's inputs with only the sinks of the heads that this rank computes."""
        *scores_and_mask, sinks = inputs
        own = None if sinks is None else sinks.chunk(self._group.size())[self._group.rank()]
        return *scores_and_mask, own

    def __call__(
        self, attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        size = self._group.size()
        if mask is not None and mask.size(2) > 1:  # the rows of this rank's queries
            rows = gather_from_sequence_parallel_region(mask.transpose(0, 2).contiguous(), group=self._group)
            mask = in_order(rows, size).transpose(0, 2)
        result = attend(*(self._heads_for_tokens(each) for each in (query, key, value)), mask)
        return self._tokens_for_heads(result)

    def _heads_for_tokens(self, tokens: Tensor) -> Tensor:
        """[s / c, b, heads, width] -> [s, b, heads / c, width]."""
        _, samples, _, width = tokens.shape
        whole = all_to_all_sp2hp(tokens.flatten(2), group=self._group)
        return in_order(whole.view(-1, samples, whole.shape[-1] // width, width), self._group.size())

    def _tokens_for_heads(self, tokens: Tensor) -> Tensor:
        """[s, b, width / c] -> [s / c, b, width]."""
        own = all_to_all_hp2sp(by_rank(tokens, self._group.size()), group=self._group)
        return own.unflatten(0, (-1, tokens.shape[1]))


EXCHANGES = {"all_gather": _Gathers, "a2a": _SharesHeads}
"""Value of `--cp-comm-type` -> exchange. Only Transformer Engine has megatron.core's default, `p2p`, a ring."""


# --- the attention ----------------------------------------------------------------------------------------------------


class _ContextParallel:
    """A mixin for an attention over whole sequences, with megatron.core's signatures."""

    def __init__(self, config, layer_number, attn_mask_type, *args, cp_comm_type=None, pg_collection=None, **options):
        group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
        size, config.context_parallel_size = config.context_parallel_size, 1  # megatron.core refuses more than 1
        try:
            super().__init__(config, layer_number, attn_mask_type, *args, pg_collection=pg_collection, **options)
        finally:
            config.context_parallel_size = size
        is_causal = attn_mask_type == AttnMaskType.causal
        self._exchange = EXCHANGES[cp_comm_type or "all_gather"](self, group=group, is_causal=is_causal)

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, **options):
        """Compute the attention, as the wrapped class does, on this rank's tokens.

        `attention_mask` has the rows of this rank's queries, with keys in sequence order.
        """

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return super(_ContextParallel, self).forward(query, key, value, mask, attn_mask_type, **options)

        return self._exchange(attend, query, key, value, attention_mask)


def sharing_sequences(spec: ModuleSpec) -> ModuleSpec:
    """The specification of a layer whose attention takes this rank's part of a sequence."""
    return mixed_into_attention(spec, _ContextParallel)


def mixed_into_attention(spec: ModuleSpec, mixin: type) -> ModuleSpec:
    """The specification of a layer with `mixin` as a base class before the class of its attention."""
    spec = copy.deepcopy(spec)
    parts = spec.submodules.self_attention.submodules
    whole = parts.core_attention
    kind = get_module(whole) if isinstance(whole, ModuleSpec) else whole
    wrapped = type(f"{mixin.__name__.removeprefix('_')}{kind.__name__}", (mixin, kind), {})
    parts.core_attention = ModuleSpec(wrapped, whole.params, whole.submodules) if kind is not whole else wrapped
    return spec
