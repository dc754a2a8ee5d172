"""The connection of two paired ranks on which saved activations move, one at a time, in either direction.

Problem: moves are large, happen all the time, and must not take memory of their own each time. A rank carries them out
one after another on a thread (`MoveQueue`), so a transfer may block, and one connection serves both directions.

Solution: a link class per backend under one face, chosen by data (`MOVE_LINKS`). Both methods return when the transfer
is complete, which takes that both ends have come to it. They wait without a limit: an acceptor may come to a move long
before the evictor does. Who needs the result waits with one (`ActivationTransfers.wait_for`). A peer that is gone is a
RuntimeError at once.

The CUDA classes run in `gpu` tests only. They work on the current stream, which is the move thread's own, and return
when the device has done the work. Over NCCL the two hosts meet first, so that no kernel waits on a device for the
other one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from megatron.pipeline.runtime.links import FOREVER, NUM_TAGS, gloo_pair
from megatron.pipeline.runtime.streams import finish_stream

_SIZE_TAG = NUM_TAGS  # no microbatch has it


class MoveLink(Protocol):
    """One end. Both ends call in the same order, one its `send` where the other calls `receive`."""

    def send(self, buffer: Tensor, tag: int) -> None:
        """Send uint8 [bytes]; afterwards the buffer may be written."""

    def receive(self, buffer: Tensor, tag: int) -> None:
        """Fill uint8 [bytes]."""

    def send_size(self, num_bytes: int) -> None:
        """Tell how large the buffers of a stage are."""

    def receive_size(self) -> int: ...


class GlooMoveLink:
    """CPU buffers over gloo."""

    def __init__(self, name: str, store: Store, *, member: int, timeout: timedelta, device: torch.device) -> None:
        """`member`: 0 at one end, 1 at the other. `timeout`: for connecting."""
        self._group = gloo_pair(name, store, member=member, timeout=timeout)
        self._peer = 1 - member
        self._device = device

    def send(self, buffer: Tensor, tag: int) -> None:
        self._group.send([buffer], self._peer, tag % NUM_TAGS).wait(FOREVER)

    def receive(self, buffer: Tensor, tag: int) -> None:
        self._group.recv([buffer], self._peer, tag % NUM_TAGS).wait(FOREVER)

    def send_size(self, num_bytes: int) -> None:
        self._group.send([torch.tensor([num_bytes])], self._peer, _SIZE_TAG).wait(FOREVER)

    def receive_size(self) -> int:
        size = torch.empty(1, dtype=torch.int64)
        self._group.recv([size], self._peer, _SIZE_TAG).wait(FOREVER)
        return int(size.item())


class HostStagedMoveLink(GlooMoveLink):
    """CUDA buffers over gloo, through pinned host memory that is made once for each size."""

    def __init__(self, name: str, store: Store, **options: Any) -> None:
        super().__init__(name, store, **options)
        self._host: dict[int, Tensor] = {}

    def _staging(self, num_bytes: int) -> Tensor:
        if num_bytes not in self._host:
            self._host[num_bytes] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return self._host[num_bytes]

    def send(self, buffer: Tensor, tag: int) -> None:
        host = self._staging(len(buffer)).copy_(buffer, non_blocking=True)
        finish_stream(self._device)
        super().send(host, tag)

    def receive(self, buffer: Tensor, tag: int) -> None:
        host = self._staging(len(buffer))
        super().receive(host, tag)
        buffer.copy_(host, non_blocking=True)
        finish_stream(self._device)


class NcclMoveLink(GlooMoveLink):
    """CUDA buffers over NCCL, once both hosts have come to the move."""

    def __init__(self, name: str, store: Store, *, member: int, timeout: timedelta, device: torch.device) -> None:
        super().__init__(f"{name}/hosts", store, member=member, timeout=timeout, device=device)
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        self._nccl = torch.distributed.ProcessGroupNCCL(PrefixStore(name, store), member, 2, options)
        probe = torch.zeros(1, dtype=torch.uint8, device=device)  # NCCL connects at the first use
        (self.send if member == 0 else self.receive)(probe, 0)

    def send(self, buffer: Tensor, tag: int) -> None:
        super().send(torch.empty(1), tag)
        self._finish(self._nccl.send([buffer], self._peer, 0))

    def receive(self, buffer: Tensor, tag: int) -> None:
        super().receive(torch.empty(1), tag)
        self._finish(self._nccl.recv([buffer], self._peer, 0))

    def _finish(self, work: Any) -> None:
        work.wait()  # the stream waits
        finish_stream(self._device)


MOVE_LINKS: dict[tuple[str, str], type] = {
    ("gloo", "cpu"): GlooMoveLink,
    ("gloo", "cuda"): HostStagedMoveLink,
    ("nccl", "cuda"): NcclMoveLink,
}
"""(backend, device type) -> link between two paired ranks."""
