"""Orders that a simulation finds, for several stages on a rank in any placement: merged orders, and FTPipe's order.

**Merged orders (`Merged`)** (FTPipe, sections 4.1.2 and 4.3). Each stage keeps the order that it would have alone on a
rank. A rank with several stages always takes a computation that can start.

    stage 0 of rank 0   F0 F1 F2  .  .     B0 F3
    stage 2 of rank 0    .  . F0 F1  .  B0    F2 ...

Problem: no regular interleaving fits a rank with stages in arbitrary places of the pipeline. If stages differ in work,
the best interleaving also depends on the work.

Solution: simulate the execution. A free rank looks at the next instruction of each of its stages, and takes one whose
input tensors have arrived. Backwards come before forwards, because other stages wait for gradients and because a
backward frees saved activations. Among these the lowest microbatch comes first, and then the lowest stage. Each stage
keeps its own order whatever is chosen, so every merge gives the same numbers. By default a forward takes one unit of
time, and a backward takes two.

**The order of FTPipe (`Asynchronous`).** The stages of a rank compute in a cycle that repeats with every microbatch. A
stage runs forwards and backwards in turn, and is as many forwards ahead as there are edges from it to the end (Eliad et
al., 2021, 4.2 and 4.3).

    rank 0 of 2, with stages 0 and 2 of 4:   0F5 2F4 0B2 2B4 | 0F6 2F5 0B3 2B5 | ...

Problem: a rank with several stages has to choose between them. The runtime of the paper decides during the run, so
nothing can be proved beforehand, and no place is known at which a run may stop.

Solution: the depth of a stage alone fixes its computations and their order. The stage runs a forward if the number of
its forwards minus the number of its backwards is at most the depth, and otherwise a backward. So every choice of the
rank gives the same numbers. The rule is simulated with the times of the stages. From the mean start times over a
stretch of microbatches follows a cycle. The cycle has each computation once, with a fixed lag in microbatches behind
the newest one. Dependencies hold in each simulated microbatch, so they hold for the mean times, and the cycle is
correct for any number of microbatches. Several stretches are tried, and the cycle that takes the least time is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from megatron.pipeline.program.edges import Edge, StageGraph, stages_by_rank
from megatron.pipeline.program.instruction import Instruction, Kind, Tensor
from megatron.pipeline.schedules.one_f_one_b import GPipe, OneForwardOneBackward
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
    rows = _rows_of_stages(base(num_stages, edges=edges), batch)
    return tuple(map(tuple, merge(rows, StageGraph.of(num_stages, edges), rank_of_stage)[0]))


def _rows_of_stages(order: Order, batch: range) -> list[Segment]:
    """Return the computations of each stage for one batch, in an order that has one stage on each rank."""
    return [
        [each for segment in order.segments(stage, [batch]) for each in segment] for stage in range(order.num_stages)
    ]


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


_SETTLED, _AVERAGED = 4, 12  # in multiples of the depth: microbatches that a simulation skips, and then averages
_TRIED = 24  # microbatches of the simulation among which shorter stretches are tried


@dataclass(frozen=True)
class _Turn:
    """A computation of the cycle, which computes microbatch k - `lag` in round k."""

    kind: Kind
    stage: int
    lag: int


class Asynchronous(Order):
    """The order in which each rank repeats a cycle over its stages. The cycle depends on `work`."""

    interleaves = True
    follows_edges = True

    def segments(self, rank: int, batches: Sequence[range]) -> Segments:
        row = iter(_rounds(self.cycles[rank], range(batches[0].start, batches[-1].stop), self.most_behind + 1))
        segments = [[each for _ in batch for each in next(row)] for batch in batches]
        return [*segments, [each for rest in row for each in rest]]

    def first_after_border(self, rank: int) -> Sequence[tuple[Kind, int, int]]:
        """Return the turns that lag: they run in the next round even if the run drains, in the same order."""
        return [(turn.kind, turn.stage, turn.lag) for turn in self.cycles[rank] if turn.lag]

    def max_in_flight(self, stage: int) -> int | None:
        return self.graph.depth(stage) + 1

    def max_in_flight_on_rank(self, rank: int) -> int | None:
        return sum(map(self.max_in_flight, stages_by_rank(self.rank_of_stage)[rank]))

    def recomputes(self, stage: int) -> bool:
        """Whether the stage is not at the end. A stage at the end runs its backward at once, at the same weights."""
        return self.graph.depth(stage) > 0

    @property
    def cycles(self) -> tuple[tuple[_Turn, ...], ...]:
        """The cycle of each rank."""
        return _cycles(self.num_stages, self.rank_of_stage, self.graph.edges, self.work)

    @property
    def most_behind(self) -> int:
        """The largest lag of any turn, in microbatches."""
        return max(turn.lag for cycle in self.cycles for turn in cycle)


_Cycles = tuple[tuple[_Turn, ...], ...]  # the cycle of each rank


@lru_cache(maxsize=64)
def _cycles(num_stages: int, rank_of_stage: tuple[int, ...], edges: tuple[Edge, ...], work: Work) -> _Cycles:
    """Return the fastest cycles among those of the long stretch of a simulation and of several short stretches."""
    graph = StageGraph.of(num_stages, edges)
    deepest = max(map(graph.depth, range(num_stages))) + 1
    settled = range(_SETTLED * deepest, _SETTLED * deepest + max(_AVERAGED * deepest, 2 * _TRIED))
    rows = _rows_of_stages(OneForwardOneBackward(num_stages, edges=edges), range(settled.stop + 2 * deepest))
    starts = merge(rows, graph, rank_of_stage, work=work)[1]
    stretches = [settled, *(settled[at : at + n] for n in (1, 2, 3, 4, 5, 6, 8) for at in range(0, _TRIED, n))]
    best, found = None, set()
    for stretch in stretches:
        times = _mean_times(starts, graph, stretch, settled)
        if not _is_right(times, graph):
            continue
        cycles = tuple(_cycle(times, stages) for stages in stages_by_rank(rank_of_stage))
        if cycles not in found:
            found.add(cycles)
            seconds = _seconds(cycles, graph, work)
            if best is None or seconds < best[0] - 1e-9:
                best = seconds, cycles
    assert best is not None, "what holds for each microbatch holds for the mean of many"
    return best[1]


def _seconds(cycles: _Cycles, graph: StageGraph, work: Work) -> float:
    """Return the time of a round of the cycles in a long run."""
    most = max(turn.lag for cycle in cycles for turn in cycle) + 1
    rows = [[each for segment in _rounds(cycle, range(6 * most), most) for each in segment] for cycle in cycles]
    starts = merge(rows, graph, range(len(rows)), work=work)[1]
    first, last = ((Kind.FORWARD, 0, count * most) for count in (2, 5))
    return (starts[last] - starts[first]) / (3 * most)


def _rounds(cycle: Sequence[_Turn], stretch: range, behind: int) -> Iterator[Segment]:
    """Yield a round for each microbatch of a stretch, and then the `behind` rounds that complete them."""
    for number in range(stretch.start, stretch.stop + behind):
        yield [
            Instruction(turn.kind, turn.stage, number - turn.lag)
            for turn in cycle
            if stretch.start <= number - turn.lag < stretch.stop
        ]


_Times = dict[tuple[Kind, int], float]  # starts of a microbatch's computations, in periods after the first start


def _mean_times(
    starts: dict[tuple[Kind, int, int], float], graph: StageGraph, stretch: range, settled: range
) -> _Times:
    def mean(kind: Kind, stage: int, numbers: Sequence[int] = stretch) -> float:
        return sum(starts[kind, stage, each] for each in numbers) / len(numbers)

    half = len(settled) // 2
    origin = min(mean(Kind.FORWARD, stage) for stage in range(graph.num_stages))
    period = (mean(Kind.FORWARD, 0, settled[-half:]) - mean(Kind.FORWARD, 0, settled[:half])) / (len(settled) - half)
    times = {}
    for stage in range(graph.num_stages):
        depth = graph.depth(stage)
        ahead = range(stretch.start + depth, stretch.stop + depth)
        behind = mean(Kind.BACKWARD, stage) - mean(Kind.FORWARD, stage, ahead)  # after the forward before it
        times[Kind.FORWARD, stage] = (mean(Kind.FORWARD, stage) - origin) / period
        times[Kind.BACKWARD, stage] = times[Kind.FORWARD, stage] + depth + behind / period
    return times


def _is_right(times: _Times, graph: StageGraph) -> bool:
    """Whether each computation starts after its inputs are made, and forwards and backwards of a stage alternate."""
    forward = {stage: time for (kind, stage), time in times.items() if kind is Kind.FORWARD}
    backward = {stage: time for (kind, stage), time in times.items() if kind is Kind.BACKWARD}
    return (
        all(forward[edge.source] < forward[edge.target] for edge in graph.edges)
        and all(backward[edge.target] < backward[edge.source] for edge in graph.edges if edge.gradient)
        and all(0 < backward[stage] - forward[stage] - graph.depth(stage) < 1 for stage in forward)
    )


def _cycle(times: _Times, stages: Sequence[int]) -> tuple[_Turn, ...]:
    placed = []
    for (kind, stage), time in times.items():
        if stage in stages:
            lag, within = divmod(time, 1.0)
            placed.append((within, stage, _Turn(kind, stage, int(lag))))
    return tuple(turn for _, _, turn in sorted(placed, key=lambda each: each[:2]))
