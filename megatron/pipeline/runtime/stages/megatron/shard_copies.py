"""The cut of the distributed optimizer's buffers into shards, and a shard of another rank that this host steps.

Problem: a copy of a shard has to make the steps of its shard, with the same bits, on a host that has another shard.

Solution: any rank can compute the parts of parameters that lie in any shard (`ShardCut`). A copy has the flat tensors
of a shard, and an optimizer of the same kind over its parts (`ShardCopy`). The copy needs the reduced gradients and the
settings of the shard's optimizer, and steps on a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range
from megatron.pipeline.runtime.stages.megatron.optimizers import GradientSlot, bucket_of

STATES = ("param", "exp_avg", "exp_avg_sq")

Flats = list[Tensor]
"""One flat tensor of a shard for each bucket of the rank's buffers, on the host."""


class Part(NamedTuple):
    """The elements of a parameter in a shard: their places in the shard's flat tensor and in the parameter."""

    parameter: Parameter
    in_shard: slice
    in_parameter: slice


class ShardCut:
    """The cut of the flat buffers of an optimizer into shards of equal size.

    Args:
        optimizer: the distributed optimizer, which is torch's Adam.
        size: the number of shards.
        buffers: megatron.core's buffers of the rank, in the order of a gradient slot's flat tensors.
    """

    def __init__(self, optimizer: DistributedOptimizer, size: int, buffers: Sequence) -> None:
        self.size = size
        own = [] if optimizer.is_stub_optimizer else optimizer.buffers
        self._buckets = [(buffer, bucket) for buffer in own for bucket in buffer.buckets]
        self._places = {id(buffer): place for place, buffer in enumerate(buffers)}

    @property
    def num_elements(self) -> list[int]:
        """The elements of a shard, for each bucket."""
        return [bucket.grad_data.numel() // self.size for _, bucket in self._buckets]

    @property
    def weight_dtypes(self) -> list[torch.dtype]:
        """The dtype of the weights of each bucket."""
        return [buffer.param_dtype for buffer, _ in self._buckets]

    def parts(self, shard: int) -> Iterator[tuple[int, Part]]:
        """The parts of parameters in a shard, each with the number of its bucket, in megatron.core's order."""
        for number, ((buffer, bucket), length) in enumerate(zip(self._buckets, self.num_elements, strict=True)):
            first = bucket.offset + shard * length
            found = DistributedOptimizer._build_model_gbuf_param_range_map(
                buffer.param_index_map, Range(first, first + length), bucket.offset
            )
            for parameter, ranges in found.items():
                yield number, Part(parameter, _slice(ranges["gbuf_local"]), _slice(ranges["param"]))

    def whole(self, parameter: Parameter) -> tuple[int, slice]:
        """The bucket of a parameter, and where it lies in the bucket."""
        for number, (buffer, bucket) in enumerate(self._buckets):
            if parameter in bucket.params:
                start, stop, _ = buffer.param_index_map[parameter]
                return number, slice(start - bucket.offset, stop - bucket.offset)
        raise AssertionError("a parameter outside of all buckets")

    def has(self, parameter: Parameter) -> bool:
        """Whether a parameter lies in the buffers."""
        return any(parameter in bucket.params for _, bucket in self._buckets)

    def gradients(self, slot: GradientSlot, shard: int) -> Flats:
        """A shard of a gradient slot, on the host: views if the slot lies there."""
        return [
            bucket_of(slot.flats[self._places[id(buffer)]], bucket).chunk(self.size)[shard].cpu()
            for buffer, bucket in self._buckets
        ]

    def filled(self, shard: int, of: Callable[[Part], Tensor], dtypes: Sequence[torch.dtype] | None = None) -> Flats:
        """New flat tensors of a shard, with `of(part)` in the place of each part, and zeros elsewhere."""
        dtypes = dtypes or [torch.float32] * len(self._buckets)
        flats = [torch.zeros(length, dtype=dtype) for length, dtype in zip(self.num_elements, dtypes, strict=True)]
        for number, part in self.parts(shard):
            flats[number][part.in_shard].copy_(of(part))
        return flats


class ShardCopy:
    """The shard of another rank on this host, with an optimizer that steps it on a thread of its own.

    Args:
        own: the optimizer of this rank's shard, whose settings the copy follows.
        group_of: the number of the group of each parameter.
        states: the name of a state -> its flats.
        older: the weights, or the masters, of the version before; None if nothing reads them.
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
            master, *rest = (states[name][number][part.in_shard] for name in STATES)
            groups[group_of[part.parameter]]["params"].append(master)
            moments[master] = dict(zip(STATES[1:], rest, strict=True))
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
        return count_of(self.optimizer)


def _slice(found: Range) -> slice:
    return slice(found.start, found.end)


def _settings(group: dict) -> dict:
    return {name: value for name, value in group.items() if name != "params"}


def count_of(optimizer: torch.optim.Optimizer | None) -> float:
    states = [] if optimizer is None else optimizer.state.values()
    return max((float(state["step"]) for state in states), default=0.0)
