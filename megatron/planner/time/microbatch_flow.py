"""How long microbatches take through the stages of a pipeline: from one to the next, and all of a batch.

w is a microbatch's forward and backward at a stage, f and b the one and the other, c a transfer (bytes / bandwidth +
latency) over an edge.

Stage s of 1F1B has a = p - s forwards ahead, of its first backward included. It waits for that one if its trip T, (sum
of w and 2 c from s on), is longer than the a forwards and the backward; and in the mirror image, for its last one. The
rate without a drain is the largest w, or the largest round trip: between stages s and e it is (sum of w + 2 c) over the
number of these stages, for as many microbatches are in flight there. A receive stands one computation ahead, so a rate
is also f + c and b + c at least. All w equal and c = 0 gives the known bubble, (p - 1) / m of the ideal time, and
(p - 1) / (v m) with interleaving (Narayanan et al. 2021, section 2.2). Of interleaved 1F1B the first group of
microbatches passes all stages, each rank p times through one of its stages before it turns to the next: each edge
counts, there and back. A form does not hold, and is None, where a round trip or a receive is slower than the slowest
stage, a move of saved activations slower than a computation, or ranks wait for the slow stages of others.
"""

from itertools import accumulate
from operator import add

from megatron.planner.time.stage_times import StageTimes

_SLACK = 0.01
"""The part of the time of a microbatch by which something may exceed it that a form leaves out."""


def flow(seconds: list[float], arrival: list[float], occupation: float) -> list[float]:
    """By stage, from one microbatch to the next of those that only pass in one direction. A receive is posted two
    computations ahead.
    """
    return [max(own, occupation, (own + there) / 2) for own, there in zip(seconds, arrival, strict=True)]


def passage(stages: StageTimes) -> list[float]:
    """What a microbatch takes at each stage and over the edge behind it, there and back."""
    there, back = [*stages.arrival_forward[1:], 0.0], stages.arrival_backward
    return [sum(each) for each in zip(stages.work, there, back, strict=True)]


def round_trips(stages: StageTimes, between: list[float] | None = None) -> float:
    """Seconds from one microbatch to the next of 1F1B, once the pipeline is full: as the slowest stage, edge or
    receive, or round trip between any two stages, in which as many microbatches are in flight as it has stages.

    `between`: of each stage, what stands between a backward and the next forward.
    """
    p, once = len(stages.work), passage(stages)
    between = between or [0.0] * p
    rate = max(
        *map(add, stages.forward, stages.arrival_forward),  # a receive is posted behind the forward before
        *map(add, stages.backward, stages.arrival_backward),
        stages.occupation,
    )
    while True:  # each turn finds the stages that are slowest together, if any are slower
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
    """By stage, seconds from the beginning of a batch to its last backward if this stage computes all the time that it
    can: all but before its first forward, while its first and last microbatch pass the stages behind it, and behind its
    last backward.
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
    """The same by rank, where ranks have several stages: between its first backward and its last forward a rank
    computes all the time. What is before takes the way of the first group of microbatches, and what is behind that of
    the last group, which is the same backwards.
    """
    p, v = stages.schedule.num_ranks, stages.schedule.num_virtual_stages
    arrival = [0.0, *stages.arrival_backward[:-1]]  # over the edge before each stage, too
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
    """By stage, when the first microbatch comes to it, where each rank takes p microbatches through one of its stages
    before it turns to the next.
    """
    begins, ends = [0.0], [p * seconds[0]]
    for stage in range(1, len(seconds)):
        begin = begins[-1] + seconds[stage - 1] + arrival[stage]
        begins.append(max(begin, ends[stage - p]) if stage >= p else begin)
        ends.append(max(begins[-1] + p * seconds[stage], ends[-1] + arrival[stage] + seconds[stage]))
    return begins
