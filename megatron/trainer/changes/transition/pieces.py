"""What a sharded state dict holds, as parts of whole tensors: where each lies, and a view of its data."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.trainer.changes.transition.boxes import Box, Shape, boxes_of_range
from megatron.trainer.changes.transition.plan import TensorPart
from megatron.trainer.checkpoint.element_ranges import ElementRange


class Piece(NamedTuple):
    """A part of the tensor `key`, whose whole shape is `global_shape`.

    `data` has the shape of `box`.
    """

    key: str
    box: Box
    data: Tensor
    global_shape: Shape

    def part(self) -> TensorPart:
        in_order = self.data.is_contiguous() and self.data.device.type == "cpu"
        return TensorPart(self.key, self.box, self.data.element_size(), in_order)

    def view(self, box: Box) -> Tensor:
        """The data of `box`, which lies in the piece's."""
        return self.data[box.within(self.box)]


def pieces_of(values: Iterable[ShardedTensor | ElementRange]) -> list[Piece]:
    """The pieces of sharded tensors and element ranges, in order."""
    return [piece for value in values for piece in _pieces(value)]


def _pieces(value: ShardedTensor | ElementRange) -> Iterator[Piece]:
    if isinstance(value, ShardedTensor):
        yield _piece(value, Box.at((0,) * len(value.local_shape), value.local_shape), value.data.detach())
        return
    for whole, first, data in value.overlaps():
        begin = 0
        for box in boxes_of_range(tuple(whole.local_shape), first, first + len(data)):
            yield _piece(whole, box, data[begin : begin + box.size].view(box.shape))
            begin += box.size


def _piece(sharded: ShardedTensor, box: Box, data: Tensor) -> Piece:
    """The piece of `box`, in coordinates of the local tensor."""
    prepended = sharded.prepend_axis_num
    local = Box((0,) * prepended + box.start, (1,) * prepended + box.stop)
    offset = sharded.global_offset
    whole = Box(
        tuple(start + origin for start, origin in zip(local.start, offset, strict=True)),
        tuple(stop + origin for stop, origin in zip(local.stop, offset, strict=True)),
    )
    return Piece(sharded.key, whole, data[(None,) * prepended], tuple(sharded.global_shape))


def share_memory(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether a byte of one of these tensors is one of those, too."""
    spans = sorted([(*_span(each), 0) for each in some if each.numel()] + [(*_span(each), 1) for each in others
                                                                          if each.numel()])  # fmt: skip
    ends: dict[int, tuple] = {}
    for device, start, end, side in spans:
        if ends.get(1 - side, ("", 0)) > (device, start):
            return True
        ends[side] = max(ends.get(side, ("", 0)), (device, end))
    return False


def _span(tensor: Tensor) -> tuple[str, int, int]:
    """Device, and the addresses that a tensor reaches over."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def dtype_name(tensor: Tensor) -> str:
    """The dtype as users write it: "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def empty_bytes(num_bytes: int) -> Tensor:
    """Host memory for a message."""
    return torch.empty(num_bytes, dtype=torch.uint8)
