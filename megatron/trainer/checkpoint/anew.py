"""A run whose layers train again, of which some were frozen: what no rank has kept of them.

Problem: nobody holds the moments of layers that were frozen, nor, beside 16-bit weights, their FP32 masters, nor an
older version of their weights. And moments of zero beside a counter that goes on would make the first steps several
times too long, since Adam corrects them by that counter, of which checkpoints have one for all parameters.

Solution: the optimizer begins anew, for all layers: moments are zero, the counter is 0. Masters of what was trained
stay as they are; those of what was frozen are its weights, and so are its older versions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedStateDict, ShardedTensorFactory
from megatron.pipeline.runtime.stages.megatron.older_versions import OLDER_VERSIONS
from megatron.trainer.checkpoint.element_ranges import ElementRange
from megatron.trainer.checkpoint.optimizer_formats import master_of

_STATE = "optimizer.state."


def stays(key: str, holds_key: Callable[[str], bool]) -> bool:
    """Whether what is asked for under a key is not to be loaded: a moment, or a master or older version that is not
    held."""
    comes_from_weights = _weight_of(key) is not None
    return not holds_key(key) if comes_from_weights else key.startswith(_STATE)


@dataclass(frozen=True)
class Anew:
    """`from_weights`: (what is the weights, the weights that are to be loaded), both in place."""

    from_weights: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(
        cls, request: ShardedStateDict, model: dict[str, ShardedStateDict], holds_key: Callable[[str], bool]
    ) -> Anew:
        """Of what is asked for beside the model."""
        weights = {value.key: value.data.detach() for value in nested_values(model) if _is_tensor(value)}
        found = []
        for entry in (each for each in request if each not in model):
            for value in filter(_is_tensor, nested_values({entry: request[entry]})):
                name = _weight_of(value.key)
                if name is not None and any(stays(key, holds_key) for key in _keys(value)):
                    source = weights[name]
                    if isinstance(value, ElementRange):
                        source = source.reshape(-1)[value.first : value.first + value.data.numel()]
                    found.append((value.data.detach(), source))
        return cls(found)

    @torch.no_grad()
    def complete(self, loaded: dict) -> None:
        """The weights have been loaded: fill in what is theirs, and let the counter begin at 0."""
        for target, weights in self.from_weights:
            target.copy_(weights)
        _reset_counters(loaded.get("optimizer"))


def _is_tensor(value: object) -> bool:
    return isinstance(value, ShardedBase) and not isinstance(value, ShardedObject)


def _weight_of(key: str) -> str | None:
    """The key of the weight of which this is the FP32 master or an older version."""
    return master_of(key) or (key.partition(".")[2] if key.startswith(OLDER_VERSIONS) else None)


def _keys(value: ShardedBase) -> list[str]:
    """Those under which a store has it."""
    if isinstance(value, ElementRange):
        return [whole.key for _, whole in value.wholes]
    if isinstance(value, ShardedTensorFactory):
        return [each.key for each in nested_values(value.build())]
    return [value.key]


def _reset_counters(state: object) -> None:
    """Of each optimizer of a chain, where its kind has it: in its groups, or beside its moments."""
    if isinstance(state, dict):
        for name, value in state.items():
            if name in ("step", "common_step") and value is not None:
                state[name] = value * 0
            else:
                _reset_counters(value)
    elif isinstance(state, list):
        for each in state:
            _reset_counters(each)
