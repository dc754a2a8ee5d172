"""The connection of two paired ranks for moves of saved activations, one at a time, in either direction.

Problem: moves are large and frequent, and must not allocate memory each time. A rank runs them one after another on a
thread (`MoveQueue`), so a transfer may block, and one connection serves both directions.

Solution: a link class for each backend and device, with one interface, chosen from a table (`MOVE_LINKS`). Send and
receive return when the transfer is complete, so both ends have to reach it. They wait without a limit, since an
acceptor may reach a move long before the evictor does. The computation that needs the result waits with a limit
(`ActivationTransfers.wait_for`). A lost peer raises RuntimeError at once.

The CUDA classes work on the current stream, the stream of the move thread. Through host memory they return when the
device has done the work. Over NCCL they return when the work is queued on the device, and the current stream waits for
it. Over NCCL the two hosts synchronise first, so that no kernel waits on a device for a host that arrives minutes
later.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from megatron.backend.streams import shut_down, streams_of
from megatron.pipeline.communicators import COMMUNICATOR_CTAS
from megatron.pipeline.runtime.transport.links import FOREVER, NUM_TAGS, gloo_pair

_SIZE_TAG = NUM_TAGS  # no microbatch has this tag


class GlooMoveLink:
    """One end of a link for moves. This class carries CPU buffers over gloo.

    Both ends make their calls in the same order: one sends when the other receives.
    """

    def __init__(self, name: str, store: Store, *, member: int, timeout: timedelta, device: torch.device) -> None:
        """`member`: 0 at one end, 1 at the other. `timeout`: how long connecting may take."""
        self._group = gloo_pair(name, store, member=member, timeout=timeout)
        self._peer = 1 - member
        self._streams = streams_of(device)

    def send(self, buffer: Tensor, tag: int) -> None:
        """Send uint8 [bytes]. Afterwards the current stream may write to the buffer."""
        self._group.send([buffer], self._peer, tag % NUM_TAGS).wait(FOREVER)

    def receive(self, buffer: Tensor, tag: int) -> None:
        """Receive uint8 [bytes] into `buffer`."""
        self._group.recv([buffer], self._peer, tag % NUM_TAGS).wait(FOREVER)

    def send_size(self, num_bytes: int) -> None:
        """Send the size of a stage's buffers, in bytes."""
        self._group.send([torch.tensor([num_bytes])], self._peer, _SIZE_TAG).wait(FOREVER)

    def receive_size(self) -> int:
        size = torch.empty(1, dtype=torch.int64)
        self._group.recv([size], self._peer, _SIZE_TAG).wait(FOREVER)
        return int(size.item())

    def close(self) -> None:
        """End the link's groups. Called when all moves are done. A gloo group ends with its last reference."""


class HostStagedMoveLink(GlooMoveLink):
    """CUDA buffers over gloo, through pinned host memory, allocated once for each size."""

    def __init__(self, name: str, store: Store, **options: Any) -> None:
        super().__init__(name, store, **options)
        self._host: dict[int, Tensor] = {}

    def _staging(self, num_bytes: int) -> Tensor:
        if num_bytes not in self._host:
            self._host[num_bytes] = self._streams.host_buffer((num_bytes,), torch.uint8)
        return self._host[num_bytes]

    def send(self, buffer: Tensor, tag: int) -> None:
        host = self._staging(len(buffer)).copy_(buffer, non_blocking=True)
        self._streams.finish(self._streams.record())
        super().send(host, tag)

    def receive(self, buffer: Tensor, tag: int) -> None:
        host = self._staging(len(buffer))
        super().receive(host, tag)
        buffer.copy_(host, non_blocking=True)
        self._streams.finish(self._streams.record())  # the next move writes to the same host memory


class NcclMoveLink(GlooMoveLink):
    """CUDA buffers over NCCL. The two processes meet over gloo first, so no kernel of NCCL waits for a late peer."""

    def __init__(self, name: str, store: Store, *, member: int, timeout: timedelta, device: torch.device) -> None:
        super().__init__(f"{name}/hosts", store, member=member, timeout=timeout, device=device)
        self._nccl = self._streams.communicator(
            PrefixStore(name, store), member, 2, max_ctas=COMMUNICATOR_CTAS["move"], timeout=2 * timeout
        )
        probe = torch.zeros(1, dtype=torch.uint8, device=device)
        for sends in (member == 0, member == 1):  # NCCL connects each direction at its first use
            (self.send if sends else self.receive)(probe, 0)
        self._streams.finish(self._streams.record())

    def send(self, buffer: Tensor, tag: int) -> None:
        super().send(torch.empty(1), tag)
        self._nccl.send([buffer], self._peer, 0).wait()

    def receive(self, buffer: Tensor, tag: int) -> None:
        super().receive(torch.empty(1), tag)
        self._nccl.recv([buffer], self._peer, 0).wait()

    def close(self) -> None:
        shut_down(self._nccl)


MOVE_LINKS: dict[tuple[str, str], type[GlooMoveLink]] = {
    ("gloo", "cpu"): GlooMoveLink,
    ("gloo", "cuda"): HostStagedMoveLink,
    ("nccl", "cuda"): NcclMoveLink,
}
"""(backend, device type) -> class of the link between two paired ranks."""
