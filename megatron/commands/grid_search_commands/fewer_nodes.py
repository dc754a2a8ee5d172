"""Whether a part of the nodes would train faster than all of them: a line beside a search, which uses all GPUs.

With the same batch each GPU has less to do the more there are, and more to wait for. Half of the nodes compute twice as
much each, so they can only be faster where more than half of the arithmetic that products reach is idle (`_can_gain`);
there, and as long as it helps, half of what is left is searched as well.
"""

from collections.abc import Callable

from megatron.planner import Cluster
from megatron.planner.job.cluster import make_cluster
from megatron.planner.search import Kept, Outcome

_WORTH_SAYING = 0.01
"""By which part it has to be faster."""


def sentence(outcome: Outcome, cluster: Cluster, best_on: Callable[[Cluster], Kept | None]) -> str | None:
    """What fewer nodes would take; None: all of them are the fastest, or nobody asked for the fastest.

    Args:
        outcome: of the search on all nodes.
        best_on: the best of the same search on other machines; None: nothing fits there.
    """
    whole = outcome.best
    if whole is None or outcome.objective != "time" or cluster.is_cpu:
        return None
    best, nodes = whole, cluster.nodes
    while isinstance(nodes, int) and nodes % 2 == 0 and _can_gain(best, cluster):
        half = make_cluster(cluster.model_dump(exclude_none=True) | {"nodes": nodes // 2}, "half of the nodes")
        try:
            found = best_on(half)
        except ValueError:  # what is asked for, such as degrees, takes more GPUs
            found = None
        if found is None or found.sequences_per_second <= best.sequences_per_second:
            break
        best, nodes = found, nodes // 2
    gain = best.sequences_per_second / whole.sequences_per_second - 1
    if gain < _WORTH_SAYING:
        return None
    return (
        f"{nodes} of the {cluster.nodes} nodes would be {100 * gain:.3g}% faster ({best.estimate.seconds:.3g} s an "
        f"iteration, {best.choice.schedule}, t={best.choice.tensor}, p={best.choice.pipeline}, d={best.choice.data}), "
        f"as more of them wait for one another; search with --nodes {nodes}, or give a larger batch"
    )


def _can_gain(best: Kept, cluster: Cluster) -> bool:
    return 2 * best.estimate.mfu < cluster.device.product_part
