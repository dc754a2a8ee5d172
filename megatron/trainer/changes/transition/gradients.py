"""The memory of a weight update's gradient buffers, given up while the pipeline is drained.

Between two batches nobody reads a gradient: a batch begins with zeros. So while the new chunks are built, which have
buffers of their own, those of the old ones need not take memory, and if the run stays with these they are made anew.
Whatever refers to a buffer (views of parameters, buckets, shards) refers to its storage, which stays the same and is
empty meanwhile.
"""

import torch

from megatron.pipeline.runtime.stages.megatron.gradients import CoreGradientBuffers


class GradientMemory:
    """The gradient memory of a drained `update`; nothing where it has no gradients, as on a rank that is frozen."""

    def __init__(self, update: object) -> None:
        buffers: CoreGradientBuffers | None = getattr(update, "_gradients", None)
        slots = [] if buffers is None else [buffers[slot] for slot in range(buffers.num_slots)]
        storages = [flat.untyped_storage() for slot in slots for flat in slot.flats]
        self._storages = [storage for storage in storages if storage.resizable()]  # numpy may have a view of some
        self._num_bytes = [storage.nbytes() for storage in self._storages]

    def release(self) -> None:
        for storage in self._storages:
            storage.resize_(0)

    def take_again(self) -> None:
        """Zeros. As much memory as before has to be there."""
        for storage, num_bytes in zip(self._storages, self._num_bytes, strict=True):
            storage.resize_(num_bytes)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
