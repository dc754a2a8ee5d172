"""Which data-parallel replica owns which parameter, where each replica has the optimizer's state of whole parameters.

Problem: an optimizer that steps a whole matrix cannot have a part of the matrix's state on each replica.

Solution: whole parameters are dealt out, the largest first, each to the replica with the fewest bytes so far. The
result depends on sizes and order alone, so all replicas compute the same one.
"""

from collections.abc import Collection, Sequence


def owners_of(sizes: Sequence[float], num_replicas: int, *, pinned: Collection[int] = ()) -> list[int]:
    """The replica that owns each parameter.

    Args:
        sizes: the bytes of optimizer state of each parameter.
        num_replicas: the number of replicas.
        pinned: indices of parameters that belong to replica 0.
    """
    owners, held = [0] * len(sizes), [0.0] * num_replicas
    for index in pinned:
        held[0] += sizes[index]
    for index in sorted(set(range(len(sizes))) - set(pinned), key=lambda each: (-sizes[each], each)):
        owner = owners[index] = held.index(min(held))
        held[owner] += sizes[index]
    return owners
