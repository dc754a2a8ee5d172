"""Amounts of work of one GPU, by kind.

Everything that takes time on a GPU is one of four kinds, each with a resource of its own:

    products      matrix products, (operations, calls), bound by arithmetic; those in FP8 apart, at a peak of their own;
                  `unaligned` are operations of those whose rows do not begin at multiples of 16 bytes
    traffic       bytes that other kernels read and write, bound by memory
    exchanged     bytes that a tensor rank sends to the others while it computes nothing
    overlapped    bytes that it sends while it multiplies

Ranks that share sequences or experts send over links of their own:

    ring          bytes of keys and values that a context parallel rank passes on beside the attention's core, in all
                  steps but the last; `ring_operations` and `ring_calls` are those of the core beside them
    gathered      bytes that it sends to gather keys and values, while it computes nothing
    dispatched    bytes of tokens on their way to experts and back, likewise
    spread        of these between ranks that have parts of the same experts, likewise

and experts multiply in groups:

    grouped       operations of their products, and bytes of the matrices that these read
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """See the module."""

    operations: float = 0.0
    calls: float = 0.0
    traffic: float = 0.0
    exchanged: float = 0.0
    overlapped: float = 0.0
    kernels: float = 0.0
    collectives: float = 0.0
    grouped_operations: float = 0.0
    grouped_bytes: float = 0.0
    fp8_operations: float = 0.0
    ring: float = 0.0
    ring_operations: float = 0.0
    ring_calls: float = 0.0
    gathered: float = 0.0
    dispatched: float = 0.0
    spread: float = 0.0
    attended: float = 0.0
    unaligned: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self._values, other._values, strict=True)))

    def __mul__(self, factor: float) -> Work:
        return Work(*(factor * value for value in self._values))

    @property
    def _values(self) -> tuple[float, ...]:
        return (
            self.operations, self.calls, self.traffic, self.exchanged, self.overlapped, self.kernels, self.collectives,
            self.grouped_operations, self.grouped_bytes,
            self.fp8_operations, self.ring, self.ring_operations, self.ring_calls, self.gathered, self.dispatched,
            self.spread, self.attended, self.unaligned,
        )  # fmt: skip
