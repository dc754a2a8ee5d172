"""Where the weights of a rank's stages lie, of which few are on the device at once: the arithmetic, without torch.

Every stage has a fixed place in one memory, such that the K stages that follow one another in the order of the rank lie
apart. For K = 2 the memory is filled from both ends, and is as large as the largest pair of neighbours.
"""

from collections.abc import Sequence
from itertools import pairwise


def places(sizes: Sequence[int], num_resident: int) -> tuple[list[int], int]:
    """Where each of a rank's stages begins, and how long the memory is: any `num_resident` that follow one another lie
    apart.

    Args:
        sizes: of the rank's stages in its order, in any unit, which is that of the answer.
    """
    if num_resident == 2:
        pairs = [one + other for one, other in pairwise(sizes)]
        length = max(pairs, default=max(sizes, default=0))
        return [length - size if index % 2 else 0 for index, size in enumerate(sizes)], length
    slots = [max(sizes[slot::num_resident], default=0) for slot in range(num_resident)]
    starts = [sum(slots[:slot]) for slot in range(num_resident)]
    return [starts[index % num_resident] for index in range(len(sizes))], sum(slots)
