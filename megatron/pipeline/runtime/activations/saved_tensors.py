"""The tensors that autograd saves for one microbatch: taken out of its graph and put back.

Problem: between a forward and its backward the memory of a stage lies in tensors that only the autograd graph knows.
To move them to another rank they have to be found, copied, and really freed. Later the backward has to find them again,
with the same bits and strides, and with views of one storage sharing memory as before. Other tensors that a graph saves
must stay: parameters of any weight version, and masks and tables that other microbatches also use.

Solution: `torch.autograd.graph.saved_tensors_hooks` around the forward. Instead of a tensor the graph saves a handle.
A handle can lose its tensor and get it back. Only weak references to the handles are kept, so that a backward frees
memory node by node as usual.

Tensors that stay are recognised by their storage, whichever view of it is saved. The caller names the storages of
parameters and data, and the storages that another microbatch has also saved (`CapturedActivations`). The number of
holders of a storage is no criterion: a collective's thread holds its tensors slightly longer, so the result would
differ between microbatches. Tensors that storage and strides do not fully describe (subclasses, sparse tensors, lazy
conjugates) stay as well, with all they hold. Autograd does not check hooked tensors for in-place changes, so the
handles check.

A stage saves hundreds of views of dozens of storages. To be moved they have to lie in one piece of memory, each byte
once. The size has to be equal for every microbatch, so that buffers can be reused. So the saved byte ranges of each
storage are merged where they overlap, and the merged ranges (spans) are laid out one after another. A span keeps the
remainder modulo `ALIGNMENT` that its start had in its storage, since backward kernels may round differently at another
alignment. Shapes are fixed, so the layout is fixed, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# --- the layout in one flat buffer ------------------------------------------------------------------------------------

ALIGNMENT = 256  # bytes; kernels look at no coarser alignment (torch's allocators align at 64 on CPU, 512 on CUDA)


@dataclass(frozen=True)
class ActivationLayout:
    """The (position, length) of each span in a buffer, in bytes, ascending. Equal layouts may share buffers."""

    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> ActivationLayout:
        """Lay out byte ranges in the given order, each as (start, end) in its storage."""
        spans, end = [], 0
        for start, stop in ranges:
            position = -(-end // ALIGNMENT) * ALIGNMENT + start % ALIGNMENT
            spans.append((position, stop - start))
            end = position + stop - start
        return cls(tuple(spans))

    @property
    def saved_bytes(self) -> int:
        """The number of saved bytes, without the gaps between spans."""
        return sum(length for _, length in self.spans)

    @property
    def buffer_bytes(self) -> int:
        """The size in bytes of a buffer for all spans."""
        return sum(self.spans[-1]) if self.spans else 0

    def require_equal(self, other: ActivationLayout, what: str) -> None:
        """Raise ValueError if `other`, the layout of `what`, differs from this one."""
        if self == other:
            return
        pairs = zip(self.spans, other.spans, strict=False)
        count = min(len(self.spans), len(other.spans))
        first = next((i for i, (mine, theirs) in enumerate(pairs) if mine[1] != theirs[1]), count)
        raise ValueError(
            f"{what} saves {other.saved_bytes} bytes in {len(other.spans)} pieces, the stage's first evicted "
            f"microbatch {self.saved_bytes} bytes in {len(self.spans)} (piece {first} differs first); moved "
            "activations need microbatches of one shape, so keep the sequence length fixed or move none"
        )


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of the ranges (start, end), ascending. Adjacent ranges are merged, too."""
    union: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(stop, union[-1][1])
        else:
            union.append((start, stop))
    return union


# --- out of a graph and back ------------------------------------------------------------------------------------------


def storages_of(tensors: Iterable[Tensor | None]) -> set[int]:
    """Return identities of the tensors' storages. An identity is valid while its storage is referenced, even weakly."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}


class _Handle:
    """The object that the graph saves in place of a tensor.

    `place`: (dtype, byte position in the buffer, shape, stride), set by an eviction.
    """

    __slots__ = ("__weakref__", "owner", "place", "tensor", "version")

    def __init__(self, owner: SavedTensors, tensor: Tensor) -> None:
        self.owner = owner
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.place = None

    def get(self) -> Tensor:
        if self.owner.is_evicted:
            raise RuntimeError(
                f"the backward of {self.owner.name} reads a saved tensor that was evicted and not loaded again"
            )
        self.require_unchanged()
        return self.tensor

    def require_unchanged(self) -> None:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"{self.owner.name}: a {self.tensor.dtype} tensor of shape {tuple(self.tensor.shape)} that its "
                f"backward needs was changed in place after it had been saved (version {self.tensor._version}, "
                f"expected {self.version})"
            )

    def byte_range(self) -> tuple[int, int]:
        """Return (first byte, end) of the tensor in its storage."""
        tensor = self.tensor
        itemsize = tensor.itemsize
        start = tensor.storage_offset() * itemsize
        if tensor.is_contiguous():
            return start, start + tensor.nbytes
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return start, start + (last + 1) * itemsize


@dataclass
class _Span:
    """A piece of a storage: its bytes [start, end). `members`: (handle, first byte within the piece) of its tensors."""

    storage: int
    start: int
    end: int
    members: list[tuple[weakref.ref[_Handle], int]]


class SavedTensors:
    """One microbatch's saved tensors at one stage.

    Order of use: run the forward inside `hooks()`, then call `seal`. Then call `leave`, `evict` and `restore` in this
    order, zero or more times. Then run the backward. `evict` may run on another thread, since nothing else reads the
    tensors between `leave` and `restore`.

    Attributes:
        name: the microbatch and stage, for errors.
        layout: the layout of the tensors that move; None before `seal`.
        is_evicted: whether the tensors that move have left.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.layout: ActivationLayout | None = None
        self._handles: list[weakref.ref[_Handle]] = []
        self._spans: list[_Span] = []
        self.is_evicted = False

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context for the forward. Hooks set inside it (non-reentrant checkpoints) take precedence."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, _Handle.get)

    def pack(self, tensor: Tensor) -> _Handle:
        """Return a handle for a tensor, which moves with the others if it can. `handle.get()` returns the tensor."""
        handle = _Handle(self, tensor.detach())  # the tensor itself would make a cycle with its graph
        if _can_move(handle.tensor):
            self._handles.append(weakref.ref(handle))
        return handle

    def seal(self, *, stay: set[int], device: torch.device) -> dict[int, StorageWeakRef]:
        """End the forward: all its saved tensors on `device` move, except those with a storage in `stay`.

        Returns the storages that move, by identity. A storage also stays if the forward has freed it on purpose, to
        fill it again in the backward.
        """
        moving = {}
        for storage, handles in self._by_storage().items():
            first = handles[0].tensor
            if storage in stay or first.device != device:
                continue
            ranges = [handle.byte_range() for handle in handles]
            if max(ranges, key=itemgetter(1))[1] <= first.untyped_storage().nbytes():
                self._add_spans(storage, handles, ranges)
                moving[storage] = StorageWeakRef(first.untyped_storage())
        self._handles.clear()
        self.exclude(set())
        return moving

    def exclude(self, storages: set[int]) -> None:
        """Let these storages stay, too. Call it only while not evicted."""
        assert not self.is_evicted
        self._spans = [span for span in self._spans if span.storage not in storages]
        self.layout = ActivationLayout.of((span.start, span.end) for span in self._spans)

    def _by_storage(self) -> dict[int, list[_Handle]]:
        groups: dict[int, list[_Handle]] = {}
        for reference in self._handles:
            handle = reference()
            if handle is not None:  # None: its part of the graph is gone already
                groups.setdefault(handle.tensor.untyped_storage()._cdata, []).append(handle)
        return groups

    def _add_spans(self, storage: int, handles: list[_Handle], ranges: list[tuple[int, int]]) -> None:
        """Add a span for each connected piece of the storage that the `ranges` of `handles` cover."""
        for first, end in merged(ranges):
            inside = (
                (weakref.ref(h), s - first) for h, (s, _) in zip(handles, ranges, strict=True) if first <= s < end
            )
            self._spans.append(_Span(storage, first, end, list(inside)))

    def leave(self) -> None:
        """Mark the tensors as evicted: the backward cannot read them, and the set of tensors that move is fixed.

        Raises RuntimeError if they are evicted already.
        """
        if self.is_evicted:
            raise RuntimeError(f"{self.name} cannot be evicted: it is evicted already")
        self.is_evicted = True

    def evict(self, buffer: Tensor) -> list[Tensor]:
        """Copy the tensors that move into `buffer`, and drop them. Call `leave` before.

        `buffer`: uint8 [layout.buffer_bytes] on the tensors' device or the host; on CUDA the current stream copies.
        Returns the dropped tensors, which the caller holds until the copies are made. Raises RuntimeError if a tensor
        was changed in place after it had been saved.
        """
        assert self.is_evicted, "`leave` comes first"
        self._require_fit(buffer)
        moved = []
        for (position, length), span in zip(self.layout.spans, self._spans, strict=True):
            handles = [(handle, offset) for reference, offset in span.members if (handle := reference()) is not None]
            if handles:
                tensor = handles[0][0].tensor
                buffer[position : position + length].copy_(_bytes_of(tensor)[span.start : span.end], non_blocking=True)
            for handle, offset in handles:
                handle.place = handle.tensor.dtype, position + offset, handle.tensor.shape, handle.tensor.stride()
                moved.append(handle)
        for handle in moved:
            handle.require_unchanged()
        left = [handle.tensor for handle in moved]
        for handle in moved:
            handle.tensor = None
        return left

    def restore(self, buffer: Tensor) -> None:
        """Make the saved tensors views of `buffer`, which holds the bytes that `evict` wrote.

        Nothing may write to the buffer before the backward has ended; see `BufferPool`. Raises RuntimeError if the
        tensors are not evicted.
        """
        if not self.is_evicted:
            raise RuntimeError(f"{self.name} cannot be loaded: it is not evicted")
        self._require_fit(buffer)
        storage, start = buffer.untyped_storage(), buffer.storage_offset()
        for span in self._spans:
            for reference, _ in span.members:
                handle = reference()
                if handle is None:
                    continue
                dtype, position, shape, stride = handle.place
                tensor = torch.empty(0, dtype=dtype, device=buffer.device)
                handle.tensor = tensor.set_(storage, (start + position) // dtype.itemsize, shape, stride)
                handle.version = handle.tensor._version
        self.is_evicted = False

    def _require_fit(self, buffer: Tensor) -> None:
        expected = self.layout.buffer_bytes
        if buffer.dtype != torch.uint8 or buffer.shape != (expected,) or not buffer.is_contiguous():
            raise ValueError(
                f"{self.name} moves in a contiguous buffer of {expected} bytes (uint8), not in {buffer.dtype} "
                f"{tuple(buffer.shape)}; take it from the pool with the stage's layout"
            )
        assert buffer.storage_offset() % 16 == 0, "a buffer that starts between two elements"


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of `tensor` as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _can_move(tensor: Tensor) -> bool:
    """Return whether dtype, shape, strides and the bytes of its storage describe the tensor completely."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return is_plain and tensor.numel() > 0 and not tensor.is_conj() and not tensor.is_neg()
