"""Copies of the distributed optimizer's shards on the hosts of peers: `--redundant-optimizer`.

Problem: the distributed optimizer cuts masters and moments of a stage into shards, one for each rank with the stage. If
a rank is lost, so is its shard, and with it the shard of the gradients that were reduced to it. Steps are taken in
place, and ranks that have stepped cannot go back. So a copy that is sent after a step comes too late for the ranks that
die in that step.

Solution: the ranks of a stage form a ring. Each rank keeps a copy of the shard of the rank before it on its host, and
steps the copy as that rank steps the shard. For this the copy needs only the reduced gradients of the shard. The chain
sends these gradients to the next rank before the all-reduce with the norm. No rank steps before this all-reduce, and
the all-reduce ends on no rank before all ranks have begun it. So if any rank has made a version, every rank that is
left has the gradients to make this version of its own shard and of its copy. If no rank has made it, all ranks drop the
batch and have the version before. Older versions are not kept, with one exception: under 2bw, the weights of the
version before the newest, which the next batch uses. Predicted weights are not in a copy: each rank has those of its
whole stage. If predictions take the last update again (error feedback), a copy also has the masters before that update.

Ranks that share sequences (context parallelism) or share out experts are lost together. So the "rank before" of a rank
is the rank with the same place in the previous set of such ranks.

Experts that ranks share out have an optimizer of their own, whose shards lie on the ranks with the same experts. These
ranks form a second ring. Dense weights and experts are cut, copied and handed over in the same way, one after the
other.

A copy has the shapes of its shard. So on the same kind of processor the two are bit-equal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron.backend.fixes import TORCHS_ADAM, complete_optimizer_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.pipeline.runtime.stages.megatron.groups import ChainGroup, ChainGroups
from megatron.pipeline.runtime.stages.megatron.optimizers import (
    GradientSlot,
    buffers_of,
    groups_of_replicas,
    is_distributed,
    named_parameters,
    optimizers_of,
)
from megatron.pipeline.runtime.stages.megatron.shard_copies import (
    STATES,
    Flats,
    Part,
    ShardCopy,
    ShardCut,
    count_of,
)
from megatron.pipeline.runtime.update.provisional_step import LastUpdate, again
from megatron.pipeline.runtime.update.versions import WeightVersions
from megatron.pipeline.runtime.update.weight_prediction import PredictedVersions

_WEIGHTS, _OLDER = "weights", "older"  # the newest weights that batches use, and those of the version before
_BEFORE = "before"  # the masters before the last step, if predictions take that step again
_UPCOMING = "upcoming"  # the prediction that follows from them


class _Layout(NamedTuple):
    """The description of a cut, for ranks that have no shard of it."""

    size: int  # the number of shards
    num_elements: list[int]  # of a shard, for each bucket
    dtypes: dict[str, list[torch.dtype]]  # name of a state, or of weights -> the dtype of each bucket
    places: dict[str, tuple[int, int, int]]  # name of a parameter -> its bucket, and where it begins and ends there
    newest: int  # version of the weights


def is_steppable(optimizer: MegatronOptimizer) -> bool:
    """Whether the optimizer is torch's Adam cut into shards, which can be stepped on the host and handed to others."""
    return is_distributed(optimizer) and all(
        each.is_stub_optimizer or isinstance(each.optimizer, TORCHS_ADAM) for each in optimizers_of(optimizer)
    )


class RedundantShards:
    """One rank's shards, and its copies of the shards of the ranks before: of dense weights, and of shared out experts.

    `make_copies`, `exchange` and `take_over` are collective over the ranks with the same stages.

    Args:
        chunks, optimizer, versions: of the rank.
        groups: the groups of the chain. A single rank with its weights keeps no copy.
        copies: keep copies; if not, a rank has only its own shards.
        last_update: the update that predictions take again; None: they take none again.

    Attributes:
        of_optimizers: the shards of the optimizer of dense weights, and of that of experts.

    Raises:
        ValueError: the optimizer is not torch's Adam, so its shards cannot be stepped on the host.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        versions: WeightVersions,
        groups: ChainGroups,
        *,
        copies: bool,
        last_update: LastUpdate | None = None,
    ) -> None:
        self._versions, self._groups_of_replicas = versions, groups_of_replicas(optimizer, chunks[0])
        buffers = [buffer for chunk in chunks for buffer in buffers_of(chunk)]
        names = {parameter: name for name, parameter in named_parameters(chunks).items()}
        config = chunks[0].config
        cut, cut_experts = config.tensor_model_parallel_size, config.expert_tensor_parallel_size
        sharing = cut_experts * config.expert_model_parallel_size
        place = math.lcm(cut * config.context_parallel_size, sharing)  # the ranks that are lost together
        rings = (groups.data, place // cut), (groups.expert_data, place // sharing)
        self.of_optimizers = [
            _Shard(each, *ring, versions, buffers, names, copies=copies, last_update=last_update)
            for each, ring in zip(optimizers_of(optimizer), rings, strict=False)
        ]

    def make_copies(self) -> None:
        """Send all state of this rank's shards to the next ranks, and keep the state that the ranks before send."""
        for each in self.of_optimizers:
            each.make_copy()

    def exchange(self, slot: GradientSlot) -> list[Flats | None]:
        """Send the reduced gradients of this rank's shards to the next ranks.

        Returns the gradients of the shards of which this rank has copies. Called on the chain's thread, before the
        step.
        """
        return [each.exchange(slot) for each in self.of_optimizers]

    def step(self, gradients: Sequence[Flats | None] | None, coefficient: float) -> None:
        """Step the copies. `gradients`: from `exchange`; None if the step is skipped. `coefficient`: multiplies them.

        To be called with the step of this rank's own shards, before the learning rate advances. The step of a copy runs
        on a thread of its own, and the next step of the copy waits for it.
        """
        for number, each in enumerate(self.of_optimizers):
            each.step(gradients and gradients[number], coefficient)

    @torch.no_grad()
    def take_over(self, before: RedundantShards | None, sources: Sequence[Sequence[int]]) -> None:
        """Fill this rank's optimizer and weight versions with the state of another cut.

        Args:
            before: the shards of the other cut that this rank has; None: it has none of these shards.
            sources: for dense weights and experts, the global rank that hands over each shard of the other cut.
        """
        newest, weights = 0, defaultdict(dict)
        for number, each in enumerate(self.of_optimizers):
            of_before = None if before is None else before.of_optimizers[number]
            newest, found = each.take_over(of_before, sources[number], self._groups_of_replicas[number])
            for name, tensors in found.items():
                weights[name].update(tensors)
        if isinstance(self._versions, PredictedVersions):
            self._versions.show_newest()
            self._versions.restart(newest, weights[_WEIGHTS], upcoming=weights.get(_UPCOMING))
        else:
            older = {newest - 1: weights[_OLDER]} if _OLDER in weights else {}
            self._versions.restore({**older, newest: weights[_WEIGHTS]})


class _Shard:
    """One rank's shard of an optimizer, and its copy of the shard of the rank before.

    Args:
        optimizer: the distributed optimizer.
        group: the chain's group of the ranks that have the shards; None for a single rank, which keeps no copy.
        distance: how many ranks of the group, one after another, are lost together.
        versions, copies, last_update: as for `RedundantShards`.
        buffers: megatron.core's buffers of the rank, in the order of a gradient slot's flat tensors.
        names: parameter of the rank -> name.

    Attributes:
        extra_state: what a copy has besides masters and moments: older weights or older masters; None: nothing.
    """

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        group: ChainGroup | None,
        distance: int,
        versions: WeightVersions,
        buffers: Sequence,
        names: Mapping[Parameter, str],
        *,
        copies: bool,
        last_update: LastUpdate | None,
    ) -> None:
        self._optimizer, self._versions, self._last_update = optimizer, versions, last_update
        self._group, self._distance = group, distance
        self._predicts = isinstance(versions, PredictedVersions)
        self.extra_state: str | None = _OLDER if versions.window > 1 and not self._predicts else None
        if last_update is not None:
            self.extra_state = _BEFORE
        self._copies = copies and group is not None and group.size > distance
        self.shard, size = (0, 1) if group is None else (group.rank, group.size)
        self.cut = ShardCut(optimizer, size, buffers)
        self._names = {parameter: name for parameter, name in names.items() if self.cut.has(parameter)}
        if not optimizer.is_stub_optimizer:
            if not is_steppable(optimizer):
                kind = type(optimizer.optimizer)
                raise ValueError(
                    f"redundant_optimizer: {kind.__module__}.{kind.__name__} steps on its device alone, and copies of "
                    "shards are stepped on the host; leave --redundant-optimizer out, or train without Apex and "
                    "Transformer Engine"
                )
            complete_optimizer_state(optimizer.optimizer)
        self._copy: ShardCopy | None = None

    @torch.no_grad()
    def make_copy(self) -> None:
        """Send all state of this rank's shard to the next rank, and keep the state that the rank before sends."""
        group, own = self._group, self._optimizer.optimizer
        if not self._copies or self._optimizer.is_stub_optimizer:
            return
        parameters = list(self._names)
        numbers = torch.full((len(parameters) + 1,), -1.0, dtype=torch.float64)  # groups, and the number of steps
        for position, parameter in enumerate(parameters):
            found = self._optimizer.model_param_group_index_map.get(parameter)
            numbers[position] = -1.0 if found is None else found[0]
        numbers[-1] = count_of(own)
        group.all_reduce(numbers, dist.ReduceOp.MAX)
        group_of = {parameter: int(number) for parameter, number in zip(parameters, numbers.tolist(), strict=False)}

        def before(name: str) -> Flats:
            return [group.pass_on(flat, self._distance) for flat in self._own(name)]

        states = {name: before(name) for name in STATES}
        older = None if self.extra_state is None else before(self.extra_state)
        shard = (self.shard - self._distance) % group.size
        self._copy = ShardCopy(self.cut, shard, own, group_of, states, older, count=numbers[-1].item())

    def exchange(self, slot: GradientSlot) -> Flats | None:
        """As that of `RedundantShards`, for this optimizer; None: there is no copy."""
        if self._copy is None:
            return None
        return [self._group.pass_on(flat, self._distance) for flat in self.cut.gradients(slot, self.shard)]

    def step(self, gradients: Flats | None, coefficient: float) -> None:
        if self._copy is not None:
            self._copy.step(gradients, coefficient)

    # When ranks change.

    @property
    def held(self) -> list[int]:
        """The shards that this rank can hand over, its own first."""
        if not self._names:
            return list(range(self.cut.size))
        return [self.shard] if self._copy is None else [self.shard, self._copy.shard]

    @property
    def num_bytes(self) -> int:
        """The bytes of the copy on the host, without gradients in flight."""
        if self._copy is None:
            return 0
        flats = [flat for each in self._copy.states.values() for flat in each] + (self._copy.older or [])
        return sum(flat.numel() * flat.element_size() for flat in flats)

    def copy_of(self, name: str) -> Flats:
        """The copy's flats of a state, of the newest weights that batches use, or of what a copy has besides."""
        self._copy.finish()
        if name == _WEIGHTS and self._predicts:
            return self._used(self._versions.newest, self._copy.shard)
        if name == _WEIGHTS:
            dtypes = self.cut.weight_dtypes
            return [flat.to(dtype) for flat, dtype in zip(self._copy.states["param"], dtypes, strict=True)]
        return self._copy.older if name == self.extra_state else self._copy.states[name]

    def _own(self, name: str) -> Flats:
        """As `copy_of`, but for this rank's own shard, whose part of the weights needs no gather."""
        if name in STATES:
            return self.cut.filled(self.shard, lambda part: self._state(part.parameter)[name].detach())
        if name == _BEFORE:
            return self.cut.filled(self.shard, self._before)
        version = self._versions.newest - (name == _OLDER)
        return self._used(max(version, self._versions.live()[0]), self.shard)

    def _before(self, part: Part) -> Tensor:
        master = self._state(part.parameter)["param"]
        return self._last_update.before.get(master, master.detach())

    def _used(self, version: int, shard: int) -> Flats:
        """A shard of the weights that batches use as those of `version`."""
        tensors = self._versions.tensors(version)
        return self.cut.filled(
            shard,
            lambda part: tensors[self._names[part.parameter]].detach().view(-1)[part.in_parameter],
            self.cut.weight_dtypes,
        )

    def _state(self, parameter: Parameter) -> dict[str, Tensor]:
        return self._optimizer._get_main_param_and_optimizer_states(parameter)

    def _layout(self) -> _Layout:
        wide, dtypes = [torch.float32] * len(self.cut.num_elements), {_WEIGHTS: self.cut.weight_dtypes}
        dtypes |= dict.fromkeys(STATES, wide)
        if self.extra_state == _BEFORE:
            dtypes[_BEFORE] = wide
        elif self.extra_state == _OLDER and self._versions.newest - 1 in self._versions.live():
            dtypes[_OLDER] = self.cut.weight_dtypes
        places = {}
        for parameter, name in self._names.items():
            number, place = self.cut.whole(parameter)
            places[name] = number, place.start, place.stop
        return _Layout(self.cut.size, self.cut.num_elements, dtypes, places, self._versions.newest)

    def take_over(
        self, before: _Shard | None, sources: Sequence[int], group: dist.ProcessGroup
    ) -> tuple[int, dict[str, dict[str, Tensor]]]:
        """Fill this rank's shard with the state of another cut. Collective over `group`.

        Returns the newest version, and the weights that batches use: the newest, the older and the upcoming ones, where
        there are such, by name.
        """
        rank, told = dist.get_rank(), [None if before is None else before._layout()]
        dist.broadcast_object_list(told, sources[0], group=group)
        [layout] = told
        weights: dict[str, dict[str, Tensor]] = {}
        for name, dtypes in layout.dtypes.items():
            held = {} if before is None else before._flats(name)
            wholes = []
            for number, (length, dtype) in enumerate(zip(layout.num_elements, dtypes, strict=True)):
                whole = torch.empty(length * layout.size, dtype=dtype)
                for shard, (part, source) in enumerate(zip(whole.chunk(layout.size), sources, strict=True)):
                    if source == rank:
                        part.copy_(held[shard][number])
                    dist.broadcast(part, source, group=group)
                wholes.append(whole)
            found = {each: wholes[number][start:stop] for each, (number, start, stop) in layout.places.items()}
            if name in STATES:
                for _, part in self.cut.parts(self.shard):
                    self._state(part.parameter)[name].copy_(found[self._names[part.parameter]][part.in_parameter])
            if name not in STATES or (name == "param" and _BEFORE in layout.dtypes):
                weights[name] = {each: found[each].view(parameter.shape) for parameter, each in self._names.items()}
        count = torch.tensor(0.0 if before is None else before._count)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
        for state in [] if self._optimizer.is_stub_optimizer else self._optimizer.optimizer.state.values():
            state["step"] = count.clone()
        if _BEFORE in weights:
            masters, earlier = weights.pop("param"), weights.pop(_BEFORE)
            weights[_UPCOMING] = {
                name: again(earlier[name], masters[name]).to(parameter.dtype) for parameter, name in self._names.items()
            }
            self._take_restored(before, weights[_UPCOMING], group)
        return layout.newest, weights

    def _take_restored(self, before: _Shard | None, upcoming: dict[str, Tensor], group: dist.ProcessGroup) -> None:
        """Take the upcoming prediction of a rank that has had it before, and whose last update is forgotten."""
        restored = None if before is None else before._versions.restored
        has = [False] * group.size()
        dist.all_gather_object(has, restored is not None, group=group)
        if True not in has:
            return
        source = dist.get_global_rank(group, has.index(True))
        for parameter, name in self._names.items():
            tensor = torch.empty(parameter.shape, dtype=parameter.dtype)
            if source == dist.get_rank():
                tensor.copy_(restored[name])
            dist.broadcast(tensor, source, group=group)
            upcoming[name] = tensor

    def _flats(self, name: str) -> dict[int, Flats]:
        """The flats of a state, or of weights, of each shard that this rank has."""
        of_copy = {} if self._copy is None else {self._copy.shard: self.copy_of(name)}
        return {**of_copy, self.shard: self._own(name)}

    @property
    def _count(self) -> float:
        return max(count_of(self._optimizer.optimizer), 0.0 if self._copy is None else self._copy.count)


def step_own_shards(optimizer: MegatronOptimizer) -> None:
    """Step this rank's shards, and write its parts of the weights, without the gather of the others' parts."""
    for each in optimizers_of(optimizer):
        MixedPrecisionOptimizer.step_with_ready_grads(each)


def gather_weights(chunks: Sequence[DistributedDataParallel]) -> None:
    """Fill the shown slot of the weights with the parts of all replicas. Collective over the replicas."""
    for chunk in chunks:
        chunk.start_param_sync()
