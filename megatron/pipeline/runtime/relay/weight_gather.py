"""A stage's weights come from the host in shares: each replica of a node fetches one, and their devices gather them.

Problem: replicas on a node hold the same weights in one store. Where each fetches whole stages, all of them read the
same bytes of the host's memory, and GPUs that share a way to it wait for one another there.

Solution: a fetch copies 1/d of each flat tensor to its place on the device, and an all-gather in place brings the rest
over what joins the devices (L2L's eager parallelism; Pudipeddi et al., 2020, section 3). Shares are equal: a layout cut
into d parts is padded to that. Replicas run one program, so they come to their gathers in one order; a lane of fetches
has a communicator of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.backend.communicators import shut_down
from megatron.backend.streams import streams_of
from megatron.pipeline.communicators import COMMUNICATOR_CTAS
from megatron.pipeline.runtime.relay.node_replicas import NodeReplicas, meeting_of


class WeightGather:
    """Gathers flat tensors over `replicas`, which are more than one, on the lane that fetches. Collective, `gather` and
    `close` too.
    """

    def __init__(self, replicas: NodeReplicas, *, device: torch.device) -> None:
        self._replicas = replicas.again()  # of this lane's own: updates and reductions join theirs meanwhile
        self._streams = streams_of(device)
        self._communicator = None
        if self._streams.runs_ahead:
            self._communicator = self._streams.communicator(
                meeting_of("fetch", replicas.ranks), replicas.index, replicas.size,
                max_ctas=COMMUNICATOR_CTAS["fetch"], timeout=2 * replicas.timeout,
            )  # fmt: skip

    def share(self, length: int) -> slice:
        """What this replica fetches of a flat tensor of so many elements, a multiple of the number of replicas."""
        part = length // self._replicas.size
        return slice(self._replicas.index * part, (self._replicas.index + 1) * part)

    def gather(self, flat: Tensor) -> None:
        """Complete `flat`, on the device, of which this replica has its share. On CUDA, when the current stream has.

        Raises:
            RuntimeError: a replica is gone, or has not come in time; says which.
        """
        whole = flat.view(torch.uint8)  # any dtype is bytes here
        own = whole[self.share(len(whole))]
        group = self._communicator or self._replicas.group
        self._replicas.together(lambda: group._allgather_base(whole, own).wait())

    def close(self) -> None:
        """End the communicator, when nothing is left for it."""
        if self._communicator is not None:
            shut_down(self._communicator)
