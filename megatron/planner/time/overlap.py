"""Reductions of gradients beside the last backward, and gathers of weights beside the first forward.

As megatron.core's distributed data parallel does it. Gradients of the first pipeline rank lie in buckets; each is
reduced as soon as the last microbatch's backward has been through it, so that the last bucket stays, and what is longer
than that backward. Other ranks have one bucket: they have ended before, and reduce while the first ones go on, which
the program's order says. Weights are gathered the other way round: those of the first rank beside its first forward,
those of the others while that forward is on its way to them. What runs beside products takes a part of the processor
from them (`Constants.contention`).
"""

from collections.abc import Sequence
from itertools import accumulate

_BUCKET = 40e6
_OF_REPLICA = 1e6
"""Parameters of a bucket, at least and for each replica (megatron.core 0.16, DistributedDataParallel)."""


def num_buckets(num_parameters: int, replicas: int) -> float:
    """Buckets of a stage on the first rank, 1 at least; a fraction is a part of one, so that more parameters never
    leave less behind the backward."""
    return max(1.0, num_parameters / max(_BUCKET, _OF_REPLICA * replicas))


def reductions_shown(
    reduce: Sequence[float],
    backward: Sequence[float],
    buckets: Sequence[float],
    ranks: Sequence[int],
    contention: float,
) -> list[float]:
    """Seconds of each stage's reduction that come behind its last backward, or lengthen it. `ranks`: of the stages."""
    return [
        each if rank else _shown(each, beside, each / count, contention)
        for each, beside, count, rank in zip(reduce, backward, buckets, ranks, strict=True)
    ]


def gathers_shown(
    gather: Sequence[float], forward: Sequence[float], buckets: Sequence[float], ranks: Sequence[int], contention: float
) -> list[float]:
    """Seconds of each stage's gather that come before its first forward, or lengthen it."""
    before = accumulate(forward, initial=0.0)
    return [
        max(0.0, each - earlier) if rank else _shown(each, beside, each / count, contention)
        for each, beside, count, rank, earlier in zip(gather, forward, buckets, ranks, before, strict=False)
    ]


def _shown(seconds: float, beside: float, bucket: float, contention: float) -> float:
    alone = max(bucket, seconds - beside)
    return alone + contention * (seconds - alone)
