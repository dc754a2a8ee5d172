"""The tensors that autograd saved of one microbatch: taken out of its graph and put back.

Problem: between a forward and its backward the memory of a stage lies in tensors that only the autograd graph knows.
To move them to another rank they have to be found, copied, truly freed, and later found again by the backward, with
the same bits, the same strides, and one memory behind several views of it. Much else that a graph saves must stay:
parameters, of whichever weight version, masks and tables that other microbatches use too.

Solution: `torch.autograd.graph.saved_tensors_hooks` around the forward. Instead of a tensor the graph saves a handle,
and a handle can lose its tensor and get it back. Handles are remembered weakly, so that a backward frees memory node by
node as it always does.

What stays is known by its storage, whatever view of it is saved: the caller names the storages of parameters and data,
and those that another microbatch has saved too (`CapturedActivations`). Who else holds a storage is no criterion: a
collective's thread holds its tensors for a moment longer, so the answer would differ from one microbatch to the next.
Tensors whose memory does not describe them (subclasses, sparse ones, lazy conjugates) stay as well, and what they hold
with them. Autograd does not check hooked tensors for changes in place, so the handles do.

To be moved, the saved tensors of a stage, hundreds of views of dozens of storages, have to lie in one piece of memory,
each byte once, of the same size for every microbatch, so that the buffers can be made once and used again. So the byte
ranges that are saved of each storage are merged where they overlap, and the merged ranges (spans) are laid out one
after another. A span starts at the same remainder of `ALIGNMENT` as it had in its storage, since the kernels of a
backward may round differently at another alignment. Shapes are fixed, so the layout is too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# --- where they lie in one flat buffer --------------------------------------------------------------------------------

ALIGNMENT = 256  # bytes; a multiple of what torch's allocators (64 on CPU, 512 on CUDA) and kernels look at


@dataclass(frozen=True)
class ActivationLayout:
    """Spans in one buffer: (position, length) in bytes, in order. Equal layouts may share buffers."""

    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> ActivationLayout:
        """Lay out byte ranges (start in their storage, end), in this order."""
        spans, end = [], 0
        for start, stop in ranges:
            position = -(-end // ALIGNMENT) * ALIGNMENT + start % ALIGNMENT
            spans.append((position, stop - start))
            end = position + stop - start
        return cls(tuple(spans))

    @property
    def saved_bytes(self) -> int:
        """Bytes that are saved, without the gaps between spans."""
        return sum(length for _, length in self.spans)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a buffer for all spans."""
        return sum(self.spans[-1]) if self.spans else 0

    def require_equal(self, other: ActivationLayout, what: str) -> None:
        """Raise ValueError when `what` is laid out as `other` and not like this."""
        if self == other:
            return
        pairs = zip(self.spans, other.spans, strict=False)
        count = min(len(self.spans), len(other.spans))
        first = next((i for i, (mine, theirs) in enumerate(pairs) if mine[1] != theirs[1]), count)
        raise ValueError(
            f"{what} saves {other.saved_bytes} bytes in {len(other.spans)} pieces, the stage's first evicted "
            f"microbatch {self.saved_bytes} bytes in {len(self.spans)} (piece {first} differs first); moved "
            "activations need microbatches of one shape, so keep the sequence length fixed or do not balance"
        )


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Union of the ranges (start, end), ascending; ranges that only touch are merged too."""
    union: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(stop, union[-1][1])
        else:
            union.append((start, stop))
    return union


# --- out of a graph and back ------------------------------------------------------------------------------------------


def storages_of(tensors: Iterable[Tensor | None]) -> set[int]:
    """The identities of the tensors' storages, valid while these are referenced, even weakly."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}


class _Handle:
    """What the graph saves in place of a tensor. `place`: (dtype, byte position, shape, stride) once it is evicted."""

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
        """First byte in the storage, and the end."""
        tensor = self.tensor
        itemsize = tensor.itemsize
        start = tensor.storage_offset() * itemsize
        if tensor.is_contiguous():
            return start, start + tensor.nbytes
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return start, start + (last + 1) * itemsize


@dataclass
class _Span:
    """A piece of a storage: its bytes [start, end), and (handle, first byte within the piece) of what lies in it."""

    storage: int
    start: int
    end: int
    members: list[tuple[weakref.ref[_Handle], int]]


class SavedTensors:
    """One microbatch's saved tensors at one stage.

    In order: run the forward inside `hooks()`, then `seal`; then any number of times `leave`, `evict` and `restore`;
    then the backward, which may also come after `seal`. `evict` may run on another thread than all the rest: from
    `leave` to `restore` nobody else looks at the tensors. `name` says whose they are in errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.layout: ActivationLayout | None = None  # known from `seal` on
        self._handles: list[weakref.ref[_Handle]] = []
        self._spans: list[_Span] = []
        self._is_evicted = False

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Context under which the forward runs. Contexts inside of it (reentrant-free checkpoints) take precedence."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, _Handle.get)

    def pack(self, tensor: Tensor) -> _Handle:
        """A handle for a tensor that is to move too; `handle.get()` returns it."""
        handle = _Handle(self, tensor.detach())  # the tensor itself would be a cycle with its graph
        if _can_move(handle.tensor):
            self._handles.append(weakref.ref(handle))
        return handle

    def seal(self, *, stay: set[int], device: torch.device) -> dict[int, StorageWeakRef]:
        """The forward has ended: whatever it saved on `device` moves, but for the storages in `stay`.

        Returns the storages that move. A storage that the forward has freed on purpose, to fill it again in its
        backward, stays.
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
        """Let these storages stay, too; only before an eviction."""
        assert not self._is_evicted
        self._spans = [span for span in self._spans if span.storage not in storages]
        self.layout = ActivationLayout.of((span.start, span.end) for span in self._spans)

    def _by_storage(self) -> dict[int, list[_Handle]]:
        groups: dict[int, list[_Handle]] = {}
        for reference in self._handles:
            handle = reference()
            if handle is not None:  # else its part of the graph is gone already
                groups.setdefault(handle.tensor.untyped_storage()._cdata, []).append(handle)
        return groups

    def _add_spans(self, storage: int, handles: list[_Handle], ranges: list[tuple[int, int]]) -> None:
        """A span for each piece of the storage that `handles` cover with `ranges`."""
        for first, end in merged(ranges):
            inside = (
                (weakref.ref(h), s - first) for h, (s, _) in zip(handles, ranges, strict=True) if first <= s < end
            )
            self._spans.append(_Span(storage, first, end, list(inside)))

    @property
    def is_evicted(self) -> bool:
        return self._is_evicted

    def leave(self) -> None:
        """From now on the tensors are evicted: the backward cannot read them, and what moves stays the same.

        Raises RuntimeError when they are already.
        """
        if self._is_evicted:
            raise RuntimeError(f"{self.name} cannot be evicted: it is evicted already")
        self._is_evicted = True

    def evict(self, buffer: Tensor) -> list[Tensor]:
        """After `leave`: copy what moves into `buffer`, and let go of it.

        `buffer`: uint8 [layout.buffer_bytes] on the tensors' device; on CUDA the current stream copies. Returns what
        was let go of, to be held until the copies are made. Raises RuntimeError when a tensor was changed in place
        after it had been saved.
        """
        assert self._is_evicted, "`leave` comes first"
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
        """Let the saved tensors be views of `buffer`, which holds the bytes that `evict` wrote.

        Nothing may write to the buffer before the backward has ended; see `BufferPool`. Raises RuntimeError when not
        evicted.
        """
        if not self._is_evicted:
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
        self._is_evicted = False

    def _require_fit(self, buffer: Tensor) -> None:
        expected = self.layout.buffer_bytes
        if buffer.dtype != torch.uint8 or buffer.shape != (expected,) or not buffer.is_contiguous():
            raise ValueError(
                f"{self.name} moves in a contiguous buffer of {expected} bytes (uint8), not in {buffer.dtype} "
                f"{tuple(buffer.shape)}; take it from the pool with the stage's layout"
            )
        assert buffer.storage_offset() % 16 == 0, "a buffer that starts between two elements"


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of `tensor` as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _can_move(tensor: Tensor) -> bool:
    """Whether the tensor is given by the bytes of its storage and its strides alone."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return is_plain and tensor.numel() > 0 and not tensor.is_conj() and not tensor.is_neg()
