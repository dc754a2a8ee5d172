"""The device memory of a rank's NCCL communicators.

NCCL gives every connection of a communicator buffers, one set for each CTA (channel) that may use it, for its three
protocols. The sizes are those of its sources (src/init.cc and src/include/device.h, 2.21 to 2.30) where NCCL_BUFFSIZE,
NCCL_LL_BUFFSIZE and NCCL_LL128_BUFFSIZE are not set:

    Simple   4 MiB
    LL       8 lines x 512 threads x 8 steps x 16 bytes       0.5 MiB
    LL128    120 elements x 640 threads x 8 steps x 8 bytes   4.7 MiB

An estimate that no GPU has confirmed. Taken is one set for each CTA and each peer. Between two GPUs of a node that send
both ways it is what NCCL's P2P transport allocates; a link sends one way, so one of its ends has less. Across nodes
point-to-point buffers are smaller (2 MiB a CTA), and a ring's larger, for both ends have their own; a tree has up to
three peers. Not counted: what NCCL holds beside buffers (a few MiB a communicator), its use of NVLink SHARP, and the
communicators of megatron.core, which are not bounded.
"""

from collections.abc import Iterable
from functools import lru_cache

from megatron.pipeline.communicators import Communicator, chain_of_rank, links_of_rank, move_link_of_rank

SIMPLE_BYTES = 1 << 22
LL_BYTES = 8 * 512 * 8 * 16
LL128_BYTES = 120 * 640 * 8 * 8
CONNECTION_BYTES = SIMPLE_BYTES + LL_BYTES + LL128_BYTES
"""Bytes for one CTA and one peer: 9.2 MiB."""


def buffer_bytes(communicators: Iterable[Communicator]) -> float:
    """Bytes on the device of a rank that has these communicators."""
    return float(sum(each.max_ctas * each.num_peers * CONNECTION_BYTES for each in communicators))


def communicator_bytes(
    rank_of_stage: tuple[int, ...],
    *,
    tensor: int,
    data: int,
    tied_embeddings: bool,
    sums_over_tensor: bool,
    moves: bool,
) -> tuple[float, ...]:
    """Bytes by rank of a pipeline, of the communicators that it uses: NCCL gives no buffers to others.

    `moves`: activations do, between some pair; all pairs connect then. The rest as in `chain_of_rank`.
    """
    links = _link_bytes(rank_of_stage, moves)
    degrees = {"tensor": tensor, "pipeline": len(links), "data": data}
    ends = rank_of_stage[0], rank_of_stage[-1]
    sums = {"tied_embeddings": tied_embeddings, "sums_over_tensor": sums_over_tensor, "ends": ends}
    return tuple(own + buffer_bytes(chain_of_rank(rank, **degrees, **sums)) for rank, own in enumerate(links))


@lru_cache(maxsize=1024)
def _link_bytes(rank_of_stage: tuple[int, ...], moves: bool) -> tuple[float, ...]:
    """By rank. A search asks for many configurations of the same pipeline."""
    own = []
    for rank in range(max(rank_of_stage) + 1):
        pair = move_link_of_rank(rank_of_stage, rank) if moves else ()
        own.append(buffer_bytes((*links_of_rank(rank_of_stage, rank), *pair)))
    return tuple(own)
