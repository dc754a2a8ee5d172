"""Which elements of a stage's parameters each of the replicas on a node steps.

The parameters stand one behind another, and each replica has a piece of that row, as long as any other's. Pieces are
cut at multiples of `GRAIN` elements of a parameter, so that a step goes through them in whole vectors, as through the
parameter, and no two replicas write to one line of a cache.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

GRAIN = 64
"""Elements: 128 bytes of bf16, which is twice a CPU's largest vector."""


def share_of(parameters: Mapping[str, Tensor], index: int, size: int) -> dict[str, slice]:
    """name -> the elements, in memory order, that replica `index` of `size` steps; none, for some of them. Together
    the replicas have each element once.
    """
    ends = [sum(each.numel() for each in parameters.values()) * number // size for number in (index, index + 1)]
    share, before = {}, 0
    for name, parameter in parameters.items():
        count = parameter.numel()
        share[name] = slice(*(_cut(end - before, count) for end in ends))
        before += count
    return share


def _cut(at: int, count: int) -> int:
    """The cut nearest below `at` in a parameter of `count` elements; its end where it ends before."""
    return count if at >= count else max(0, at) // GRAIN * GRAIN
