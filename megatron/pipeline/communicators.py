"""The communicators of a pipeline rank, and how many blocks of GPU threads each may use.

Problem: the runtime has a communicator for each directed edge of the pipeline, for the moves between the ranks of a
pair, and for each group of the reduction chain. So no transfer queues behind a transfer that it does not depend on.
But an NCCL communicator takes multiprocessors from concurrent computations, and holds buffers on the device. Both grow
in proportion to the number of its cooperative thread arrays (CTAs).

Solution: one table bounds the CTAs of each use (NCCL's `max_ctas`). The runtime makes its communicators with these
bounds, and the planner counts the bytes of their buffers. For example, a rank in the middle of a pipeline with replicas
has

    link    F 0-1, B 1-0, F 1-2, B 2-1
    move    pair 1-2
    chain   data, world

If the replicas on a node share the copies of weights from the host, each rank also has a `fetch` communicator with
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron.pipeline.program.lane_order import Pairs

COMMUNICATOR_CTAS = {"link": 2, "move": 4, "chain": 8, "fetch": 8}
"""Use -> largest number of CTAs. A link carries one activation at a time, and a move carries many times as many bytes.
A chain carries the gradients of a stage, and a fetch carries its weights."""


@dataclass(frozen=True)
class Communicator:
    """One communicator of a rank.

    Attributes:
        use: a key of `COMMUNICATOR_CTAS`.
        name: the edge, the pair or the group, written as in the module docstring.
        num_ranks: the number of members.
    """

    use: str
    name: str
    num_ranks: int

    @property
    def max_ctas(self) -> int:
        return COMMUNICATOR_CTAS[self.use]

    @property
    def num_peers(self) -> int:
        """The number of members that a rank exchanges data with: its neighbours in a ring."""
        return min(self.num_ranks - 1, 2)


def links_of_rank(rank_of_stage: Sequence[int], rank: int) -> tuple[Communicator, ...]:
    """Return the links of a rank in a chain of stages.

    Each edge between a stage of the rank and a stage of another rank has two links: F for activations and B for
    gradients.
    """
    links = []
    for stage, ends in enumerate(pairwise(rank_of_stage)):
        if rank in ends and ends[0] != ends[1]:
            links.append(Communicator("link", f"F {stage}-{stage + 1}", 2))
            links.append(Communicator("link", f"B {stage + 1}-{stage}", 2))
    return tuple(links)


def move_link_of_rank(rank_of_stage: Sequence[int], rank: int) -> tuple[Communicator, ...]:
    """Return the communicator of the rank's pair; nothing if the rank is its own pair."""
    partner = Pairs(tuple(rank_of_stage)).of_rank(rank)
    first, last = sorted((rank, partner))
    return () if first == last else (Communicator("move", f"pair {first}-{last}", 2),)


def chain_of_rank(
    rank: int,
    *,
    tensor: int,
    pipeline: int,
    data: int,
    tied_embeddings: bool,
    sums_over_tensor: bool,
    ends: tuple[int, int] | None = None,
) -> tuple[Communicator, ...]:
    """Return the communicators of the reduction chain that have more than one member, for pipeline rank `rank`.

    Args:
        tensor, pipeline, data: parallel degrees; the world has as many ranks as their product.
        tied_embeddings: the ranks in `ends` add up their gradients of one embedding.
        sums_over_tensor: tensor ranks add up the gradients of parameters that each applies to a part of the sequence.
        ends: the ranks of the first and the last stage; None: the first and the last rank.
    """
    sharing = {0, pipeline - 1} if ends is None else set(ends)
    sizes = {
        "data": data,
        "tensor": tensor if sums_over_tensor else 1,
        "embedding": len(sharing) if tied_embeddings and rank in sharing else 1,
        "world": tensor * pipeline * data,
    }
    return tuple(Communicator("chain", name, size) for name, size in sizes.items() if size > 1)
