"""Optimizer state that was saved with the distributed optimizer and is loaded without it, and the other way round.

Problem: megatron.core's two kinds of optimizer hold the same numbers under different names. Moments agree
('optimizer.state.exp_avg.<parameter>'), but FP32 masters are 'param' in the distributed optimizer, 'fp32_param' in the
mixed-precision one, and the model's own tensors in the FP32 one; step counter and groups lie at different places.

The step counter of Adam and its kind is left out where it is 0, and then the load fails for want of it.

Solution: ask for each master under the name that the checkpoint has, and rearrange the small common part afterwards.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from megatron.backend.fixes import has_adams_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.pipeline.runtime.failure.errors import CheckpointError

_DISTRIBUTED_MASTER, _MIXED_MASTER = "optimizer.state.param.", "optimizer.state.fp32_param."
_SHARDING = "param_state_sharding_type"


def is_distributed(optimizer: MegatronOptimizer) -> bool:
    """True for megatron.core's DistributedOptimizer, alone or in a chain."""
    return any(
        isinstance(inner, DistributedOptimizer) for inner in getattr(optimizer, "chained_optimizers", [optimizer])
    )


def needs_conversion(optimizer: MegatronOptimizer, saved: dict | None) -> bool:
    """True if `saved`, the common part of the saved optimizer state, is of the other kind.

    Raises CheckpointError where it cannot be converted.
    """
    if saved is None or is_distributed(optimizer) == (_SHARDING in saved):
        return False
    fresh = "pass --no-load-optim to start with a fresh optimizer state"
    if saved.get(_SHARDING, "fully_reshardable") != "fully_reshardable":
        raise CheckpointError(
            f"the checkpoint's distributed optimizer state is in the format {saved[_SHARDING]!r}, which only "
            f"--use-distributed-optimizer at the same degrees can load: set that, or {fresh}"
        )
    if len(getattr(optimizer, "chained_optimizers", [optimizer])) > 1:
        raise CheckpointError(
            f"optimizer state of a chain of optimizers loads only with the same --use-distributed-optimizer: {fresh}"
        )
    return True


def convert_request(request: dict, holds: Callable[[str], bool]) -> dict:
    """Name the masters in a sharded optimizer state as the checkpoint does (`holds`: is this key there?), and leave out
    those that it does not have: an FP32 run without the distributed optimizer has no masters beside the model."""

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
    """Name of the parameter that a sharded tensor is the FP32 master of."""
    return master_of(value.key) if isinstance(value, (ShardedTensor, ShardedTensorFactory)) else None


def master_of(key: str) -> str | None:
    """The key of the parameter whose FP32 master has this one."""
    for prefix in (_DISTRIBUTED_MASTER, _MIXED_MASTER):
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return None


def _possible_keys(master: str) -> tuple[str, str]:
    return _DISTRIBUTED_MASTER + master, _MIXED_MASTER + master


def convert_loaded(loaded: dict, optimizer: MegatronOptimizer) -> dict:
    """Rearrange a loaded optimizer state of the other kind so that `optimizer.load_state_dict` takes it. The model must
    have been loaded already."""
    return _to_distributed(loaded, optimizer) if is_distributed(optimizer) else _to_plain(loaded)


def convert_step_counters(loaded: dict, optimizer: MegatronOptimizer) -> None:
    """Put the counter of a loaded state where the optimizer looks for it, 0 where it was saved before its first update:
    torch's Adam and its kind have it beside the moments, Apex's and Transformer Engine's in their groups.
    """
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
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


def _to_distributed(loaded: dict, optimizer: MegatronOptimizer) -> dict:
    plain = loaded.get("optimizer", loaded)
    step = plain.get("state", {}).get("common_step")
    groups = [{name: value for name, value in group.items() if name != "params"} for group in plain["param_groups"]]
    for group in groups:
        group["step"] = group.get("step", 0.0) if step is None else float(step)
    (inner,) = getattr(optimizer, "chained_optimizers", [optimizer])
    parameters = [parameter for buffer in inner.buffers for parameter in buffer.param_index_map]
    for index, tensors in loaded["param_state"].items():
        tensors.setdefault("param", parameters[int(index)].detach().float())
    converted = {"optimizer": {"param_groups": groups}, "param_state": loaded["param_state"]}
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
