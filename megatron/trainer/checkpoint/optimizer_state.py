"""The optimizer's state in a checkpoint and in memory: element ranges, conversion between optimizers, and resets.

Problem: megatron.core's optimizers store the same numbers under different names. Only moments have the same names
('optimizer.state.exp_avg.<parameter>'). FP32 master weights are 'param' in the distributed optimizer, 'fp32_param' in
the mixed-precision optimizer, and the model's own tensors in the FP32 optimizer. Step counters and parameter groups are
at different places. The state of Adam and similar optimizers has no step counter while the counter is 0, and then the
load fails for lack of the counter. The distributed optimizer shards master weights and moments by ranges of a flat
buffer; its format that other degrees can load first gathers the whole state on every replica.

Layers that train again after they were frozen are another problem: no rank has their moments, older versions of their
weights, or, with 16-bit weights, their FP32 master weights. If their moments were 0 while the step counter continued,
the first steps would be several times too long, since Adam corrects moments by the counter, and checkpoints have one
counter for all layers.

Solution: request each master weight under its name in the checkpoint, and rearrange the small common part after the
load. When state moves between ranks in memory, a rank describes its shard of a parameter as a range of the parameter's
flattened elements, without a copy. Only stores that know `ElementRange` can hold such a range; files cannot. When
frozen layers train again, the optimizer is reset for all layers: moments and counter become 0. Master weights of
trained layers are kept; master weights and older versions of frozen layers become their weights.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.backend.fixes import has_adams_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.documents import counted
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.pipeline.runtime.stages.megatron.checkpointed_versions import OLDER_VERSIONS
from megatron.pipeline.runtime.stages.megatron.optimizers import is_distributed, optimizers_of

# --- the elements that a rank owns ------------------------------------------------------------------------------------

ELEMENT_RANGES = "element_ranges"  # value of "distrib_optim_sharding_type"
# megatron.core's name for a loaded state in which each shard has exactly its own tensors.
_AS_LOADED = "fully_sharded_model_space"


@dataclass
class ElementRange(ShardedBase):
    """A range of the flattened local part of a sharded tensor.

    Attributes:
        key: key of the parameter's state, for messages.
        data: tensor with one axis, which holds the elements `first` to `first + len(data)` of the flattened local
            tensor.
        first: index of the first element in the flattened local tensor of the parameter.
        wholes: (index of the first element, sharded tensor without data) for each sharded tensor in the local tensor:
            one, or those that a factory makes (the two halves of a gated layer).
    """

    key: str
    data: Tensor
    first: int
    wholes: tuple[tuple[int, ShardedTensor], ...]
    replica_id: tuple[int, ...] | int = 0

    def validate_metadata_integrity(self) -> None:
        assert self.data is None or self.data.dim() == 1, f"{self.key}: a range has one axis"

    def without_data(self) -> ElementRange:
        return replace(self, data=None)

    def overlaps(self) -> list[tuple[ShardedTensor, int, Tensor]]:
        """The overlap with each sharded tensor, as (tensor, first element in the tensor, data of the overlap)."""
        last, found = self.first + len(self.data), []
        for begin, whole in self.wholes:
            start, stop = max(self.first, begin), min(last, begin + whole.data.numel())
            if start < stop:
                found.append((whole, start - begin, self.data[start - self.first : stop - self.first]))
        return found


def ranged_optimizer_state(
    optimizer: MegatronOptimizer, model: dict[str, ShardedStateDict], metadata: dict, *, is_loading: bool
) -> ShardedStateDict:
    """The optimizer's sharded state dict, with the state of distributed optimizers as element ranges.

    The data are the optimizer's own tensors.
    """
    chain = optimizers_of(optimizer)
    states = [
        _distributed_state(inner, model)
        if isinstance(inner, DistributedOptimizer)
        else inner.sharded_state_dict(model, is_loading=is_loading, metadata=dict(metadata))
        for inner in chain
    ]
    return states[0] if len(states) == 1 else dict(enumerate(states))


def _distributed_state(optimizer: DistributedOptimizer, model: dict[str, ShardedStateDict]) -> ShardedStateDict:
    sharded, _ = extract_sharded_tensors_and_factories(model)
    of_parameter = {id(value.data): value for value in nested_values(sharded)}
    param_state: dict[int, dict[str, ElementRange]] = {}
    for buckets in (ranges for by_dtype in optimizer.gbuf_ranges for ranges in by_dtype.values()):
        for parameter, places in ((each, where) for bucket in buckets for each, where in bucket["param_map"].items()):
            tensors = optimizer._get_main_param_and_optimizer_states(parameter)
            param_state[len(param_state)] = {
                name: _range_of(of_parameter[id(parameter)], f"optimizer.state.{name}", tensor, places["param"].start)
                for name, tensor in tensors.items()
                if name != "step"  # stored in the groups, since it is the same for all parameters
            }
    common = optimizer.state_dict()
    if not param_state:  # a rank without parameters does not count steps
        for group in common["optimizer"]["param_groups"]:
            group.pop("step", None)
    return {**common, "param_state": param_state, "param_state_sharding_type": _AS_LOADED}


def _range_of(parameter: ShardedTensor | ShardedTensorFactory, prefix: str, tensor: Tensor, first: int) -> ElementRange:
    key = f"{prefix}.{parameter.key}"
    return ElementRange(key, tensor.detach(), first, _wholes(parameter, key), parameter.replica_id)


def _wholes(parameter: ShardedTensor | ShardedTensorFactory, key: str) -> tuple[tuple[int, ShardedTensor], ...]:
    """The sharded tensors of a parameter's local tensor, on the meta device, each with its first element's index."""
    stand_in = torch.empty(parameter.data.shape, dtype=parameter.data.dtype, device="meta")
    if isinstance(parameter, ShardedTensor):
        return ((0, replace(parameter, key=key, data=stand_in)),)
    made = list(nested_values(parameter.build_fn(key, stand_in, parameter.replica_id, None)))
    wholes = tuple((value.data.storage_offset(), value) for value in made)
    if not all(value.data._is_view() and value.data.is_contiguous() for _, value in wholes):
        raise ValueError(
            f"{parameter.key} is stored in parts that are no ranges of its elements, so its distributed optimizer "
            "state cannot be moved in memory: leave out --use-distributed-optimizer"
        )
    return wholes


# --- conversion between states with and without the distributed optimizer ---------------------------------------------

_DISTRIBUTED_MASTER, _MIXED_MASTER = "optimizer.state.param.", "optimizer.state.fp32_param."
_SHARDING = "param_state_sharding_type"


def needs_conversion(optimizer: MegatronOptimizer, saved: dict | None) -> bool:
    """Whether `saved`, the common part of a saved optimizer state, comes from the other kind of optimizer.

    The kinds are with and without the distributed optimizer. Raises CheckpointError if the state cannot be converted.
    """
    saved = saved and saved.get(0, saved)  # a chain of optimizers: the first one
    if saved is None or is_distributed(optimizer) == (_SHARDING in saved):
        return False
    fresh = "pass --no-load-optim to start with a fresh optimizer state"
    if saved.get(_SHARDING, "fully_reshardable") != "fully_reshardable":
        raise CheckpointError(
            f"the checkpoint's distributed optimizer state is in the format {saved[_SHARDING]!r}, which only "
            f"--use-distributed-optimizer at the same degrees can load: set that, or {fresh}"
        )
    return True


def require_same_groups(request: dict, saved: dict | None, optimizer: MegatronOptimizer) -> None:
    """Raise CheckpointError if `saved` has more or fewer groups of parameters than `request`, so that none fit.

    The distributed optimizer matches groups by what they say, and only lacks one where `saved` has fewer.
    """
    here, there = _counts_of_groups(request), _counts_of_groups(saved or {})
    if len(here) != len(there) or here == there:
        return
    if is_distributed(optimizer) and all(map(operator.le, here, there)):
        return
    raise CheckpointError(
        f"the checkpoint's optimizer has {counted(sum(there), 'group')} of parameters by learning rate and weight "
        f"decay, and this run has {sum(here)}; give flags such as --decoupled-lr as the checkpoint's run had them, or "
        "--no-load-optim to start with a fresh optimizer state"
    )


def _counts_of_groups(state: dict) -> list[int]:
    """How many groups of parameters the state of an optimizer, or of each one of a chain, has."""
    states = [state[number] for number in state if isinstance(number, int)] or [state]
    groups = [each.get("optimizer", each).get("param_groups") for each in states]
    return [len(each) for each in groups if each is not None]


def convert_request(request: dict, holds: Callable[[str], bool]) -> dict:
    """Rename master weights in a sharded optimizer state to the checkpoint's keys; drop those that it lacks.

    An FP32 run without the distributed optimizer has no master weights beside the model. `holds`: whether the
    checkpoint has a key.
    """

    def renamed(value: object) -> object:
        master = _master_of(value)
        if master is None:
            return value
        return replace(value, key=next(key for key in _possible_keys(master) if holds(key)))

    request, _ = extract_matching_values(
        request, lambda value: (master := _master_of(value)) is None or any(map(holds, _possible_keys(master)))
    )
    return dict_list_map_inplace(renamed, request)


def _master_of(value: object) -> str | None:
    """The key of the parameter of which a sharded tensor is the FP32 master weight; None for other tensors."""
    return master_of(value.key) if isinstance(value, (ShardedTensor, ShardedTensorFactory)) else None


def master_of(key: str) -> str | None:
    """The key of the parameter of which `key` is the FP32 master weight; None for other keys."""
    for prefix in (_DISTRIBUTED_MASTER, _MIXED_MASTER):
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return None


def _possible_keys(master: str) -> tuple[str, str]:
    return _DISTRIBUTED_MASTER + master, _MIXED_MASTER + master


def convert_loaded(loaded: dict, optimizer: MegatronOptimizer) -> dict:
    """Rearrange a loaded optimizer state of the other kind into the form that `optimizer.load_state_dict` takes.

    The model must be loaded already.
    """
    chain = optimizers_of(optimizer)
    if len(chain) > 1:
        return {number: convert_loaded(loaded[number], each) for number, each in enumerate(chain)}
    return _to_distributed(loaded, chain[0]) if is_distributed(optimizer) else _to_plain(loaded)


def convert_step_counters(loaded: dict, optimizer: MegatronOptimizer) -> None:
    """Move the step counter of a loaded state to the place where the optimizer reads it; 0 if the state has none.

    torch's Adam and similar optimizers have the counter beside the moments, Apex's and Transformer Engine's in their
    parameter groups. A state that was saved before the first update has no counter.
    """
    chain = optimizers_of(optimizer)
    states = [loaded] if len(chain) == 1 else [loaded[index] for index in range(len(chain))]
    for inner, state in zip(chain, states, strict=True):
        plain = state.get("optimizer", state)
        if not plain.get("state"):
            continue
        counts = [count for group in plain["param_groups"] if (count := group.pop("step", None)) is not None]
        if has_adams_state(inner.optimizer):
            plain["state"].setdefault("common_step", torch.tensor(float(counts[0] if counts else 0)))
        elif type(inner.optimizer).__name__ == "FusedAdam":
            count = plain["state"].pop("common_step", counts[0] if counts else 0)
            for group in plain["param_groups"]:
                group["step"] = int(count)


def _to_distributed(loaded: dict, optimizer: DistributedOptimizer) -> dict:
    plain = loaded.get("optimizer", loaded)
    step = plain.get("state", {}).get("common_step")
    groups = [{name: value for name, value in group.items() if name != "params"} for group in plain["param_groups"]]
    for group in groups:
        group["step"] = group.get("step", 0.0) if step is None else float(step)
    parameters = [parameter for buffer in optimizer.buffers for parameter in buffer.param_index_map]
    states = loaded.get("param_state", {})  # none if all layers of the rank are frozen
    for index, tensors in states.items():
        tensors.setdefault("param", parameters[int(index)].detach().float())
    converted = {"optimizer": {"param_groups": groups}, "param_state": states}
    if "grad_scaler" in loaded:
        converted["grad_scaler"] = loaded["grad_scaler"]
    return {**converted, _SHARDING: "fully_reshardable"}


def _to_plain(loaded: dict) -> dict:
    saved_groups = loaded["optimizer"]["param_groups"]
    steps = [group.pop("step") for group in saved_groups if group.get("step") is not None]
    mixed = "fp32_from_fp16_params" in loaded
    plain = loaded["optimizer"] if mixed else loaded
    if not mixed:
        own = plain["param_groups"]
        plain["param_groups"] = [{**saved, **here} for saved, here in zip(saved_groups, own, strict=True)]
    if steps:
        plain["state"]["common_step"] = torch.tensor(float(steps[0]))
    kept = ("optimizer", "fp32_from_fp16_params", "grad_scaler") if mixed else ("state", "param_groups")
    return {name: loaded[name] for name in kept if name in loaded}


# --- layers that train again ------------------------------------------------------------------------------------------

_STATE = "optimizer.state."


def stays(key: str, holds_key: Callable[[str], bool]) -> bool:
    """Whether a reset does not load a key: a moment, or a master weight or older version that the store lacks."""
    comes_from_weights = _weight_of(key) is not None
    return not holds_key(key) if comes_from_weights else key.startswith(_STATE)


@dataclass(frozen=True)
class Anew:
    """A reset of the optimizer's state.

    Attributes:
        from_weights: pairs of (master weight or older version, weights to copy into it after the load).
    """

    from_weights: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(
        cls, request: ShardedStateDict, model: dict[str, ShardedStateDict], holds_key: Callable[[str], bool]
    ) -> Anew:
        """The reset for a load of `request`: the entries of `model`, the older versions and the optimizer."""
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
        """Copy the loaded weights to master weights and older versions, and set the step counters to 0."""
        for target, weights in self.from_weights:
            target.copy_(weights)
        _reset_counters(loaded.get("optimizer"))


def _is_tensor(value: object) -> bool:
    return isinstance(value, ShardedBase) and not isinstance(value, ShardedObject)


def _weight_of(key: str) -> str | None:
    """The key of the weight of which `key` is the FP32 master weight or an older version; None for other keys."""
    return master_of(key) or (key.partition(".")[2] if key.startswith(OLDER_VERSIONS) else None)


def _keys(value: ShardedBase) -> list[str]:
    """The keys under which a store may hold the tensor."""
    if isinstance(value, ElementRange):
        return [whole.key for _, whole in value.wholes]
    if isinstance(value, ShardedTensorFactory):
        return [each.key for each in nested_values(value.build())]
    return [value.key]


def _reset_counters(state: object) -> None:
    """Set the step counter of each optimizer in a chain to 0, in its parameter groups or beside its moments."""
    if isinstance(state, dict):
        for name, value in state.items():
            if name in ("step", "common_step") and value is not None:
                state[name] = value * 0
            else:
                _reset_counters(value)
    elif isinstance(state, list):
        for each in state:
            _reset_counters(each)
