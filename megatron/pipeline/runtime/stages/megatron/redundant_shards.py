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
whole stage.

Ranks that share sequences (context parallelism) are lost together. So the "rank before" of a rank is the rank with the
same place in the previous set of ranks that share sequences.

A copy has the shapes of its shard. So on the same kind of processor the two are bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron.backend.fixes import TORCHS_ADAM, complete_optimizer_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.pipeline.runtime.stages.megatron.groups import ChainGroup
from megatron.pipeline.runtime.stages.megatron.optimizers import (
    GradientSlot,
    bucket_of,
    is_distributed,
    named_parameters,
    optimizers_of,
)
from megatron.pipeline.runtime.update.versions import WeightVersions
from megatron.pipeline.runtime.update.weight_prediction import PredictedVersions

_STATES = ("param", "exp_avg", "exp_avg_sq")
_WEIGHTS, _OLDER = "weights", "older"  # the newest weights that batches use, and those of the version before

Flats = list[Tensor]
"""One flat tensor of a shard for each bucket of the rank's buffers, on the host."""


class _Part(NamedTuple):
    """The elements of a parameter in a shard: their places in the shard's flat tensor and in the parameter."""

    parameter: Parameter
    in_shard: slice
    in_parameter: slice


class ShardCut:
    """The cut of the flat buffers of one rank's chunks into shards of equal size.

    Args:
        optimizer: the distributed optimizer of the chunks, which is torch's Adam.
        size: the number of shards.
    """

    def __init__(self, optimizer: DistributedOptimizer, size: int) -> None:
        self.size = size
        buffers = [] if optimizer.is_stub_optimizer else optimizer.buffers
        self._buckets = [(buffer, bucket) for buffer in buffers for bucket in buffer.buckets]

    @property
    def num_elements(self) -> list[int]:
        """The elements of a shard, for each bucket."""
        return [bucket.grad_data.numel() // self.size for _, bucket in self._buckets]

    @property
    def weight_dtypes(self) -> list[torch.dtype]:
        """The dtype of the weights of each bucket."""
        return [buffer.param_dtype for buffer, _ in self._buckets]

    def parts(self, shard: int) -> Iterator[tuple[int, _Part]]:
        """The parts of parameters in a shard, each with the number of its bucket, in megatron.core's order."""
        for number, ((buffer, bucket), length) in enumerate(zip(self._buckets, self.num_elements, strict=True)):
            first = bucket.offset + shard * length
            found = DistributedOptimizer._build_model_gbuf_param_range_map(
                buffer.param_index_map, Range(first, first + length), bucket.offset
            )
            for parameter, ranges in found.items():
                yield number, _Part(parameter, _slice(ranges["gbuf_local"]), _slice(ranges["param"]))

    def whole(self, parameter: Parameter) -> tuple[int, slice]:
        """The bucket of a parameter, and where it lies in the bucket."""
        for number, (buffer, bucket) in enumerate(self._buckets):
            if parameter in bucket.params:
                start, stop, _ = buffer.param_index_map[parameter]
                return number, slice(start - bucket.offset, stop - bucket.offset)
        raise AssertionError("a parameter outside of all buckets")

    def gradients(self, slot: GradientSlot, shard: int) -> Flats:
        """A shard of a gradient slot, on the host: views if the slot lies there."""
        flats = {id(buffer): flat for (buffer, _), flat in zip(self._once_each(), slot.flats, strict=True)}
        return [bucket_of(flats[id(buffer)], bucket).chunk(self.size)[shard].cpu() for buffer, bucket in self._buckets]

    def _once_each(self) -> list[tuple]:
        return list({id(buffer): (buffer, bucket) for buffer, bucket in self._buckets}.values())

    def filled(self, shard: int, of: Callable[[_Part], Tensor], dtypes: Sequence[torch.dtype] | None = None) -> Flats:
        """New flat tensors of a shard, with `of(part)` in the place of each part, and zeros elsewhere."""
        dtypes = dtypes or [torch.float32] * len(self._buckets)
        flats = [torch.zeros(length, dtype=dtype) for length, dtype in zip(self.num_elements, dtypes, strict=True)]
        for number, part in self.parts(shard):
            flats[number][part.in_shard].copy_(of(part))
        return flats


class _Copy:
    """The shard of another rank on this host, with an optimizer that steps it on a thread of its own.

    Args:
        own: the optimizer of this rank's shard, whose settings the copy follows.
        group_of: the number of the group of each parameter.
        states: the name of a state -> its flats.
        older: the weights of the version before; None if no batch uses them.
    """

    def __init__(
        self,
        cut: ShardCut,
        shard: int,
        own: torch.optim.Optimizer,
        group_of: Mapping[Parameter, int],
        states: dict[str, Flats],
        older: Flats | None,
        *,
        count: float,
    ) -> None:
        self.shard, self.states, self.older = shard, states, older
        self._own = own
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="copy of a shard")
        self._work: Future | None = None
        self._parts: list[tuple[int, slice, Tensor]] = []  # bucket, place in the shard, master
        groups: list[dict] = [{**_settings(group), "params": []} for group in own.param_groups]
        moments = {}
        for number, part in cut.parts(shard):
            master, *rest = (states[name][number][part.in_shard] for name in _STATES)
            groups[group_of[part.parameter]]["params"].append(master)
            moments[master] = dict(zip(_STATES[1:], rest, strict=True))
            self._parts.append((number, part.in_shard, master))
        self.optimizer = type(own)([group for group in groups if group["params"]] or [{"params": [torch.zeros(0)]}])
        self._numbers = [number for number, group in enumerate(groups) if group["params"]]
        for master, state in moments.items():
            self.optimizer.state[master] = {"step": torch.tensor(count), **state}

    def step(self, gradients: Flats | None, coefficient: float) -> None:
        """Begin the step that the shard's rank takes. `gradients`: overwritten; None if the step is skipped."""
        self.finish()
        settings = [_settings(self._own.param_groups[number]) for number in self._numbers]
        self._work = self._worker.submit(self._step, gradients, coefficient, settings)

    def finish(self) -> None:
        """Wait for the step that was begun last."""
        work, self._work = self._work, None
        if work is not None:
            work.result()

    @torch.no_grad()
    def _step(self, gradients: Flats | None, coefficient: float, settings: Sequence[dict]) -> None:
        if self.older is not None:
            for older, master in zip(self.older, self.states["param"], strict=True):
                older.copy_(master)
        if gradients is None:
            return
        for group, of_group in zip(self.optimizer.param_groups, settings, strict=False):
            group.update(of_group)
        full = [flat.float() for flat in gradients]
        if coefficient != 1.0 and full:
            torch._foreach_mul_(full, coefficient)
        for number, place, master in self._parts:
            master.grad = full[number][place]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def count(self) -> float:
        """The number of steps."""
        return _count(self.optimizer)


class _Layout(NamedTuple):
    """The description of a cut, for ranks that have no shard of it."""

    size: int  # the number of shards
    num_elements: list[int]  # of a shard, for each bucket
    dtypes: dict[str, list[torch.dtype]]  # name of a state, or of weights -> the dtype of each bucket
    places: dict[str, tuple[int, int, int]]  # name of a parameter -> its bucket, and where it begins and ends there
    newest: int  # version of the weights


def is_steppable(optimizer: MegatronOptimizer) -> bool:
    """Whether the optimizer is torch's Adam cut into shards, which can be stepped on the host and handed to others."""
    [inner] = optimizers_of(optimizer)
    return is_distributed(optimizer) and (inner.is_stub_optimizer or isinstance(inner.optimizer, TORCHS_ADAM))


class RedundantShards:
    """One rank's shard, and its copy of the shard of the rank before.

    `make_copy` and `exchange` are collective over the ranks with the same stages.

    Args:
        chunks, optimizer, versions: of the rank.
        group: the chain's group of the ranks with the same stages; None for a single rank, which keeps no copy.
        copies: keep copies; if not, a rank has only its own shard.
        together: how many ranks of the group, one after another, are lost together.

    Raises:
        ValueError: the optimizer is not torch's Adam, so its shards cannot be stepped on the host.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        versions: WeightVersions,
        group: ChainGroup | None,
        *,
        copies: bool,
        together: int = 1,
    ) -> None:
        [self._optimizer] = optimizers_of(optimizer)
        self._versions, self._group, self._distance = versions, group, together
        self._predicts = isinstance(versions, PredictedVersions)
        self._copies = copies and group is not None and group.size > together
        self._names = {parameter: name for name, parameter in named_parameters(chunks).items()}
        self.shard, size = (0, 1) if group is None else (group.rank, group.size)
        self.cut = ShardCut(self._optimizer, size)
        if not self._optimizer.is_stub_optimizer:
            if not is_steppable(optimizer):
                kind = type(self._optimizer.optimizer)
                raise ValueError(
                    f"redundant_optimizer: {kind.__module__}.{kind.__name__} steps on its device alone, and copies of "
                    "shards are stepped on the host; leave --redundant-optimizer out, or train without Apex and "
                    "Transformer Engine"
                )
            complete_optimizer_state(self._optimizer.optimizer)
        self._copy: _Copy | None = None

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
        numbers[-1] = _count(own)
        group.all_reduce(numbers, dist.ReduceOp.MAX)
        group_of = {parameter: int(number) for parameter, number in zip(parameters, numbers.tolist(), strict=False)}

        def before(name: str) -> Flats:
            return [group.pass_on(flat, self._distance) for flat in self._own(name)]

        states = {name: before(name) for name in _STATES}
        older = before(_OLDER) if self._versions.window > 1 and not self._predicts else None
        shard = (self.shard - self._distance) % group.size
        self._copy = _Copy(self.cut, shard, own, group_of, states, older, count=numbers[-1].item())

    def exchange(self, slot: GradientSlot) -> Flats | None:
        """Send the reduced gradients of this rank's shard to the next rank.

        Returns the gradients of the shard of which this rank has a copy. Called on the chain's thread, before the step.
        """
        if self._copy is None:
            return None
        return [self._group.pass_on(flat, self._distance) for flat in self.cut.gradients(slot, self.shard)]

    def step(self, gradients: Flats | None, coefficient: float) -> None:
        """Step the copy. `gradients`: from `exchange`; None if the step is skipped. `coefficient`: multiplies them.

        To be called with the step of this rank's own shard, before the learning rate advances. The step runs on a
        thread of its own, and the next step of the copy waits for it.
        """
        if self._copy is not None:
            self._copy.step(gradients, coefficient)

    # When ranks change.

    @property
    def held(self) -> list[int]:
        """The shards that this rank can hand over, its own first."""
        if self._optimizer.is_stub_optimizer:
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
        """The copy's flats of a state, or of the newest weights that batches use or those of the version before."""
        self._copy.finish()
        if name == _WEIGHTS and self._predicts:
            return self._used(self._versions.newest, self._copy.shard)
        if name == _WEIGHTS:
            dtypes = self.cut.weight_dtypes
            return [flat.to(dtype) for flat, dtype in zip(self._copy.states["param"], dtypes, strict=True)]
        return self._copy.older if name == _OLDER else self._copy.states[name]

    def _own(self, name: str) -> Flats:
        """As `copy_of`, but for this rank's own shard, whose part of the weights needs no gather."""
        if name in _STATES:
            return self.cut.filled(self.shard, lambda part: self._state(part.parameter)[name].detach())
        version = self._versions.newest - (name == _OLDER)
        return self._used(max(version, self._versions.live()[0]), self.shard)

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
        has_older = self._versions.newest - 1 in self._versions.live() and not self._predicts
        dtypes = {name: [torch.float32] * len(self.cut.num_elements) for name in _STATES}
        dtypes |= dict.fromkeys([_WEIGHTS, *([_OLDER] if has_older else [])], self.cut.weight_dtypes)
        places = {}
        for parameter, name in self._names.items():
            number, place = self.cut.whole(parameter)
            places[name] = number, place.start, place.stop
        return _Layout(self.cut.size, self.cut.num_elements, dtypes, places, self._versions.newest)

    @torch.no_grad()
    def take_over(self, before: RedundantShards | None, sources: Sequence[int], group: dist.ProcessGroup) -> None:
        """Fill this rank's optimizer and weight versions with the state of another cut. Collective over `group`.

        Args:
            before: the shards of the other cut that this rank has; None: it has none of these shards.
            sources: the global rank that hands over each shard of the other cut.
            group: the ranks that have the shards of this cut.
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
            if name in _STATES:
                for _, part in self.cut.parts(self.shard):
                    self._state(part.parameter)[name].copy_(found[self._names[part.parameter]][part.in_parameter])
            else:
                weights[name] = {each: found[each].view(parameter.shape) for parameter, each in self._names.items()}
        count = torch.tensor(0.0 if before is None else before._count)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
        for state in [] if self._optimizer.is_stub_optimizer else self._optimizer.optimizer.state.values():
            state["step"] = count.clone()
        if self._predicts:
            self._versions.show_newest()
            self._versions.restart(layout.newest, weights[_WEIGHTS])
            return
        older = {layout.newest - 1: weights[_OLDER]} if _OLDER in weights else {}
        self._versions.restore({**older, layout.newest: weights[_WEIGHTS]})

    def _flats(self, name: str) -> dict[int, Flats]:
        """The flats of a state, or of weights, of each shard that this rank has."""
        of_copy = {} if self._copy is None else {self._copy.shard: self.copy_of(name)}
        return {**of_copy, self.shard: self._own(name)}

    @property
    def _count(self) -> float:
        return max(_count(self._optimizer.optimizer), 0.0 if self._copy is None else self._copy.count)


def step_own_shard(optimizer: MegatronOptimizer) -> None:
    """Step this rank's shard, and write its part of the weights, without the gather of the others' parts."""
    [inner] = optimizers_of(optimizer)
    MixedPrecisionOptimizer.step_with_ready_grads(inner)


def gather_weights(chunks: Sequence[DistributedDataParallel]) -> None:
    """Fill the shown slot of the weights with the parts of all replicas. Collective over the replicas."""
    for chunk in chunks:
        chunk.start_param_sync()


def _slice(found: Range) -> slice:
    return slice(found.start, found.end)


def _settings(group: dict) -> dict:
    return {name: value for name, value in group.items() if name != "params"}


def _count(optimizer: torch.optim.Optimizer | None) -> float:
    states = [] if optimizer is None else optimizer.state.values()
    return max((float(state["step"]) for state in states), default=0.0)
