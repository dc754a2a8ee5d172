"""The content of a checkpoint, as the sharded state dict that megatron.core writes and reads.

The entries and keys are those of Megatron-LM's torch_dist format, so weights written by either program load in the
other: 'args', 'checkpoint_version', 'iteration', 'model', 'optimizer', 'opt_param_scheduler', 'rng_state',
'num_floating_point_operations_so_far'. Three entries belong to this project, and Megatron-LM ignores them:

- 'previous_version': under the 2bw policy two weight versions are alive between two batches, and the next batch still
  uses the older one. It is stored tensor by tensor like the model, with the prefix 'previous_version.' before every
  key. Policies with longer delays have more such versions (see
  `megatron.pipeline.runtime.stages.megatron.checkpointed_versions`).
- 'pipeline': the state of the weight update apart from the optimizer (the table of loss scales).
- 'changes': the history of a pipeline that changes during training: frozen layers, ranks, and the state of decisions.

Values that are not sharded (learning rates, step counters, the loss scaler) are the same on all ranks, and
megatron.core writes those of rank 0. If the layers of rank 0 are frozen, its optimizer has made no step and has no
counter, so rank 0 takes the values of the last rank, which always trains the last layer.

A rank may hold a tensor twice: a tied embedding whose two stages are on this rank, and the optimizer state of this
embedding. When replicas share the writing, megatron.core chooses a rank for each part of a tensor; a rank with two
copies would write the part twice, which megatron.core refuses. When replicas share the reading, megatron.core puts the
same tensor into both places, and an optimizer would update its state twice. So each part is written once, and after the
read each place gets its own tensor.
"""

import contextlib
import copy
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from megatron import backend
from megatron.backend.fixes import complete_optimizer_state, places_among_alike
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing import optimizer as core
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from megatron.pipeline.runtime.failure.agreement import control_group
from megatron.pipeline.runtime.stages.megatron.checkpointed_versions import of_own_replica
from megatron.pipeline.runtime.stages.megatron.optimizers import optimizers_of, owners
from megatron.trainer.arguments.flags.config import TrainConfig, cuts_optimizer_state
from megatron.trainer.checkpoint.optimizer_state import ELEMENT_RANGES, ranged_optimizer_state

# --- random number generators of a rank, in Megatron-LM's layout, so that either program can resume the other's runs --


def random_state() -> dict:
    """The state of all random generators of this process: Python, NumPy, torch, the device, tensor parallel dropout."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": backend.device_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore_random_state(states: list[dict]) -> None:
    """Set the random number generators of this process.

    `states`: a single state, or one for each data-parallel rank.
    """
    state = states[parallel_state.get_data_parallel_rank() if len(states) > 1 else 0]
    random.setstate(_tuples(state["random_rng_state"]))
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    backend.set_device_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def sharded_random_state() -> ShardedObject:
    """The random state as an object for each (pipeline, tensor) rank; data-parallel replicas share one."""
    pipeline_size, tensor_size = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    return ShardedObject(
        "rng_state",
        [random_state()],
        (pipeline_size, tensor_size),
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def own_random_state() -> ShardedObject:
    """The random state as one object for each rank of the job, which the same rank restores under other degrees."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return ShardedObject("rng_state", [random_state()], (size,), (rank,))


def _tuples(value: object) -> object:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


# --- a rank without trained layers ------------------------------------------------------------------------------------

_LOCAL = (ShardedBase, LocalNonpersistentObject)


def _with_common_state(entry: ShardedStateDict, *, is_frozen: bool) -> ShardedStateDict:
    """The optimizer's entry; on a frozen rank, with the common state of the last rank.

    Collective: every rank of the job must call it.
    """
    source = dist.get_world_size() - 1
    message = [_common(entry) if dist.get_rank() == source else None]
    dist.broadcast_object_list(message, src=source, group=control_group())
    return _completed(entry, message[0]) if is_frozen else entry


def _common(value: object) -> object:
    """The parts of a nested value that are the same on all ranks."""
    if isinstance(value, dict):
        return {key: _common(each) for key, each in value.items() if not _is_own(each)}
    if isinstance(value, list):
        return [_common(each) for each in value if not _is_own(each)]
    return value


def _is_own(value: object) -> bool:
    """Whether a nested value has only parts that belong to the rank: sharded and local objects."""
    if isinstance(value, (dict, list)) and value:
        return all(map(_is_own, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _LOCAL)


def _completed(own: object, common: object) -> object:
    """The nested value `common` with the rank's parts of `own` added."""
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
    """Whether an optimizer has no parameters, as on a rank whose layers are all frozen."""
    return not any(group["params"] for group in optimizer.param_groups)


def with_what_is_empty(loaded: dict, optimizer: MegatronOptimizer) -> dict:
    """The loaded state of an optimizer without parameters, with the empty lists and dicts that stores do not keep."""
    return _over(optimizer.state_dict(), loaded)


def _over(own: object, loaded: object) -> object:
    """The nested value `loaded` with the parts of `own` that it lacks."""
    if isinstance(own, dict) and isinstance(loaded, dict):
        return {**own, **{key: _over(own.get(key), value) for key, value in loaded.items()}}
    if isinstance(own, list) and isinstance(loaded, list) and len(own) == len(loaded):
        return [_over(mine, value) for mine, value in zip(own, loaded, strict=True)]
    return loaded


@contextmanager
def _nothing_to_map() -> Iterator[None]:
    """Suppress megatron.core's warning that an optimizer has none of the model's parameters, within a block."""

    def says_else(record: logging.LogRecord) -> bool:
        return "mapping is empty" not in record.getMessage()

    core.logger.addFilter(says_else)
    try:
        yield
    finally:
        core.logger.removeFilter(says_else)


# --- tensors that a rank holds twice ----------------------------------------------------------------------------------


def without_copies(state: ShardedStateDict) -> ShardedStateDict:
    """The sharded state with one copy of each part of a tensor: the copy with the lowest replica id."""
    kept: dict[tuple, ShardedTensor] = {}
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            part = _sharded_tensor_shard_id(value)
            if part not in kept or value.replica_id < kept[part].replica_id:
                kept[part] = value
    once, _ = extract_matching_values(
        state, lambda value: not isinstance(value, ShardedTensor) or kept[_sharded_tensor_shard_id(value)] is value
    )
    return once


def with_copies(state: StateDict) -> StateDict:
    """Clone tensors of a loaded state such that each place has its own. Changes and returns `state`."""
    seen: set[int] = set()

    def own(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in seen:
            return value.detach().clone()
        seen.add(id(value))
        return value

    return dict_list_map_inplace(own, state)


# --- the sharded state dict -------------------------------------------------------------------------------------------

FORMAT_VERSION = 3.0
_LAYERS_APART = "non_homogeneous_layers"
"""megatron.core's name for the option that gives each layer its own key, instead of one key for all layers."""


def sharding_metadata(args: TrainConfig) -> dict:
    """The metadata about the layout of optimizer state; a new dict for each call, since megatron.core changes it."""
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if getattr(args, "changes", False):
        metadata[_LAYERS_APART] = (
            True  # frozen layers have no optimizer state, and one key for all layers would need that of each
        )
    if cuts_optimizer_state(args):
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return metadata


def loading_metadata(args: TrainConfig, saved: dict | None) -> dict:
    """The metadata for loading a state that was saved with the metadata `saved` (None: the checkpoint has none)."""
    metadata, saved = {**sharding_metadata(args), **(saved or {})}, saved or {}
    if not saved.get(_LAYERS_APART):
        metadata.pop(_LAYERS_APART, None)
    return metadata


def memory_metadata() -> dict:
    """The metadata for state that moves from rank to rank in memory and is never written to a file.

    Each layer has its own key, so that a layer may lack optimizer state; the distributed optimizer's state keeps its
    layout.
    """
    return {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        _LAYERS_APART: True,
        "distrib_optim_sharding_type": ELEMENT_RANGES,
    }


def model_key(index: int, num_chunks: int) -> str:
    """The name of a chunk's entry: 'model', or 'model0', 'model1', ... if a rank has several chunks."""
    return "model" if num_chunks == 1 else f"model{index}"


def model_state(chunks: Sequence[torch.nn.Module], metadata: dict) -> dict[str, ShardedStateDict]:
    """Name of a chunk's entry -> its sharded weights. The data are the parameters themselves."""
    return {
        model_key(index, len(chunks)): unwrap_model(chunk).sharded_state_dict(metadata=dict(metadata))
        for index, chunk in enumerate(chunks)
    }


def new_parts(chunks: Sequence[torch.nn.Module], holds_prefix: Callable[[str], bool]) -> tuple[str, ...]:
    """The names of the chunks' children that are not loaded from a checkpoint with another head.

    These are all of a chunk's `new_parts`, and those of its `optional_parts` that the checkpoint lacks.
    """
    found: list[str] = []
    for chunk in map(unwrap_model, chunks):
        found += getattr(chunk, "new_parts", ())
        found += [name for name in getattr(chunk, "optional_parts", ()) if not holds_prefix(f"{name}.")]
    return tuple(dict.fromkeys(found))


def without_parts(model: dict[str, ShardedStateDict], names: Sequence[str]) -> dict[str, ShardedStateDict]:
    """The entries of `model_state` without the children `names`."""
    return {
        entry: {key: value for key, value in state.items() if key.split(".")[0] not in names}
        for entry, state in model.items()
    }


def optimizer_state(
    optimizer: MegatronOptimizer, model: dict[str, ShardedStateDict], metadata: dict, *, is_loading: bool
) -> ShardedStateDict:
    """The sharded optimizer state, with the sharding of the model's entries. It is complete even before the first step.

    Where replicas own whole parameters, the owner writes their state. Collective in a job whose layers may be frozen.
    """
    complete_state(optimizer)
    is_frozen = trains_nothing(optimizer)
    with _nothing_to_map() if is_frozen else contextlib.nullcontext():
        if metadata.get("distrib_optim_sharding_type") == ELEMENT_RANGES:
            entry = ranged_optimizer_state(optimizer, model, metadata, is_loading=is_loading)
        else:
            entry = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(metadata))
    entry = without_empty_groups(entry)
    if owners(optimizer) is not None:
        entry = dict_list_map_inplace(of_own_replica, entry)
    if metadata.get(_LAYERS_APART) and not is_loading:
        entry = _with_common_state(entry, is_frozen=is_frozen)
    return entry


def regrouped(loaded: StateDict, optimizer: MegatronOptimizer) -> StateDict:
    """Convert the loaded optimizer state, of one optimizer or of a chain of optimizers, to the form of `optimizer`.

    With expert parallelism, megatron.core has a second optimizer for the experts. Tensors are loaded by name, so they
    already have the form of `optimizer`. Numbers, such as step counts, still have the form of the checkpoint.
    """
    chain = optimizers_of(optimizer)
    numbers = {name: value for name, value in loaded.items() if not isinstance(name, int)}
    if len(chain) == 1:
        return _with_groups_of(loaded[0], numbers, optimizer=chain[0]) if 0 in loaded else loaded
    if not numbers:
        return loaded
    return {
        number: _with_groups_of(numbers, loaded.get(number, {}), optimizer=each) for number, each in enumerate(chain)
    }


def _with_groups_of(saved: StateDict, own: StateDict, *, optimizer: MegatronOptimizer) -> StateDict:
    """The state `own`, with its missing values from `saved`, and the matching saved group for each of its groups."""
    saved = copy.deepcopy(saved)
    state, current = _over(saved, own), optimizer.state_dict()
    theirs = saved.get("optimizer", saved)["param_groups"]
    groups = current.get("optimizer", current)["param_groups"]
    found = dict(zip(_kinds(theirs), theirs, strict=True))
    state.get("optimizer", state)["param_groups"] = [
        {**found[kind], **{name: each[name] for name in _OWN_OF_GROUPS if name in each}}
        for kind, each in zip(_kinds(groups), groups, strict=True)
    ]
    return state


_OWN_OF_GROUPS = ("params", "is_expert_parallel", "muon")


def _kinds(groups: Sequence[dict]) -> list[tuple]:
    """What each group is found by: groups of one kind, as those of `--decoupled-lr`, have the same order in every run.

    Muon's groups of a kind have the same options. They differ in the layout of matrices, which depends on the degrees.
    """
    names = ("wd_mult", "lr_mult", "is_decoupled_lr")
    kinds = [(group.get("muon") is not None, *(group[name] for name in names if name in group)) for group in groups]
    return [(*kind, place * (not kind[0])) for kind, place in zip(kinds, places_among_alike(kinds), strict=True)]


_MASTERS = "fp32_from_fp16_params"
"""megatron.core's name for the list of each group's master weights."""


def without_empty_groups(entry: ShardedStateDict) -> ShardedStateDict:
    """The optimizer's entry with its master weights as a dict, group number -> master weights, without empty groups.

    megatron.core leaves empty groups out of its list, so that later groups move up. It also writes rank 0's empty
    groups for all ranks.
    """
    if 0 in entry:  # a chain of optimizers
        return {number: without_empty_groups(each) for number, each in entry.items()}
    if _MASTERS not in entry:
        return entry
    return {**entry, _MASTERS: {number: group for number, group in enumerate(entry[_MASTERS]) if group}}


def with_empty_groups(loaded: StateDict, optimizer: MegatronOptimizer) -> StateDict:
    """The loaded optimizer state with its master weights as a list again, which `without_empty_groups` made a dict."""
    chain = optimizers_of(optimizer)
    if len(chain) > 1:
        return {number: with_empty_groups(loaded[number], each) for number, each in enumerate(chain)}
    masters = loaded.get(_MASTERS)
    if not isinstance(masters, dict):
        return loaded
    return {**loaded, _MASTERS: [masters.get(number, []) for number in range(len(optimizer.param_groups))]}


def complete_state(optimizer: MegatronOptimizer) -> None:
    """Make the state that torch's optimizers otherwise make in their first step.

    So saving and loading find the same tensors at any time.
    """
    for inner in optimizers_of(optimizer):
        if inner.optimizer is not None:
            complete_optimizer_state(inner.optimizer)
