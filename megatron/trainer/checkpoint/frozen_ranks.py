"""The optimizer's entry of a rank that has nothing to train, in checkpoints.

What is not sharded (learning rates, step counters, the loss scaler) is the same on all ranks, and megatron.core writes
rank 0's. Where the layers of rank 0 are frozen its optimizer has stepped nothing and knows no counter, so it takes over
what the last rank says, which trains the last layer always.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron.core.dist_checkpointing import optimizer as core
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedStateDict
from megatron.core.optimizer import MegatronOptimizer
from megatron.pipeline.runtime.failure.agreement import control_group

_LOCAL = (ShardedBase, LocalNonpersistentObject)


def with_common_state(entry: ShardedStateDict, *, is_frozen: bool) -> ShardedStateDict:
    """`entry`, on a rank that is frozen with the last rank's common state in it. Collective over the job."""
    source = dist.get_world_size() - 1
    message = [_common(entry) if dist.get_rank() == source else None]
    dist.broadcast_object_list(message, src=source, group=control_group())
    return _completed(entry, message[0]) if is_frozen else entry


def _common(value: object) -> object:
    """The parts of a nested value that are no rank's own."""
    if isinstance(value, dict):
        return {key: _common(each) for key, each in value.items() if not _is_own(each)}
    if isinstance(value, list):
        return [_common(each) for each in value if not _is_own(each)]
    return value


def _is_own(value: object) -> bool:
    """Whether there is nothing in it but what is the rank's own."""
    if isinstance(value, (dict, list)) and value:
        return all(map(_is_own, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _LOCAL)


def _completed(own: object, common: object) -> object:
    """`common`, with what is the rank's own of `own`."""
    if isinstance(own, dict) and isinstance(common, dict):
        kept = {key: _completed(each, common.get(key)) for key, each in own.items() if _has_own(each)}
        return {**common, **kept}
    if isinstance(own, list) and isinstance(common, list) and len(own) == len(common):
        return [_completed(each, other) for each, other in zip(own, common, strict=True)]
    return own if isinstance(own, _LOCAL) else common


def _has_own(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_own, value.values()))
    if isinstance(value, list):
        return any(map(_has_own, value))
    return isinstance(value, _LOCAL)


def trains_nothing(optimizer: MegatronOptimizer) -> bool:
    """Whether no parameter is the optimizer's, as on a rank whose layers are all frozen."""
    return not any(group["params"] for group in optimizer.param_groups)


def with_what_is_empty(loaded: dict, optimizer: MegatronOptimizer) -> dict:
    """State loaded for an optimizer that trains nothing, with the empty lists and tables that stores leave out."""
    return _over(optimizer.state_dict(), loaded)


def _over(own: object, loaded: object) -> object:
    """`loaded`, and of `own` what it lacks."""
    if isinstance(own, dict) and isinstance(loaded, dict):
        return {**own, **{key: _over(own.get(key), value) for key, value in loaded.items()}}
    if isinstance(own, list) and isinstance(loaded, list) and len(own) == len(loaded):
        return [_over(mine, value) for mine, value in zip(own, loaded, strict=True)]
    return loaded


@contextmanager
def nothing_to_map() -> Iterator[None]:
    """In this block megatron.core does not warn that an optimizer has none of the model's parameters."""

    def says_else(record: logging.LogRecord) -> bool:
        return "mapping is empty" not in record.getMessage()

    core.logger.addFilter(says_else)
    try:
        yield
    finally:
        core.logger.removeFilter(says_else)
