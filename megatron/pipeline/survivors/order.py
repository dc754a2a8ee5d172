"""The order of computations on the ranks that are left.

Two ways lead to rows:

- **Merged.** Without a loss, the replicas run in step. So a rank runs its own computations and those that it takes
  over in the order in which the whole job would start them, as the simulation of one replica says. Whatever a
  computation waits for starts before it there. So such rows are free of deadlocks, and they repeat with every batch if
  the schedule does.
- **Listed.** Each rank starts what is ready: backwards first, then forwards while it holds few enough microbatches,
  then the halves W of backwards, which fill its bubbles. So the work that it takes over moves to where it would have
  been idle. Over each edge microbatches arrive in the order in which they were sent.

Both are tried, the second with several numbers of microbatches that a rank may hold. Under weights that need no drain
the second way begins what is ready in the order of the first, so that the rows repeat.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from megatron.pipeline.program.instruction import ENDS_BACKWARD, Instruction, Kind, Rows, Tensor
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.survivors.sharing import Sharing

_INPUT, _WEIGHT = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
_URGENCY = {Kind.BACKWARD: 0, _INPUT: 0, Kind.FORWARD: 1, _WEIGHT: 2}
_MORE = (-8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12, 16)
_FEW_MORE = (0, 1, 2, 4)
"""How many more microbatches than while no rank is lost a rank may hold, in the orders that are tried."""


@dataclass(frozen=True)
class Ordered:
    """Rows of computations, with the time of one drained batch in seconds, without its update.

    `held`: for each rank, the largest number of microbatches between forward and end of backward, over its stages.
    """

    rows: Rows
    seconds: float
    held: tuple[int, ...]


class Work:
    """The computations of one batch on the ranks that are left, and what waits for what.

    Attributes:
        extent: the extent of the batch.
        rows: the merged rows, which hold every computation once.
        priorities: two orders of all computations: backwards, then forwards, then W; and that of the merged rows.
    """

    def __init__(self, sharing: Sharing, costs: Costs, num_batches: int = 1) -> None:
        self.extent = extent = sharing.extent_of(num_batches)
        self.rows = merged_rows(sharing, num_batches)
        everything = [each for row in self.rows for each in row]
        self.priorities: tuple[dict[Instruction, Any], ...] = (
            {each: (_URGENCY[each.kind], each.microbatch, -each.stage) for each in everything},
            {each: at for row in self.rows for at, each in enumerate(row)},
        )
        costs, graph, rank_of_stage = sharing.costs(costs), extent.graph, extent.rank_of_stage
        self._seconds = {kind: list(each) for kind, each in costs.seconds(extent.num_stages).items()}
        for stage in filter(extent.recomputes, range(extent.num_stages)):
            for kind in (Kind.BACKWARD, _INPUT):
                self._seconds[kind][stage] += self._seconds[Kind.RECOMPUTE][stage]
        forward, backward, latency = costs.edges(len(graph.edges))
        self._takers: dict[Tensor, list[list[tuple[int, float]]]] = {
            tensor: [[] for _ in range(extent.num_stages)] for tensor in Tensor
        }
        for number, edge in enumerate(graph.edges):
            crosses = rank_of_stage[edge.source] != rank_of_stage[edge.target]
            takes = crosses * (forward[number] + latency[number])
            self._takers[Tensor.ACTIVATION][edge.source].append((edge.target, takes))
            if edge.gradient:
                takes = crosses * (backward[number] + latency[number])
                self._takers[Tensor.GRADIENT][edge.target].append((edge.source, takes))
        self._backward_of = {
            (each.stage, each.microbatch): each.kind
            for row in self.rows
            for each in row
            if each.kind in (Kind.BACKWARD, _INPUT)
        }

    def seconds(self, each: Instruction) -> float:
        return self._seconds[each.kind][each.stage]

    def makers(self, each: Instruction) -> list[int]:
        """Return the stages whose tensors a computation needs."""
        tensor, extent = each.kind.row.needs, self.extent
        if tensor is None:
            return []
        made = extent.graph.makers(tensor, each.stage)
        return [other for other in made if extent.takes(other, each.microbatch)]

    def queue(self, each: Instruction) -> tuple:
        """Return what a computation shares with those that a rank has to begin in the order in which they arrive."""
        return (each.kind, each.stage, *self.makers(each))

    def with_rows(self, rows: Rows) -> Work:
        """Return the same work with another order for ranks that keep the order of their rows."""
        other = copy(self)
        other.rows = rows
        return other

    def followers(self, each: Instruction) -> Iterator[tuple[Instruction, float]]:
        """Yield the computations that wait for one, with the seconds after its end from which on they may begin."""
        kind, stage, microbatch = each.kind, each.stage, each.microbatch
        if kind is Kind.FORWARD:
            yield Instruction(self._backward_of[stage, microbatch], stage, microbatch), 0.0
        elif kind is _INPUT:
            yield Instruction(_WEIGHT, stage, microbatch), 0.0
        for other, takes in self._takers[kind.row.makes][stage] if kind.row.makes else ():
            if self.extent.takes(other, microbatch):
                following = Kind.FORWARD if kind is Kind.FORWARD else self._backward_of[other, microbatch]
                yield Instruction(following, other, microbatch), takes


def merged_rows(sharing: Sharing, num_batches: int) -> Rows:
    """Return the rows of the first batches, in the order in which undisturbed replicas start the computations."""
    schedule, num_replicas, extent = sharing.schedule, sharing.num_replicas, sharing.extent
    program = schedule.build((sharing.num_microbatches,) * num_batches)
    timeline = simulate(program)  # in units of a forward, whose sums are exact
    keyed: list[list[tuple[float, int, Instruction]]] = [[] for _ in sharing.ranks]
    for rank, (row, starts) in enumerate(zip(program.rows, timeline.starts, strict=True)):
        for at, (each, start) in enumerate(zip(row, starts, strict=True)):
            if not each.kind.is_computation or each.kind is Kind.RECOMPUTE:
                continue
            for replica in range(num_replicas):
                microbatch = each.microbatch * num_replicas + replica
                stage = sharing.number_of[each.stage, sharing.takers[rank][microbatch % sharing.batch_size]]
                keyed[extent.rank_of_stage[stage]].append((start, at, Instruction(each.kind, stage, microbatch)))
    return tuple(tuple(each for *_, each in sorted(row, key=_place)) for row in keyed)


def _place(keyed: tuple[float, int, Instruction]) -> tuple[float, int, int]:
    start, at, each = keyed
    return start, at, each.microbatch


def run(
    work: Work, most_held: Sequence[int] | None = None, priority: Mapping[Instruction, Any] | None = None
) -> Ordered | None:
    """Run the computations of a batch, and return the order in which the ranks have started them.

    Args:
        work: the computations.
        most_held: for each rank, the number of microbatches with which it begins no other one at its first stage; None:
            each rank keeps the order of the merged rows.
        priority: the order in which a rank begins what is ready, the least first.

    Returns:
        None if ranks wait for one another.
    """
    extent, num_ranks = work.extent, len(work.rows)
    first_stage = [extent.stages_of(rank)[0] for rank in range(num_ranks)]
    awaited = {each: len(work.makers(each)) + (each.kind is not Kind.FORWARD) for row in work.rows for each in row}
    ready_at: dict[Instruction, float] = {}
    queues: list[dict[tuple, deque[Instruction]]] = [defaultdict(deque) for _ in range(num_ranks)]
    done: list[list[Instruction]] = [[] for _ in range(num_ranks)]
    free_at, held, peaks = [0.0] * num_ranks, [0] * num_ranks, [0] * num_ranks
    wakes: list[tuple[float, int]] = []

    def arrive(each: Instruction, at: float) -> None:
        """Note that something that a computation waits for is there from `at` on."""
        rank = extent.rank_of_stage[each.stage]
        ready_at[each] = max(ready_at.get(each, 0.0), at)
        awaited[each] -= 1
        if awaited[each] <= 0:
            if most_held is not None:
                queues[rank][work.queue(each)].append(each)
            heapq.heappush(wakes, (max(ready_at[each], free_at[rank]), rank))

    def chosen(rank: int, now: float) -> Instruction | None:
        if most_held is None:
            row, at = work.rows[rank], len(done[rank])
            each = row[at] if at < len(row) else None
            return each if each is not None and awaited[each] <= 0 and ready_at[each] <= now else None
        heads = [queue[0] for queue in queues[rank].values() if queue and ready_at[queue[0]] <= now]
        if held[rank] >= most_held[rank]:
            heads = [each for each in heads if each.kind is not Kind.FORWARD or each.stage != first_stage[rank]]
        return min(heads, key=priority.__getitem__, default=None)

    for row in work.rows:
        for each in sorted(row, key=lambda each: each.microbatch):
            if not awaited[each]:
                arrive(each, 0.0)
    while wakes:
        now, rank = heapq.heappop(wakes)
        if now < free_at[rank] or (each := chosen(rank, now)) is None:
            continue
        if most_held is not None:
            queues[rank][work.queue(each)].popleft()
        done[rank].append(each)
        free_at[rank] = end = now + work.seconds(each)
        held[rank] += (each.kind is Kind.FORWARD) - (each.kind in ENDS_BACKWARD)
        peaks[rank] = max(peaks[rank], held[rank])
        heapq.heappush(wakes, (end, rank))
        for following, takes in work.followers(each):
            arrive(following, end + takes)
    if any(len(row) != len(own) for row, own in zip(done, work.rows, strict=True)):
        return None
    return Ordered(tuple(map(tuple, done)), max(free_at), tuple(peaks))


def bound(work: Work) -> float:
    """Return a time that no order of these computations on these ranks undercuts, in seconds.

    A rank begins when the first microbatch has come through the stages before it. It has all its work to do, and behind
    its last backward the gradient has its way to the first stage.
    """
    found = 0.0
    head, tail = _head_and_tail(work)
    for row in work.rows:
        stages = {each.stage for each in row}
        begins, ends = min(map(head.__getitem__, stages)), min(map(tail.__getitem__, stages))
        everything = sum(map(work.seconds, row))
        found = max(
            found,
            begins + everything,
            begins + ends + everything - sum(work.seconds(each) for each in row if each.kind is _WEIGHT),
        )
    return found


def busiest(sharing: Sharing, costs: Costs) -> float:
    """Return the seconds of the busiest rank's computations of a batch, which no steady state undercuts."""
    work = Work(sharing, costs)
    return max(sum(map(work.seconds, row)) for row in work.rows)


def _head_and_tail(work: Work) -> tuple[list[float], list[float]]:
    """For each stage, the least seconds before its first forward, and behind its last backward, or half I."""
    extent = work.extent
    head, tail = [0.0] * extent.num_stages, [0.0] * extent.num_stages
    by_stage: dict[int, dict[Kind, Instruction]] = defaultdict(dict)
    for row in work.rows:
        for each in row:
            by_stage[each.stage].setdefault(each.kind, each)
    for stage in range(extent.num_stages):
        before = extent.graph.makers(Tensor.ACTIVATION, stage)
        forwards = (head[each] + work.seconds(by_stage[each][Kind.FORWARD]) for each in before)
        head[stage] = min(forwards, default=0.0)
        backwards = (
            tail[each] + work.seconds(by_stage[each].get(Kind.BACKWARD) or by_stage[each][_INPUT]) for each in before
        )
        tail[stage] = min(backwards, default=0.0)
    return head, tail


def limits(sharing: Sharing, most_held: int | None, more: Sequence[int]) -> list[tuple[int, ...]]:
    """Return how many microbatches each rank may hold: as many as while no rank is lost, and some more or fewer.

    `most_held`: the largest number; None: that of the fullest rank while no rank is lost.
    """
    size = sharing.num_microbatches
    own = sharing.schedule.max_saved_on_rank((size,) * (1 + sharing.schedule.settling_batches))
    limit = max(own) if most_held is None else most_held
    found = (tuple(max(1, min(limit, own[rank] + each)) for _, rank in sharing.ranks) for each in more)
    return list(dict.fromkeys(found))


def drained_orders(sharing: Sharing, costs: Costs, most_held: int | None) -> list[Ordered]:
    """Return orders of a schedule that drains after each batch, the fastest first.

    Args:
        sharing: the ranks that are left.
        costs: the costs of the model's stages and edges.
        most_held: the number of microbatches that a rank may hold, over its stages (see `limits`).
    """
    work = Work(sharing, costs)
    bounds = limits(sharing, most_held, _MORE)
    tried = [run(work), *(run(work, each, first) for each in bounds for first in work.priorities)]
    found = [each for each in tried if each is not None]
    return sorted(found, key=lambda each: (each.seconds, max(each.held), sum(each.held)))


def steady_orders(sharing: Sharing, costs: Costs, most_held: int | None, num_batches: int) -> list[Ordered]:
    """Return orders of batches that follow one another without a drain, with their time at `costs`.

    Ranks begin what is ready in the order of the merged rows. Where a rank has as many microbatches as it may hold,
    this takes it as little behind that order as can be, so the rows repeat with every batch. They repeat most surely if
    all stages take the same time.
    """
    real, found = Work(sharing, costs, num_batches), {}
    for assumed in (Costs(), costs):
        work = Work(sharing, assumed, num_batches)
        ways = limits(sharing, most_held, _FEW_MORE)
        for ordered in (run(work), *(run(work, each, work.priorities[1]) for each in ways)):
            if ordered is not None and ordered.rows not in found:
                timed = run(real.with_rows(ordered.rows))
                found[ordered.rows] = ordered if timed is None else timed
    return list(found.values())
