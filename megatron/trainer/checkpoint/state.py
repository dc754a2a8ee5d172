"""What a checkpoint holds, as the sharded state dict that megatron.core writes and reads.

The entries and keys are those of Megatron-LM's torch_dist format, so weights written by either program load in the
other: 'args', 'checkpoint_version', 'iteration', 'model', 'optimizer', 'opt_param_scheduler', 'rng_state',
'num_floating_point_operations_so_far'. Three entries are ours, and Megatron-LM ignores them:

- 'previous_version': under the 2bw policy two weight versions are alive between two batches, and the next batch still
  uses the older one. It is stored tensor by tensor like the model, every key prefixed with 'previous_version.'.
  Policies with longer delays have more of them (see
  `megatron.pipeline.runtime.stages.megatron.older_versions`).
- 'pipeline': what the weight update keeps beyond the optimizer (the table of loss scales).
- 'changes': what has become of the pipeline where it changes while it trains: frozen layers, ranks, what decided.
"""

import argparse
import contextlib
from collections.abc import Callable, Sequence

import torch

from megatron.backend.fixes import complete_optimizer_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from megatron.trainer.checkpoint.element_ranges import ELEMENT_RANGES, ranged_optimizer_state
from megatron.trainer.checkpoint.frozen_ranks import nothing_to_map, trains_nothing, with_common_state

FORMAT_VERSION = 3.0
_LAYERS_APART = "non_homogeneous_layers"
"""megatron.core's word for layers each under a key of its own, and not all under one that they share."""


def sharding_metadata(args: argparse.Namespace) -> dict:
    """How optimizer state is laid out. A new dict with every call, since megatron.core changes the one it is given."""
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if getattr(args, "changes", False):
        metadata[_LAYERS_APART] = (
            True  # some have an optimizer's state, some have none, and keys that they share need all
        )
    if getattr(args, "use_distributed_optimizer", False):
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return metadata


def loading_metadata(args: argparse.Namespace, saved: dict | None) -> dict:
    """How to ask for what was saved with the metadata `saved`; None where a checkpoint does not say."""
    metadata, saved = {**sharding_metadata(args), **(saved or {})}, saved or {}
    if not saved.get(_LAYERS_APART):
        metadata.pop(_LAYERS_APART, None)
    return metadata


def memory_metadata() -> dict:
    """The same for state that goes from rank to rank and never to a file: layers under keys of their own, so that each
    may have optimizer state or none, and the distributed optimizer's state as it lies."""
    return {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        _LAYERS_APART: True,
        "distrib_optim_sharding_type": ELEMENT_RANGES,
    }


def model_key(index: int, num_chunks: int) -> str:
    """Name of a chunk's entry: 'model', or 'model0', 'model1', ... where a rank holds several."""
    return "model" if num_chunks == 1 else f"model{index}"


def model_state(chunks: Sequence[torch.nn.Module], metadata: dict) -> dict[str, ShardedStateDict]:
    """Sharded weights of each chunk, under its entry's name. The data are the parameters themselves."""
    return {
        model_key(index, len(chunks)): unwrap_model(chunk).sharded_state_dict(metadata=dict(metadata))
        for index, chunk in enumerate(chunks)
    }


def new_parts(chunks: Sequence[torch.nn.Module], holds_prefix: Callable[[str], bool]) -> tuple[str, ...]:
    """Children of the chunks that a checkpoint of another head does not bring: `new_parts`, and of `optional_parts`
    those of which it has nothing."""
    found: list[str] = []
    for chunk in map(unwrap_model, chunks):
        found += getattr(chunk, "new_parts", ())
        found += [name for name in getattr(chunk, "optional_parts", ()) if not holds_prefix(f"{name}.")]
    return tuple(dict.fromkeys(found))


def without_parts(model: dict[str, ShardedStateDict], names: Sequence[str]) -> dict[str, ShardedStateDict]:
    """The entries of `model_state` without these children."""
    return {
        entry: {key: value for key, value in state.items() if key.split(".")[0] not in names}
        for entry, state in model.items()
    }


def optimizer_state(
    optimizer: MegatronOptimizer, model: dict[str, ShardedStateDict], metadata: dict, *, is_loading: bool
) -> ShardedStateDict:
    """Sharded optimizer state, in terms of the model's entries. Every state exists, also before the first update.

    Collective over the job where layers may be frozen.
    """
    complete_state(optimizer)
    is_frozen = trains_nothing(optimizer)
    with nothing_to_map() if is_frozen else contextlib.nullcontext():
        if metadata.get("distrib_optim_sharding_type") == ELEMENT_RANGES:
            entry = ranged_optimizer_state(optimizer, model, metadata, is_loading=is_loading)
        else:
            entry = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(metadata))
    if metadata.get(_LAYERS_APART) and not is_loading:
        entry = with_common_state(entry, is_frozen=is_frozen)
    return entry


def complete_state(optimizer: MegatronOptimizer) -> None:
    """Make what torch's optimizers make in their first step, so that saving and loading find the same tensors."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if inner.optimizer is not None:
            complete_optimizer_state(inner.optimizer)
