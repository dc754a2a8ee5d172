"""Tensors that a rank holds twice: a tied embedding whose two stages lie on it, and its optimizer state.

Problem: where replicas share the writing of a checkpoint, megatron.core chooses a rank for each part of a tensor, and a
rank that has a part twice would write it twice, which it then refuses. Where they share the reading, it fills both
places with one and the same tensor, and an optimizer would update its state twice.

Solution: each part is handed over once, and what is read gets a tensor for each place.
"""

import torch

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, StateDict
from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id


def without_copies(state: ShardedStateDict) -> ShardedStateDict:
    """`state` with each part of a tensor once: the copy that is written where nobody chooses."""
    kept: dict[tuple, ShardedTensor] = {}
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            part = _sharded_tensor_shard_id(value)
            if part not in kept or value.replica_id < kept[part].replica_id:
                kept[part] = value
    once, _ = extract_matching_values(
        state,
        lambda value: not isinstance(value, ShardedTensor) or kept[_sharded_tensor_shard_id(value)] is value,
    )
    return once


def with_copies(state: StateDict) -> StateDict:
    """`state`, as loaded, with a tensor of its own in each place. In place."""
    seen: set[int] = set()

    def own(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in seen:
            return value.detach().clone()
        seen.add(id(value))
        return value

    return dict_list_map_inplace(own, state)
