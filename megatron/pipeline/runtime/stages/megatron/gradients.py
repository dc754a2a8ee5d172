"""Gradient buffers: while the chain reduces one batch's gradients, the next batch accumulates into another buffer.

megatron.core's DDP gives every parameter a `main_grad`, a view of one flat buffer, and adds each backward's gradient to
it. A slot here is one such set of flat buffers; slot 0 is DDP's own, a second is made when a batch begins its
backwards while the first is still needed. Switching repoints every place in which megatron.core keeps a reference:
the buffer, its buckets, the bucket groups' cached shards and the parameters.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.core.distributed import DistributedDataParallel


@dataclass
class GradientSlot:
    """One set of flat gradient buffers, and each parameter's view of them."""

    flats: list[Tensor]
    views: dict[Parameter, Tensor]


class CoreGradientBuffers:
    """All gradient buffers of the DDP-wrapped chunks of one rank."""

    def __init__(self, chunks: list[DistributedDataParallel]) -> None:
        self._chunks = chunks
        self.buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
        self._slots = [self._slot([buffer.grad_data for buffer in self.buffers])]
        self._busy: set[int] = set()
        self._shown = 0

    @property
    def num_slots(self) -> int:
        """Slots allocated so far."""
        return len(self._slots)

    def _slot(self, flats: list[Tensor]) -> GradientSlot:
        views = {}
        for buffer, flat in zip(self.buffers, flats, strict=True):
            for param, (start, end, _) in buffer.param_index_map.items():
                views[param] = flat[start:end].view(param.shape)
        return GradientSlot(flats, views)

    def take(self) -> int:
        """Reserve a free slot, zeroed, for a batch; returns its number. Allocates where none is free."""
        for slot in range(len(self._slots)):
            if slot not in self._busy:
                for flat in self._slots[slot].flats:
                    flat.zero_()
                break
        else:
            self._slots.append(self._slot([torch.zeros_like(flat) for flat in self._slots[0].flats]))
            slot = len(self._slots) - 1
        self._busy.add(slot)
        return slot

    def copy_of(self, slot: int) -> GradientSlot:
        """What a slot holds now, in memory of its own."""
        return self._slot([flat.clone() for flat in self._slots[slot].flats])

    def release(self, slot: int) -> None:
        """The gradients in `slot` are no longer needed."""
        self._busy.discard(slot)

    def __getitem__(self, slot: int) -> GradientSlot:
        return self._slots[slot]

    @property
    def shown(self) -> int:
        """The slot that backwards accumulate into."""
        return self._shown

    def show(self, slot: int) -> None:
        """Let backwards accumulate into `slot`, and megatron.core's optimizers read from it."""
        if slot == self._shown:
            return
        content = self._slots[slot]
        for buffer, flat in zip(self.buffers, content.flats, strict=True):
            buffer.grad_data = flat
            for bucket in buffer.buckets:
                bucket.grad_data = bucket_of(flat, bucket)
        for chunk in self._chunks:
            for group in chunk.bucket_groups:
                group.cached_grad_buffer_shard_list = [None] * len(group.buckets)
        for param, view in content.views.items():
            param.main_grad = view
        self._shown = slot

    def start_accumulation(self) -> None:
        """Forget which parameters' gradients a fused kernel has already added (megatron.core sets it per batch)."""
        for chunk in self._chunks:
            for param in chunk.params_with_grad:
                param.grad_added_to_main_grad = False


def bucket_of(flat: Tensor, bucket) -> Tensor:
    """The part of a flat buffer that one of its buckets covers."""
    return flat[bucket.offset : bucket.offset + bucket.grad_data.numel()]
