"""A meter of the device's bytes on a CPU, from outside: every storage that torch's operations make on the thread that
computes, until it is gone. The host's memory is a shared mapping, and known by that.
"""

from __future__ import annotations

import bisect
import re
import sys

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DeviceMeter(TorchDispatchMode):
    """`peak`: the most bytes that were there at once; what was there before, or is the host's, does not count, nor do
    storages of fewer bytes than `least`.
    """

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self._least = least
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}  # by address
        self._at_most = 0  # bytes that may be live: what is gone is looked for only where they exceed the peak
        self._shared = shared_mappings()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        if self._at_most > self.peak:
            self._forget_what_is_gone()
            self.peak = max(self.peak, self._at_most)
        return result

    def set_host_aside(self) -> None:
        """What the host has mapped since the meter began is not the device's; the peak is what there is now."""
        self._shared = shared_mappings()
        self._live = {address: each for address, each in self._live.items() if not self._is_shared(address)}
        self._forget_what_is_gone()
        self.peak = self._at_most

    def _is_shared(self, address: int) -> bool:
        index = bisect.bisect_right(self._shared, (address, sys.maxsize)) - 1
        return index >= 0 and address < self._shared[index][1]

    def _note(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        known, known_size = self._live.get(address, (None, 0))
        if known is not None and known_size == size and not known.expired():
            return
        if size >= self._least and not self._is_shared(address):
            self._live[address] = StorageWeakRef(storage), size
            self._at_most += size

    def _forget_what_is_gone(self) -> None:
        self._live = {address: each for address, each in self._live.items() if not each[0].expired()}
        self._at_most = sum(size for _, size in self._live.values())


def shared_mappings() -> list[tuple[int, int]]:
    """First and end address of each of this process's mappings that are shared, ascending."""
    with open("/proc/self/maps") as lines:
        fields = [re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ", line).groups() for line in lines]
    return [(int(start, 16), int(end, 16)) for start, end, flags in fields if flags.endswith("s")]
