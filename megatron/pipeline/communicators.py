"""Which communicators a rank of a pipeline has, and how many blocks of a GPU's threads each may use.

Problem: the runtime has a communicator for each directed edge of the pipeline, for the pair's moves and for each group
of the reduction chain, so that nothing queues behind what it does not depend on. Over NCCL each takes multiprocessors
from the computations beside it, and buffers on the device, both in proportion to its cooperative thread arrays (CTAs).

Solution: one table bounds them by use (NCCL's `max_ctas`). The runtime makes communicators by it, and the planner
counts what they hold. A rank in the middle of a pipeline with replicas has, for example,

    link    F 0-1, B 1-0, F 1-2, B 2-1
    move    pair 1-2
    chain   data, world

and, where weights come from the host in shares, `fetch` with the replicas on its node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron.pipeline.program.move_order import Pairs

COMMUNICATOR_CTAS = {"link": 2, "move": 4, "chain": 8, "fetch": 8}
"""use -> CTAs at most. A link carries one activation at a time; a move many times that; a chain the gradients, a fetch
the weights of a stage."""


@dataclass(frozen=True)
class Communicator:
    """One communicator of a rank. `use`: of `COMMUNICATOR_CTAS`. `name`: as above. `num_ranks`: its members."""

    use: str
    name: str
    num_ranks: int

    @property
    def max_ctas(self) -> int:
        return COMMUNICATOR_CTAS[self.use]

    @property
    def num_peers(self) -> int:
        """Members with which this one exchanges data: the neighbours in a ring."""
        return min(self.num_ranks - 1, 2)


def links_of_rank(rank_of_stage: Sequence[int], rank: int) -> tuple[Communicator, ...]:
    """One for each edge from or to a stage of another rank, and direction: activations (F) and gradients (B)."""
    links = []
    for stage, ends in enumerate(pairwise(rank_of_stage)):
        if rank in ends and ends[0] != ends[1]:
            links.append(Communicator("link", f"F {stage}-{stage + 1}", 2))
            links.append(Communicator("link", f"B {stage + 1}-{stage}", 2))
    return tuple(links)


def move_link_of_rank(rank_of_stage: Sequence[int], rank: int) -> tuple[Communicator, ...]:
    """The pair's, where activations move; none for a rank that is its own pair."""
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
    """The groups of the reduction chain that rank `rank` of a pipeline communicates in.

    Args:
        tensor, pipeline, data: degrees; the world has as many ranks as their product.
        tied_embeddings: the ranks in `ends` add up the gradient of one embedding.
        sums_over_tensor: tensor ranks add up gradients of parameters that each has seen in part (sequence parallelism).
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
