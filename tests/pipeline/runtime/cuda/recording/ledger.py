"""Who has read and written which bytes, and whether that was in order.

Memory is known by its storage. A storage belongs to the stream that was current when it was made, as with torch's
caching allocator: once the host has dropped it, that stream may be given its memory at once. So whoever else works on
it has to be known to be done by then, to that stream or to the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.pipeline.runtime.cuda.recording.clocks import Step, Timeline, knows


@dataclass(frozen=True)
class Access:
    """A read or write of the bytes [start, end) of a storage."""

    step: Step
    writes: bool
    start: int
    end: int
    what: str

    def overlaps(self, other: Access) -> bool:
        return self.start < other.end and other.start < self.end

    def covers(self, other: Access) -> bool:
        return self.start <= other.start and other.end <= self.end


@dataclass
class Memory:
    """A storage: whose it is, what it is called, and the accesses that later ones have to come after."""

    reference: StorageWeakRef
    owner: int
    name: str
    on_device: bool = False
    is_host: bool = False  # the allocator of pinned memory asks the device itself before it gives a block away
    is_foreign: bool = False
    accesses: list[Access] = field(default_factory=list)


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the end."""
    start = tensor.storage_offset() * tensor.itemsize
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


class Ledger:
    """All memory that was touched and still lives."""

    def __init__(self, report, place) -> None:
        self._report = report
        self._place = place
        self._memory: dict[int, Memory] = {}
        self._foreign: dict[int, Memory] = {}
        self._most = 1000

    def of(self, tensor: Tensor, stream: Timeline) -> Memory:
        """The memory behind a tensor; new memory belongs to `stream`."""
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None or memory.reference.expired():
            name = f"{tensor.dtype} {tuple(tensor.shape)}, first seen in {self._place()}"
            memory = Memory(StorageWeakRef(storage), stream.number, name)
            if len(self._memory) > self._most:
                self._forget_gone()
            self._memory[storage._cdata] = memory
        return memory

    def has(self, tensor: Tensor) -> bool:
        """Whether it was seen before."""
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        return memory is not None and not memory.reference.expired()

    def _forget_gone(self) -> None:
        """What only its owner has used needs no last look."""
        gone = [key for key, memory in self._memory.items() if memory.reference.expired() and key not in self._foreign]
        for key in gone:
            del self._memory[key]
        self._most = 2 * len(self._memory) + 1000

    def note(self, tensor: Tensor, stream: Timeline, step: Step, *, writes: bool, what: str) -> None:
        """An access, as `step` of `stream`; its clock says what it comes after."""
        memory = self.of(tensor, stream)
        access = Access(step, writes, *byte_range(tensor), what)
        for earlier in memory.accesses:
            if (writes or earlier.writes) and earlier.overlaps(access) and not knows(stream.clock, earlier.step):
                self._report("unordered", f"{memory.name}: {what}, not ordered after {earlier.what}")
        memory.accesses = [
            earlier
            for earlier in memory.accesses
            if not ((writes or (not earlier.writes and earlier.step[0] == step[0])) and access.covers(earlier))
        ]
        memory.accesses.append(access)
        if step[0] != memory.owner and not memory.is_foreign and not memory.is_host:
            memory.is_foreign = True
            self._foreign[memory.reference.cdata] = memory

    def find_freed(self, streams: dict[int, Timeline], hosts: list[Timeline]) -> None:
        """Memory that is gone since the last look: was everybody else done with it?"""
        for key in [key for key, memory in self._foreign.items() if memory.reference.expired()]:
            memory = self._foreign.pop(key)
            if self._memory.get(key) is memory:
                del self._memory[key]
            clocks = [streams[memory.owner].clock, *(host.clock for host in hosts)]
            for access in memory.accesses:
                if access.step[0] != memory.owner and not any(knows(clock, access.step) for clock in clocks):
                    self._report("freed", f"{memory.name}: dropped while the device may still be at {access.what}")
                    break
