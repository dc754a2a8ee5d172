"""The time of microbatches in the stages of a pipeline: from one microbatch to the next, and of a whole batch.

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

from itertools import accumulate
from operator import add

from megatron.planner.time.stage_times import StageTimes

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
    """Return `busy_at` for each of `ranks`, where ranks have several stages.

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
