"""The times of a microbatch by stage and edge, and how microbatches follow one another through a pipeline.

Notation: w is a microbatch's forward and backward at a stage, f the forward, b the backward, and c a transfer over an
edge (bytes / bandwidth + latency).

1F1B: stage s does a = p - s forwards before its first backward. It waits for that backward if the microbatch's trip T,
the sum of w and 2 c from s on, is longer than the a forwards and the backward. By symmetry it waits for its last
backward. The rate without a drain is the largest w or the largest round trip. A round trip between stages s and e is
(sum of w + 2 c) over the number of these stages, since as many microbatches are in flight there. A receive is posted
one computation ahead, so a rate is also at least f + c and b + c. Equal w and c = 0 give the known bubble, (p - 1) / m
of the ideal time, and (p - 1) / (v m) with interleaving (Narayanan et al. 2021, section 2.2).

Interleaved 1F1B: the first group of microbatches passes all stages. Each rank runs p microbatches through one of its
stages before it turns to its next stage. So each edge counts, forward and backward.

A closed form does not hold (and returns None) if a round trip or a receive is slower than the slowest stage, if a move
of saved activations is slower than a computation, or if ranks wait for slow stages of other ranks.
"""

from dataclasses import replace
from itertools import accumulate, pairwise
from operator import add

from megatron.pipeline.program.edges import stages_by_rank
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs


class StageTimes:
    """Seconds of the instructions of a schedule, by stage and edge.

    Attributes:
        schedule: the schedule.
        forward, backward: seconds of a microbatch at each stage.
        work: seconds of a microbatch's forward, backward and, if the program has one, recompute.
        fetch, store, update: seconds of a stage's copies and its update, if weights live on the host.
        step, reduce: seconds of a stage's update, and of its reduction over replicas (0 without replicas).
        predict, hold: seconds of a stage's prediction, and of keeping its gradients; 0 if weights are not predicted.
        reduce_embed: seconds of the reduction of tied embeddings between first and last stage.
        reduce_norm: seconds of the norm's reduction over all stages.
        partial: seconds of the reductions for which a stage's prediction waits.
        arrival_forward, arrival_backward: seconds of an activation over the edge to a stage, and of a gradient over the
            edge from the next stage; 0 within a rank.
        occupation: the most seconds for which a microbatch keeps an edge busy in one direction.
        moves: the most seconds of a move of a microbatch's saved activations; 0 if none move.
    """

    def __init__(self, costs: Costs, schedule: Schedule) -> None:
        num_stages = schedule.num_stages
        seconds = costs.by_name(num_stages)
        self.schedule = schedule
        self.forward, self.backward = seconds["forward"], seconds["backward"]
        recompute = [each if schedule.recomputes(stage) else 0.0 for stage, each in enumerate(seconds["recompute"])]
        self.work = [sum(each) for each in zip(self.forward, self.backward, recompute, strict=True)]
        self.fetch, self.store, self.update = seconds["fetch"], seconds["store"], seconds["update"]
        self.step = seconds["step"]
        predicts = schedule.weights.predicts
        self.predict = seconds["predict"] if predicts else [0.0] * num_stages
        self.hold = seconds["hold"] if predicts else [0.0] * num_stages
        self.reduce = seconds["reduce_grad"] if schedule.data_parallel else [0.0] * num_stages
        self.reduce_embed = max(seconds["reduce_embed"]) if schedule.ties_ranks else 0.0
        self.reduce_norm = max(seconds["reduce_norm"])
        self.partial = [each if schedule.reduce_partial else 0.0 for each in self.reduce]
        for stage in schedule.tied_stages if schedule.ties_ranks and schedule.provisional_microbatches != 0 else ():
            self.partial[stage] += self.reduce_embed
        if not predicts:
            self.partial = [0.0] * num_stages
        crosses = [one != other for one, other in pairwise(schedule.rank_of_stage)]
        edges = [[each * c for each, c in zip(times, crosses, strict=True)] for times in costs.edges(num_stages - 1)]
        forward, backward, latency = edges
        self.arrival_forward = [0.0, *map(add, forward, latency)]
        self.arrival_backward = [*map(add, backward, latency), 0.0]
        self.occupation = max(forward + backward, default=0.0)
        moves = list(map(max, seconds["evict"], seconds["load"]))
        self.moves = moves if schedule.balance else [0.0] * num_stages

    def by_rank(self, values: list[float]) -> list[float]:
        """Return, by rank, the sums of the values of its stages."""
        return [sum(values[stage] for stage in stages) for stages in stages_by_rank(self.schedule.rank_of_stage)]

    def held(self, num_microbatches: int) -> list[float]:
        """Return, by stage, the seconds to keep gradients, in batches of `num_microbatches`."""
        holds = self.schedule.needs_gradient_copy(num_microbatches)
        return [seconds if is_held else 0.0 for seconds, is_held in zip(self.hold, holds, strict=True)]

    @property
    def longest_step(self) -> float:
        return max(self.by_rank(self.step))

    def longest_update(self, num_microbatches: int) -> float:
        """Return the most seconds that a rank computes once a batch: the sum of `updates` over its stages."""
        return max(self.by_rank(self.updates(num_microbatches)))

    def updates(self, num_microbatches: int) -> list[float]:
        """Return, by stage, the seconds of work once a batch: the step and, with predictions, PREDICT and HOLD."""
        return [sum(each) for each in zip(self.step, self.predict, self.held(num_microbatches), strict=True)]


MANY = (1 << 20,)  # a batch with enough microbatches to fill any pipeline


def moving_parts(schedule: Schedule) -> list[float]:
    """Return, by rank, the approximate fraction of its microbatches that move to the rank's pair.

    Of n microbatches in flight these are the ones that exceed the bound, and one more to make room for a microbatch
    that comes back.
    """
    if not schedule.balance:
        return [0.0] * schedule.num_ranks
    own, bounds = (each.max_saved_on_rank(MANY) for each in (replace(schedule, balance=False), schedule))
    evicting = set(schedule.evicting_ranks(MANY))
    return [
        (count - bound + 1) / count if rank in evicting else 0.0
        for rank, (count, bound) in enumerate(zip(own, bounds, strict=True))
    ]


def hides_moves(stages: StageTimes) -> bool:
    """Return whether no instruction waits for moves of saved activations: no move is longer than a computation."""
    computations = zip(stages.moves, stages.forward, stages.backward, strict=True)
    return all(moves <= min(forward, backward) * (1 + 1e-9) for moves, forward, backward in computations)


_SLACK = 0.01
"""The fraction of a microbatch's time by which a time that a closed form ignores may exceed it."""


def flow(seconds: list[float], arrival: list[float], occupation: float) -> list[float]:
    """Return, by stage, the seconds from one microbatch to the next while microbatches pass only in one direction.

    A receive is posted two computations ahead.
    """
    return [max(own, occupation, (own + there) / 2) for own, there in zip(seconds, arrival, strict=True)]


def passage(stages: StageTimes) -> list[float]:
    """Return the seconds of a microbatch at each stage and over the edge behind it, forward and backward."""
    there, back = [*stages.arrival_forward[1:], 0.0], stages.arrival_backward
    return [sum(each) for each in zip(stages.work, there, back, strict=True)]


def round_trips(stages: StageTimes, between: list[float] | None = None) -> float:
    """Return the seconds from one microbatch to the next of 1F1B in a full pipeline.

    This is the time of the slowest stage, edge, receive or round trip. On a round trip between two stages as many
    microbatches are in flight as it has stages. `between`: for each stage, the seconds between a backward and the next
    forward.
    """
    p, once = len(stages.work), passage(stages)
    between = between or [0.0] * p
    rate = max(
        *map(add, stages.forward, stages.arrival_forward),  # a receive is posted behind the previous forward
        *map(add, stages.backward, stages.arrival_backward),
        stages.occupation,
    )
    while True:  # each pass finds the round trip that exceeds the rate most, if any does
        most, mean, total, first = 0.0, rate, 0.0, 0
        for stage in range(p):
            if total <= between[stage]:
                total, first = between[stage], stage
            own = total + stages.work[stage] - rate
            if own > most:
                most, mean = own, rate + own / (stage - first + 1)
            total += once[stage] - rate
        if most <= 1e-12 * rate * p:
            return rate
        rate = mean


def keeps_up(rate: float, row: float) -> bool:
    return rate <= row * (1 + _SLACK)


def busy_at(stages: StageTimes, m: int) -> list[float]:
    """Return, by stage, the seconds from the beginning of a batch to its last backward if this stage is the slowest.

    The stage then computes all the time except before its first forward, behind its last backward, and while its first
    and its last microbatch pass the stages behind it.
    """
    p, once = len(stages.work), passage(stages)
    before = list(accumulate(once, initial=0.0))
    found = []
    for stage, (forward, backward) in enumerate(zip(stages.forward, stages.backward, strict=True)):
        ahead, trip, work = p - stage, before[p] - before[stage], stages.work[stage]
        if m > ahead:
            own = m * work + max(0.0, trip - ahead * forward - (work - forward))
            own += max(0.0, trip - ahead * (work - forward) - forward)
        else:
            own = max(m * work, trip + (m - 1) * max(forward, backward))
        found.append(before[stage] + own)
    return found


def busy_at_rank(stages: StageTimes, m: int, ranks: list[int]) -> list[float]:
    """Return `busy_at` for each of `ranks` if ranks have several stages.

    Between its first backward and its last forward a rank computes all the time. The time before follows the first
    group of microbatches through the stages. The time behind follows the last group, which is the mirror image.
    """
    p, v = stages.schedule.num_ranks, stages.schedule.num_virtual_stages
    arrival = [0.0, *stages.arrival_backward[:-1]]  # of gradients, over the edge before each stage
    ways = [(stages.forward, stages.arrival_forward), (stages.backward, arrival)]
    begins = [_first_group(*each, p) for each in ways]
    works, found = stages.by_rank(stages.work), []
    for rank in ranks:
        last, ahead, own = (v - 1) * p + rank, 2 * (p - 1 - rank) + 1, m * works[rank]
        of_first = max(0, ahead - p)  # of the next group, through the rank's first stage
        for (seconds, _), (others, arrives), begin in zip(ways, ways[::-1], begins, strict=True):
            row = (ahead - of_first) * seconds[last] + of_first * seconds[rank]
            back = sum(others[last + 1 :]) + sum(arrives[last + 1 :])
            own += max(begin[last] + row, begin[-1] + seconds[-1] + back)
            own -= row + p * sum(seconds[rank:last:p])
        found.append(own)
    return found


def _first_group(seconds: list[float], arrival: list[float], p: int) -> list[float]:
    """Return, by stage, the time at which the first microbatch arrives there.

    Each rank runs p microbatches through one of its stages before it turns to its next stage.
    """
    begins, ends = [0.0], [p * seconds[0]]
    for stage in range(1, len(seconds)):
        begin = begins[-1] + seconds[stage - 1] + arrival[stage]
        begins.append(max(begin, ends[stage - p]) if stage >= p else begin)
        ends.append(max(begins[-1] + p * seconds[stage], ends[-1] + arrival[stage] + seconds[stage]))
    return begins
