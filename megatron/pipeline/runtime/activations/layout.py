"""Where the saved tensors of a microbatch lie in one flat buffer.

Problem: the saved tensors of a stage are hundreds of views of dozens of storages, and parts of a storage may be saved
twice or not at all. To move them they have to lie in one piece of memory, each byte once, of the same size for every
microbatch, so that the buffers can be made once and used again.

Solution: the byte ranges that are saved of each storage are merged where they overlap, and the merged ranges (spans)
are laid out one after another. A span starts at the same remainder of `ALIGNMENT` as it had in its storage, since
the kernels of a backward may round differently at another alignment. Shapes are fixed, so the layout is too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
        """Bytes of a buffer that holds them."""
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
