"""The order of computations on the ranks that are left.

Two ways lead to rows:

- **Merged.** Without a loss, the replicas run in step. So a rank runs its own computations and those that it takes
  over in the order in which the whole job would start them, by the simulation of one replica. In this order each
  computation starts after the computations that it waits for. So such rows are free of deadlocks, and they repeat with
  every batch if the schedule does.
- **Listed.** Each rank starts computations that are ready: backwards first, then forwards while it holds few enough
  microbatches, then the halves W of backwards, which fill its bubbles. So the work that it takes over moves into its
  idle time. Over each edge microbatches arrive in the order in which they were sent.

Both ways are tried. The second is tried with several numbers of microbatches that a rank may hold, and with smaller
numbers if ranks of several stages come to hold too many. Under weights that need no drain, the second way starts ready
computations in the order of the first way. If such an order does not settle, a late batch becomes the pattern of all
batches: each batch runs in the order of that batch's starts, one period behind the batch before.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from operator import itemgetter

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import BEGINS_BACKWARD, ENDS_BACKWARD, Instruction, Kind, Rows, Tensor
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.survivors.room import Room
from megatron.pipeline.survivors.sharing import Sharing

_INPUT = Kind.BACKWARD_INPUT
_WEIGHT = Kind.BACKWARD_WEIGHT
_MORE = (-8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12, 16)
_FEW_MORE = (0, 1, 2, 4)
"""The numbers of microbatches that a rank may hold beyond those of the undisturbed job, one for each order to try."""


def _urgency(kind: Kind) -> int:
    """Return the urgency of a kind, the least number first: backwards 0, forwards 1, the halves W of backwards 2."""
    return 2 if kind is _WEIGHT else int(kind not in BEGINS_BACKWARD)


@dataclass(frozen=True)
class Ordered:
    """Rows of computations, by their numbers in `Work`, with their time from drained to drained, without updates.

    Attributes:
        starts: the start of each computation, in seconds.
        held: for each rank, the largest number of microbatches between forward and end of backward, over its stages.
    """

    rows: list[list[int]]
    starts: list[float]
    seconds: float
    held: tuple[int, ...]


class Work:
    """The numbered computations of batches on the ranks that are left, and their dependencies.

    All attributes but the first three have an entry for each computation, by its number.

    Attributes:
        extent: the extent of the batches.
        rows: the merged rows, which hold the number of every computation once.
        turns: for each rank, its turn among ranks that could start a computation at the same time.
        computations: the computation itself.
        places: the place of its microbatch (`Sharing.place`).
        ranks, seconds: its rank, and the seconds that it takes.
        first: whether it is a forward of its rank's first stage.
        held: the change in the number of microbatches that its rank holds.
        num_awaited: the number of computations that it waits for.
        followers: the computations that wait for it, with the seconds from its end to the moment when they may start.
            Both have further entries behind those of the computations, for joins of predictions.
        queues: the number of its queue. A rank starts the computations of a queue in the order of their arrival.
        priorities: its places in two orders: backwards, then forwards, then W; and the order of the merged rows.
    """

    def __init__(self, sharing: Sharing, costs: Costs, num_batches: int = 1) -> None:
        self.extent = extent = sharing.extent_of(num_batches)
        merged = merged_rows(sharing, num_batches)
        self.computations = everything = [each for row in merged for each in row]
        number = {each: at for at, each in enumerate(everything)}
        self.rows = [[number[each] for each in row] for row in merged]
        self.places = [sharing.place(each.microbatch) for each in everything]
        of_turn = sorted(
            range(len(merged)),
            key=lambda at: (
                sharing.ranks[at].rank,
                (sharing.places[sharing.ranks[at].replica] + 1) % sharing.num_replicas,
            ),
        )
        self.turns = [of_turn.index(rank) for rank in range(len(merged))]
        self.ranks = [extent.rank_of_stage[each.stage] for each in everything]
        first_stages = {extent.stages_of(rank)[0] for rank in range(len(merged))}
        self.first = [each.kind is Kind.FORWARD and each.stage in first_stages for each in everything]
        self.held = [(each.kind is Kind.FORWARD) - (each.kind in ENDS_BACKWARD) for each in everything]
        of_row = [at for row in merged for at in range(len(row))]
        self.priorities = self._urgency(self.places), of_row
        costs = sharing.costs(costs)
        self.seconds = _seconds(extent, costs, everything)
        self.followers = _followers(extent, costs, number)
        self.num_awaited = [0] * len(everything)
        sources: list[list[int]] = [[] for _ in everything]
        for at, followers in enumerate(self.followers):
            for follower, _ in followers:
                self.num_awaited[follower] += 1
                sources[follower].append(everything[at].stage)
        queues: dict[tuple, int] = {}
        self.queues = [
            queues.setdefault((each.kind, each.stage, *sorted(sources[at])), len(queues))
            for at, each in enumerate(everything)
        ]
        if extent.weights.predicts and extent.provisional_microbatches != 0:
            self._add_predictions()

    def _add_predictions(self) -> None:
        """Add the waits for predictions, through joins: numbers behind those of the computations.

        At a copy, other backwards of a batch come after those that the prediction from that batch reads. At all copies
        of a stage, the forwards of the next batch come after these, and those of an embedding's other stage, too.
        """
        extent, stage_of = self.extent, [copy.stage for copy in self.extent.copies]
        of_batch: dict[tuple[int, int], int] = {}  # model stage, batch -> the join of all its copies
        read: dict[tuple[int, int], list[int]] = {}
        others: dict[tuple[int, int], list[int]] = {}
        for at, each in enumerate(self.computations):
            batch, position = divmod(each.microbatch, extent.batches[0])
            if each.kind is Kind.FORWARD:
                continue
            key = each.stage, batch
            if position >= extent.num_read(each.stage, 0):
                others.setdefault(key, []).append(at)
            elif each.kind in ENDS_BACKWARD:
                read.setdefault(key, []).append(at)
        for (stage, batch), computations in read.items():
            whole = of_batch.get((stage_of[stage], batch))
            if whole is None:
                whole = of_batch[stage_of[stage], batch] = self._add_join()
            own = self._add_join()
            for at in computations:
                self._wait(at, own)
            for at in (whole, *others.get((stage, batch), ())):
                self._wait(own, at)
        tied = {stage_of[each] for each in extent.tied_stages} if extent.ties_ranks else set()
        for at, each in enumerate(self.computations):
            if each.kind is Kind.FORWARD and each.microbatch >= extent.batches[0]:
                stage, before = stage_of[each.stage], each.microbatch // extent.batches[0] - 1
                for other in {stage, 0} if stage in tied else {stage}:
                    self._wait(of_batch[other, before], at)

    def _add_join(self) -> int:
        self.followers.append([])
        self.num_awaited.append(0)
        return len(self.followers) - 1

    def _wait(self, at: int, follower: int) -> None:
        self.followers[at].append((follower, 0.0))
        self.num_awaited[follower] += 1

    def _urgency(self, places: Sequence[int]) -> list[int]:
        """Return the place of each computation in the order backwards, forwards, W; within each, by `places`."""
        keys = [(_urgency(each.kind), places[at], -each.stage) for at, each in enumerate(self.computations)]
        place = {key: at for at, key in enumerate(sorted(keys))}
        return [place[key] for key in keys]

    def with_rows(self, rows: list[list[int]]) -> Work:
        """Return the same work with other rows, for runs in which ranks keep the order of their rows."""
        other = copy(self)
        other.rows = rows
        return other

    def instructions(self, rows: list[list[int]]) -> Rows:
        """Return rows of numbers as rows of instructions."""
        return tuple(tuple(self.computations[at] for at in row) for row in rows)


def _seconds(extent: Extent, costs: Costs, computations: Sequence[Instruction]) -> list[float]:
    """Return the seconds of each computation, a backward with its recompute."""
    seconds = {kind: list(each) for kind, each in costs.seconds(extent.num_stages).items()}
    for stage in filter(extent.recomputes, range(extent.num_stages)):
        for kind in (Kind.BACKWARD, _INPUT):
            seconds[kind][stage] += seconds[Kind.RECOMPUTE][stage]
    return [seconds[each.kind][each.stage] for each in computations]


def _followers(extent: Extent, costs: Costs, number: Mapping[Instruction, int]) -> list[list[tuple[int, float]]]:
    """Return for each computation those that wait for it, with the seconds from its end to their earliest start."""
    graph, rank_of_stage = extent.graph, extent.rank_of_stage
    forward, backward, latency = costs.edges(len(graph.edges))
    takers: dict[Tensor, list[list[tuple[int, float]]]] = {
        tensor: [[] for _ in range(extent.num_stages)] for tensor in Tensor
    }
    for at, edge in enumerate(graph.edges):
        crosses = rank_of_stage[edge.source] != rank_of_stage[edge.target]
        takers[Tensor.ACTIVATION][edge.source].append((edge.target, crosses * (forward[at] + latency[at])))
        if edge.gradient:
            takers[Tensor.GRADIENT][edge.target].append((edge.source, crosses * (backward[at] + latency[at])))
    backwards = {
        (each.stage, each.microbatch): at for each, at in number.items() if each.kind in (Kind.BACKWARD, _INPUT)
    }
    found: list[list[tuple[int, float]]] = []
    for each in number:
        kind, stage, microbatch = each.kind, each.stage, each.microbatch
        followers = []
        if kind is Kind.FORWARD:
            followers.append((backwards[stage, microbatch], 0.0))
        elif kind is _INPUT:
            followers.append((number[Instruction(_WEIGHT, stage, microbatch)], 0.0))
        for other, takes in takers[kind.row.makes][stage] if kind.row.makes else ():
            if extent.takes(other, microbatch):
                is_forward = kind is Kind.FORWARD
                following = number[Instruction(kind, other, microbatch)] if is_forward else backwards[other, microbatch]
                followers.append((following, takes))
        found.append(followers)
    return found


def merged_rows(sharing: Sharing, num_batches: int) -> Rows:
    """Return the rows of the first batches, in the order in which undisturbed replicas start the computations."""
    schedule, num_replicas, extent = sharing.schedule, sharing.num_replicas, sharing.extent
    program = schedule.build((sharing.num_microbatches,) * num_batches)
    timeline = simulate(program)  # in units of a forward, whose sums are exact
    keyed: list[list[tuple[float, int, int, Instruction]]] = [[] for _ in sharing.ranks]
    for rank, (row, starts) in enumerate(zip(program.rows, timeline.starts, strict=True)):
        for at, (each, start) in enumerate(zip(row, starts, strict=True)):
            if not each.kind.is_computation or each.kind is Kind.RECOMPUTE:
                continue
            for replica in range(num_replicas):
                microbatch = each.microbatch * num_replicas + replica
                stage = sharing.number_of[each.stage, sharing.takers[rank][microbatch % sharing.batch_size]]
                found = start, at, sharing.place(microbatch), Instruction(each.kind, stage, microbatch)
                keyed[extent.rank_of_stage[stage]].append(found)
    return tuple(tuple(each for *_, each in sorted(row, key=itemgetter(0, 1, 2))) for row in keyed)


def run(work: Work, most_held: Sequence[int] | None = None, priority: Sequence[int] = ()) -> Ordered | None:
    """Run the computations of a batch, and return the order in which the ranks have started them.

    Args:
        work: the computations.
        most_held: for each rank, the number of held microbatches at which it starts no further forward of its first
            stage; None: each rank keeps the order of `work.rows`.
        priority: for each computation, its priority; a rank starts the ready computation with the least number.

    Returns:
        The order; None if ranks wait for one another.
    """
    num_ranks, num_awaited, ranks, seconds = len(work.rows), list(work.num_awaited), work.ranks, work.seconds
    keeps_rows = most_held is None
    ready_at, starts = [0.0] * len(num_awaited), [0.0] * len(num_awaited)
    queues: list[dict[int, deque[int]]] = [{} for _ in range(num_ranks)]
    done: list[list[int]] = [[] for _ in range(num_ranks)]
    free_at, held, peaks = [0.0] * num_ranks, [0] * num_ranks, [0] * num_ranks
    wakes: list[tuple[float, int, int]] = []

    def becomes_ready(each: int) -> None:
        if each >= len(ranks):  # a join; what arrived first waits first
            for follower, _ in sorted(work.followers[each], key=lambda pair: ready_at[pair[0]]):
                ready_at[follower] = max(ready_at[follower], ready_at[each])
                num_awaited[follower] -= 1
                if not num_awaited[follower]:
                    becomes_ready(follower)
            return
        rank = ranks[each]
        if not keeps_rows:
            queues[rank].setdefault(work.queues[each], deque()).append(each)
        heapq.heappush(wakes, (max(ready_at[each], free_at[rank]), work.turns[rank], rank))

    def chosen(rank: int, now: float) -> int | None:
        if keeps_rows:
            row, at = work.rows[rank], len(done[rank])
            each = row[at] if at < len(row) else None
            return each if each is not None and not num_awaited[each] and ready_at[each] <= now else None
        heads = [queue[0] for queue in queues[rank].values() if queue and ready_at[queue[0]] <= now]
        if held[rank] >= most_held[rank]:
            heads = [each for each in heads if not work.first[each]]
        return min(heads, key=priority.__getitem__, default=None)

    for row in work.rows:
        for each in sorted(row, key=work.places.__getitem__):
            if not num_awaited[each]:
                becomes_ready(each)
    while wakes:
        now, _, rank = heapq.heappop(wakes)
        if now < free_at[rank] or (each := chosen(rank, now)) is None:
            continue
        if not keeps_rows:
            queues[rank][work.queues[each]].popleft()
        done[rank].append(each)
        starts[each] = now
        free_at[rank] = end = now + seconds[each]
        held[rank] += work.held[each]
        peaks[rank] = max(peaks[rank], held[rank])
        heapq.heappush(wakes, (end, work.turns[rank], rank))
        for follower, takes in work.followers[each]:
            ready_at[follower] = max(ready_at[follower], end + takes)
            num_awaited[follower] -= 1
            if not num_awaited[follower]:
                becomes_ready(follower)
    if any(len(row) != len(own) for row, own in zip(done, work.rows, strict=True)):
        return None
    return Ordered(done, starts, max(free_at), tuple(peaks))


def _caps(room: Room, more: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the caps to try: how many microbatches each rank may begin, as in the undisturbed job plus `more`."""
    own = room.sharing.begun_undisturbed
    ranks = list(zip(room.sharing.ranks, room.most, strict=True))
    found = (tuple(max(1, min(most, own[rank] + each)) for (_, rank), most in ranks) for each in more)
    return list(dict.fromkeys(found))


def drained_orders(room: Room, costs: Costs) -> tuple[Work, list[Ordered]]:
    """Return orders of a schedule that drains after each batch, the fastest first.

    Args:
        room: the microbatches that ranks may hold and begin; not all orders keep to it.
        costs: the costs of the model's stages and edges.
    """
    work = Work(room.sharing, costs)
    tried = [run(work)]
    for priority in work.priorities:
        known: set[tuple[int, ...]] = set()
        for caps in _caps(room, _MORE):
            tried += _within(work, caps, priority, room, known)
    found = [each for each in tried if each is not None]
    return work, sorted(found, key=lambda each: (each.seconds, max(each.held), sum(each.held)))


def _within(
    work: Work, caps: tuple[int, ...], priority: Sequence[int], room: Room, known: set[tuple[int, ...]]
) -> Iterator[Ordered | None]:
    """Run the computations, and run them again with smaller caps for ranks of several stages that begin too many.

    `known`: the caps that have been tried; this function adds those that it tries.
    """
    while caps not in known:
        known.add(caps)
        yield (ordered := run(work, caps, priority))
        if ordered is not None:
            over = room.over(ordered.held)
            caps = tuple(max(1, cap - each) for cap, each in zip(caps, over, strict=True))


def steady_orders(room: Room, costs: Costs, num_batches: int) -> tuple[Work, list[Ordered]]:
    """Return orders of batches that follow one another without a drain, with their time at `costs`.

    Orders that keep to the room come first, and of these the fastest.

    Ranks start ready computations in the order of the merged rows, while they hold few enough microbatches. If such an
    order does not settle, one of its batches becomes the pattern of all batches.
    """
    sharing = room.sharing
    real, found = Work(sharing, costs, num_batches), {}
    caps = _caps(room, _FEW_MORE)
    for work in dict.fromkeys((real, real if costs == Costs() else Work(sharing, Costs(), num_batches))):
        listed = [run(work), *(run(work, each, work.priorities[1]) for each in caps)]
        for ordered in filter(None, listed):
            rows = ordered.rows if _repeats(work, ordered.rows, num_batches) else _patterned(work, ordered, num_batches)
            if (key := tuple(map(tuple, rows))) not in found and (timed := run(real.with_rows(rows))):
                found[key] = timed
    return real, sorted(found.values(), key=lambda each: (any(room.over(each.held)), each.seconds, max(each.held)))


def _repeats(work: Work, rows: list[list[int]], num_batches: int) -> bool:
    """Whether each rank's computations of the last batch but one repeat those of the batch before, one batch later."""
    size = work.extent.batches[0]
    for row in rows:
        whole = len(row) // num_batches
        words = [work.computations[each] for each in row[len(row) - 3 * whole : len(row) - whole]]
        for each, later in zip(words[:whole], words[whole:], strict=True):
            if (later.kind, later.stage, later.microbatch) != (each.kind, each.stage, each.microbatch + size):
                return False
    return True


def _patterned(work: Work, ordered: Ordered, num_batches: int) -> list[list[int]]:
    """Return rows in which every batch has the order of a late batch's starts, one period behind the batch before.

    A computation waits only for computations of its own microbatch, and they start before it. So no deadlock occurs.
    What waits for a prediction starts after what the prediction reads in the pattern, and so in every batch.
    """
    size, pattern = work.extent.batches[0], num_batches - 3
    number = {each: at for at, each in enumerate(work.computations)}
    of_pattern = [each for each in work.computations if each.microbatch // size == pattern]
    later = (number[replace(each, microbatch=each.microbatch + size)] for each in of_pattern)
    period = max(ordered.starts[at] - ordered.starts[number[each]] for each, at in zip(of_pattern, later, strict=True))

    def start(at: int) -> float:
        each = work.computations[at]
        batch, position = divmod(each.microbatch, size)
        alike = number[replace(each, microbatch=pattern * size + position)]
        return ordered.starts[alike] + (batch - pattern) * period

    return [sorted(row, key=start) for row in ordered.rows]
