"""The merged orders, for several stages on a rank in any placement (FTPipe, sections 4.1.2 and 4.3).

Each stage keeps the order that it would have alone on a rank. A rank with several stages always takes a computation
that can start.

    stage 0 of rank 0   F0 F1 F2  .  .     B0 F3
    stage 2 of rank 0    .  . F0 F1  .  B0    F2 ...

Problem: no regular interleaving fits a rank with stages in arbitrary places of the pipeline. If stages differ in work,
the best interleaving also depends on the work.

Solution: simulate the execution. A free rank looks at the next instruction of each of its stages, and takes one whose
input tensors have arrived. Backwards come before forwards, because other stages wait for gradients and because a
backward frees saved activations. Among these the lowest microbatch comes first, and then the lowest stage. Each stage
keeps its own order whatever is chosen, so every merge gives the same numbers. By default a forward takes one unit of
time, and a backward takes two.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

from megatron.pipeline.program.edges import Edge, StageGraph, stages_by_rank
from megatron.pipeline.program.instruction import Instruction, Kind, Tensor
from megatron.pipeline.schedules.gpipe import GPipe
from megatron.pipeline.schedules.one_f_one_b import OneForwardOneBackward
from megatron.pipeline.schedules.order import Order, Work
from megatron.pipeline.schedules.passes import Segment, Segments
from megatron.pipeline.simulate.costs import Costs


class Merged(Order):
    """An order that merges the stages of a rank, each in the order of `base`. It takes one batch at a time."""

    base: ClassVar[type[Order]]
    interleaves = True
    merges = True
    follows_edges = True

    def segments(self, rank: int, batches: Sequence[range]) -> Segments:
        assert len(batches) == 1, "nothing says where another batch begins"
        return [list(_merged(self.base, self.num_stages, self.rank_of_stage, self.graph.edges, batches[0])[rank]), []]

    def max_in_flight(self, stage: int) -> int | None:
        return self._of_stages.max_in_flight(stage)

    def max_in_flight_on_rank(self, rank: int) -> int | None:
        limits = [self.max_in_flight(stage) for stage in stages_by_rank(self.rank_of_stage)[rank]]
        return None if None in limits else sum(limits)

    @property
    def _of_stages(self) -> Order:
        return self.base(self.num_stages, edges=self.graph.edges)


class MergedGPipe(Merged):
    base = GPipe
    drains = True


class MergedOneForwardOneBackward(Merged):
    base = OneForwardOneBackward


@lru_cache(maxsize=64)
def _merged(
    base: type[Order], num_stages: int, rank_of_stage: tuple[int, ...], edges: tuple[Edge, ...], batch: range
) -> tuple[tuple[Instruction, ...], ...]:
    """Return the computations of each rank for one batch."""
    order = base(num_stages, edges=edges)
    rows = [[each for segment in order.segments(stage, [batch]) for each in segment] for stage in range(num_stages)]
    return tuple(map(tuple, merge(rows, StageGraph.of(num_stages, edges), rank_of_stage)[0]))


def merge(
    rows: Sequence[Segment], graph: StageGraph, rank_of_row: Sequence[int], *, work: Work = ()
) -> tuple[list[Segment], dict[tuple[Kind, int, int], float]]:
    """Merge rows of forwards and backwards into a row for each rank.

    Args:
        rows: rows of one stage or of several stages; the order within each row is kept.
        graph: the stages and their edges.
        rank_of_row: the rank of each row.
        work: as for `Order`.

    Returns:
        The merged row of each rank; and the start of each computation, by kind, stage and microbatch, in the unit of
        `work`.

    Raises:
        ValueError: the rows wait for each other in a circle.
    """
    costs = Costs(forward=[each for each, _ in work], backward=[each for _, each in work]) if work else Costs()
    rows_of, seconds = stages_by_rank(rank_of_row), costs.seconds(graph.num_stages)
    starts: dict[tuple[Kind, int, int], float] = {}
    merged: list[Segment] = [[] for _ in rows_of]
    next_of = [0] * len(rows)
    made: set[tuple[Tensor, int, int]] = set()  # completed: tensor, stage, microbatch
    computing: list[tuple[float, int, Instruction]] = []  # running: end, rank, instruction
    free, now, left = set(range(len(rows_of))), 0.0, sum(map(len, rows))

    def can_start(each: Instruction) -> bool:
        needs = each.kind.row.needs
        own = each.kind is Kind.FORWARD or (Tensor.ACTIVATION, each.stage, each.microbatch) in made
        return own and all((needs, maker, each.microbatch) in made for maker in graph.makers(needs, each.stage))

    while left:
        for rank in sorted(free):
            ready = [
                (rows[row][next_of[row]], row)
                for row in rows_of[rank]
                if next_of[row] < len(rows[row]) and can_start(rows[row][next_of[row]])
            ]
            if ready:
                each, row = min(ready, key=lambda one: (one[0].kind is Kind.FORWARD, one[0].microbatch, one[0].stage))
                next_of[row] += 1
                merged[rank].append(each)
                starts[each.kind, each.stage, each.microbatch] = now
                heapq.heappush(computing, (now + seconds[each.kind][each.stage], rank, each))
                free.discard(rank)
        if not computing:
            stuck = [str(row[count]) for row, count in zip(rows, next_of, strict=True) if count < len(row)]
            raise ValueError(f"the orders of the stages wait for one another, at {', '.join(stuck)}")
        now = computing[0][0]
        while computing and computing[0][0] == now:
            _, rank, each = heapq.heappop(computing)
            made.add((each.kind.row.makes, each.stage, each.microbatch))
            free.add(rank)
            left -= 1
    return merged, starts
