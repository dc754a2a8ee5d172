"""The one small all-reduce per batch: what all ranks of the job must agree on before a step.

Norm, overflow, losses and stop requests (to stop, save or evaluate) travel in one float64 vector, over all ranks of the
job: stages and replicas alike, so that all decide alike. A stop request is a bit; each bit has an element of its own,
and the sum of an element over the ranks is positive where any rank asks for it. What ranks measure of themselves
(rank_metrics) travels along: every rank has an element of its own for each, which the others leave 0. So do the squared
norms of layers, of which each rank gives what it counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

NUM_STOP_BITS = 8


@dataclass(frozen=True)
class NormReduction:
    """Sums over the job: squared gradient norm, ranks that overflowed, stop requests (bits), losses as numerator and
    denominator; squared gradient norms of layers. And each rank_metric of each rank: name -> values in rank order.
    """

    norm_squared: float
    num_overflows: float
    stop_requests: int
    losses: dict[str, tuple[float, float]]
    layers_squared: tuple[float, ...] = ()
    rank_metrics: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def norm(self) -> float:
        return math.sqrt(self.norm_squared)

    @property
    def mean_losses(self) -> dict[str, float]:
        return {name: numerator / denominator for name, (numerator, denominator) in self.losses.items() if denominator}


def all_reduce_norm(
    *,
    norm_squared: float,
    overflow: bool,
    stop_requests: int,
    losses: Mapping[str, tuple[float, float]],
    loss_names: Sequence[str],
    group: Any,
    device: torch.device,
    layers_squared: Sequence[float] = (),
    rank_metrics: Mapping[str, float] | None = None,
) -> NormReduction:
    """Sum what every rank contributes.

    `group`: all ranks of the job, used for nothing else, one of torch.distributed or a bare backend; None with a single
    rank. `device`: where the group can reach the vector. `layers_squared`: of as many layers on all ranks.
    `rank_metrics`: of the same names on all ranks. Raises ValueError for more than `NUM_STOP_BITS` stop requests.
    """
    if not 0 <= stop_requests < 1 << NUM_STOP_BITS:
        raise ValueError(
            f"stop requests are {stop_requests}; they are {NUM_STOP_BITS} bits, 0 to {(1 << NUM_STOP_BITS) - 1}"
        )
    values = [norm_squared, float(overflow), *(float(stop_requests >> bit & 1) for bit in range(NUM_STOP_BITS))]
    for name in loss_names:
        values.extend(losses.get(name, (0.0, 0.0)))
    values.extend(layers_squared)
    rank_metrics = rank_metrics or {}
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    for value in rank_metrics.values():
        values.extend(float(value) if each == rank else 0.0 for each in range(size))
    if group is not None:
        vector = torch.tensor(values, dtype=torch.float64, device=device)
        group.allreduce([vector]).wait()
        values = vector.tolist()
    bits = values[2 : 2 + NUM_STOP_BITS]
    sums = iter(values[2 + NUM_STOP_BITS :])
    return NormReduction(
        norm_squared=values[0],
        num_overflows=values[1],
        stop_requests=sum(1 << bit for bit, count in enumerate(bits) if count > 0),
        losses={name: (next(sums), next(sums)) for name in loss_names},
        layers_squared=tuple(itertools.islice(sums, len(layers_squared))),
        rank_metrics={name: tuple(itertools.islice(sums, size)) for name in rank_metrics},
    )
