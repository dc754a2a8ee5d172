"""State of the distributed optimizer as it lies on its ranks: of each parameter the elements that a rank owns.

Problem: megatron.core shards masters and moments by ranges of a flat buffer, and its format that other degrees can load
gathers them on every replica first, whole. Where state goes from rank to rank in memory, that is the most expensive
part, and the memory for it may not be there.

Solution: a rank describes what it owns of a parameter as a range of that parameter's flattened elements, without a
copy. Only stores that know `ElementRange` can hold it; files cannot.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

ELEMENT_RANGES = "element_ranges"  # value of "distrib_optim_sharding_type"
# How megatron.core names a loaded state that has for each of its shards the tensors of just that shard.
_AS_LOADED = "fully_sharded_model_space"


@dataclass
class ElementRange(ShardedBase):
    """A flat tensor that is a range of a sharded tensor's part.

    Attributes:
        key: of the parameter's state, for messages.
        data: one axis; the elements `first` to `first + len(data)` of the flattened local tensor.
        first: counted in elements of the local tensor of the parameter.
        wholes: the sharded tensors, without data, that the local tensor consists of, each with the element where it
            begins: one, or what a factory makes of it (the two halves of a gated layer).
    """

    key: str
    data: Tensor
    first: int
    wholes: tuple[tuple[int, ShardedTensor], ...]
    replica_id: tuple[int, ...] | int = 0

    def validate_metadata_integrity(self) -> None:
        assert self.data is None or self.data.dim() == 1, f"{self.key}: a range has one axis"

    def without_data(self) -> "ElementRange":
        return replace(self, data=None)

    def overlaps(self) -> list[tuple[ShardedTensor, int, Tensor]]:
        """(whole, first element within it, the data there) of each whole that the range reaches into."""
        last, found = self.first + len(self.data), []
        for begin, whole in self.wholes:
            start, stop = max(self.first, begin), min(last, begin + whole.data.numel())
            if start < stop:
                found.append((whole, start - begin, self.data[start - self.first : stop - self.first]))
        return found


def ranged_optimizer_state(
    optimizer: MegatronOptimizer, model: dict[str, ShardedStateDict], metadata: dict, *, is_loading: bool
) -> ShardedStateDict:
    """As `optimizer.sharded_state_dict`, with element ranges for the state of distributed optimizers. The data are the
    optimizer's own tensors."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
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
                if name != "step"  # the same for all; it is in the groups
            }
    common = optimizer.state_dict()
    if not param_state:  # a rank that owns nothing knows no count of steps
        for group in common["optimizer"]["param_groups"]:
            group.pop("step", None)
    return {**common, "param_state": param_state, "param_state_sharding_type": _AS_LOADED}


def _range_of(parameter: ShardedTensor | ShardedTensorFactory, prefix: str, tensor: Tensor, first: int) -> ElementRange:
    key = f"{prefix}.{parameter.key}"
    return ElementRange(key, tensor.detach(), first, _wholes(parameter, key), parameter.replica_id)


def _wholes(parameter: ShardedTensor | ShardedTensorFactory, key: str) -> tuple[tuple[int, ShardedTensor], ...]:
    """What the parameter's local tensor consists of, over a stand-in that tells places and takes no memory."""
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
