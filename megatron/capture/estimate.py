"""An estimate of the cost of each block of a captured model on a device that is not present, by the roofline model.

Problem: the search for a partition needs the costs of a device, and neither the device nor the memory for the model may
be present. Solution: the blocks run as in a profile, forward and backward, on tensors that have shapes and no memory.
Each kernel gets an estimated time instead of a measured one: the time of its floating-point operations at the rate of
matrix products, or of its bytes at the memory's rate, whichever is longer, and a launch. The model does not know
caches, fused kernels and the inefficiency of small matrices. The bytes of saved tensors and of outputs are exactly
as in a profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron.capture.export import Captured
from megatron.capture.profile import BlockCost, GraphProfiler
from megatron.capture.randomness import seeded_dropout

aten = torch.ops.aten

_LOOKS_UP = {aten.embedding, aten.gather, aten.index, aten.index_select}
"""Operators that read only as many bytes of their first argument as they return."""
_COUNTED_AS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
_MAKES_NOTHING = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


@dataclass(frozen=True)
class Roofline:
    """The rates that kernels reach on a device, in contrast to the device's nominal rates.

    Attributes:
        teraflops: 10^12 floating-point operations a second in matrix products; a multiplication and an addition are
            two operations.
        gigabytes_per_second: 10^9 bytes a second from and to the device's memory.
        launch_microseconds: additional microseconds for the launch of each kernel.

    Raises ValueError for a rate that is not above 0, or a launch below 0.
    """

    teraflops: float
    gigabytes_per_second: float
    launch_microseconds: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value, may_be_0 = getattr(self, each.name), each.name == "launch_microseconds"
            if not 0 <= value < float("inf") or (value == 0 and not may_be_0):
                raise ValueError(f"{each.name} is {value:g}; give what the device reaches, a number above 0")

    def milliseconds(self, flops: float, num_bytes: float) -> float:
        """The estimated time of one kernel."""
        work = max(flops / (self.teraflops * 1e9), num_bytes / (self.gigabytes_per_second * 1e6))
        return work + self.launch_microseconds / 1e3


def estimate(captured: Captured, batch: Mapping[str, Tensor], roofline: Roofline) -> tuple[BlockCost, ...]:
    """Estimate the cost of each block of `blocks_of` on a device with these rates, in the form that `profile` returns.

    `batch`: a microbatch of the size that will be trained; its values do not matter.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return _Estimator(captured, {name: mode.from_tensor(each) for name, each in batch.items()}, roofline).run(None)


def estimated_milliseconds(work: Callable[[], object], roofline: Roofline) -> float:
    """The estimated time of all kernels that `work` runs on tensors without memory."""
    with _Meter(roofline) as meter:
        work()
    return meter.milliseconds


class _Estimator(GraphProfiler):
    def __init__(self, captured: Captured, batch: Mapping[str, Tensor], roofline: Roofline) -> None:
        super().__init__(captured, batch, repeats=1)
        self._roofline = roofline

    def timed(self, work: Callable[[], object]) -> tuple[float, object]:
        with _Meter(self._roofline) as meter:
            result = work()
        return meter.milliseconds, result

    def apply(self, target: Callable, args: tuple, kwargs: Mapping[str, object]) -> object:
        """Compute one operator. Dropout is one kernel that saves a byte for each element, as on a GPU; a CPU uses four
        kernels and saves floats."""
        if target is seeded_dropout:
            _, _, tensor, probability = args
            return torch.native_dropout(tensor, probability, True)[0]
        return super().apply(target, args, kwargs)


class _Meter(TorchDispatchMode):
    """A block that adds up the estimated times of the kernels that run within it, in `milliseconds`."""

    def __init__(self, roofline: Roofline) -> None:
        super().__init__()
        self._roofline = roofline
        self.milliseconds = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given, made = list(_tensors((args, kwargs))), list(_tensors(result))
        kernel = func.overloadpacket
        if kernel not in _MAKES_NOTHING and not _is_view(func, given, made):
            count = flop_registry.get(_COUNTED_AS.get(kernel, kernel))
            flops = count(*args, **(kwargs or {}), out_val=result) if count else 0
            read = made + given[1:] if kernel in _LOOKS_UP else given
            self.milliseconds += self._roofline.milliseconds(flops, sum(map(_num_bytes, (*read, *made))))
        return result


def _tensors(values: object) -> Iterator[Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, Tensor))


def _is_view(func, given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether an operator writes nothing, and returns only memory of its inputs."""
    there = {each.untyped_storage()._cdata for each in given}
    return not func._schema.is_mutable and all(each.untyped_storage()._cdata in there for each in made)


def _num_bytes(tensor: Tensor) -> int:
    """The bytes of memory that a tensor spans. Expanded elements count once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
