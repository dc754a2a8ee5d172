"""How long an iteration takes: in closed form to rank thousands of configurations, or by simulating the very program.

Notation: w is a microbatch's forward and backward at a stage, c a transfer (bytes / bandwidth + latency) over an edge.

    flush, bpipe          sum of w and 2 c over all stages and edges, for the first microbatch, and (m - 1) rates
    gpipe                 the same; its rate is the longest forward and the longest backward
    interleaved           m times a rank's w over all its stages, and the first stage's w of each other rank, and 2 c
    2bw                   m rates: nothing fills or drains
    pipedream             1 rate: every microbatch is a batch, whose reductions its STEP waits for at once

The rate of 1F1B is the largest w, or the largest round trip: stage s has p - s microbatches in flight, so one of them
ends every (sum of w + 2 c from s on) / (p - s). All w equal and c = 0 gives the known bubble, (p - 1) / m of the ideal
time, and (p - 1) / (v m) with interleaving (Narayanan et al. 2021, section 2.2).

After the last backward come the reductions and the optimizer's step; a stage that ends early reduces early. 2bw hides
them behind the next batch: of stage s only what exceeds (m - p + 1) w + s b shows. That is the time from its last
backward of a batch until the first stage needs the STEP, (p - 1 - s) w + s f after it began the batch after that; the
STEP waits for all stages, for their gradients' norm. The last stage ends its batches before the wait, which so makes
room for its reductions as well: what exceeds there shows in every other batch.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.pipeline.costs import Costs
from megatron.pipeline.instruction import Kind
from megatron.pipeline.program import Program
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.planner.configuration import Configuration

_MOST_SIMULATED = 60_000  # computations; beyond, an iteration is extrapolated from two that have fewer microbatches


@dataclass(frozen=True, kw_only=True)
class IterationTime:
    """Of one batch. `bubble`: the part in which the rank that computes most does not compute, 0 to 1."""

    seconds: float
    bubble: float

    @property
    def busy(self) -> float:
        """Seconds for which that rank computes or steps."""
        return (1 - self.bubble) * self.seconds


class _Stages:
    """A cost table by stage and edge."""

    def __init__(self, costs: Costs, configuration: Configuration) -> None:
        num_stages = configuration.num_stages
        seconds = costs.seconds(num_stages)
        self.forward, self.backward = seconds[Kind.FORWARD], seconds[Kind.BACKWARD]
        self.work = [forward + backward for forward, backward in zip(self.forward, self.backward, strict=True)]
        self.step = seconds[Kind.STEP]
        self.reduce = seconds[Kind.REDUCE_GRAD] if configuration.data > 1 else [0.0] * num_stages
        self.reduce_rest = costs.reduce_embed * (num_stages > 1) + max(seconds[Kind.REDUCE_NORM])
        forward, backward, latency = costs.edges(num_stages)
        self.round_trip = [f + b + 2 * each for f, b, each in zip(forward, backward, latency, strict=True)]
        self.occupation = [max(f, b) for f, b in zip(forward, backward, strict=True)]
        moved = moving_part(configuration.pipeline) if max(seconds[Kind.EVICT]) else ()
        self.moves = [
            part * (evict + load)
            for part, evict, load in zip(moved, seconds[Kind.EVICT], seconds[Kind.LOAD], strict=False)
        ]


def closed_form(costs: Costs, configuration: Configuration) -> IterationTime:
    """See the module."""
    stages, p, m = _Stages(costs, configuration), configuration.pipeline, configuration.num_microbatches
    by_rank = [sum(stages.work[rank::p]) for rank in range(p)]
    step = max(sum(stages.step[rank::p]) for rank in range(p))
    busiest = max(range(p), key=by_rank.__getitem__)
    if configuration.schedule == "2bw":
        seconds = max(m * _rate(stages, m + p) + step, *(_with_chain(stages, stage, m) for stage in range(p)))
    elif configuration.schedule == "pipedream":
        updates = [sum(each) for each in zip(stages.work, stages.reduce, stages.step, strict=True)]
        seconds = max(_rate(stages, p + 1) + step, *updates)
    elif configuration.virtual > 1:
        fill = sum(stages.work[:p]) - stages.work[busiest] + sum(stages.round_trip[: p - 1])
        seconds = m * by_rank[busiest] + fill + _end(stages, p) + step
    else:
        rate = _rate(stages, m)
        if configuration.schedule == "gpipe":
            rate = max([*stages.forward, *stages.occupation]) + max([*stages.backward, *stages.occupation])
        seconds = sum(stages.work) + sum(stages.round_trip) + (m - 1) * rate + _end(stages, p) + step
    return _time(seconds, m * by_rank[busiest] + step)


def _rate(stages: _Stages, num_microbatches: int) -> float:
    """Seconds from one microbatch to the next of 1F1B, once the pipeline is full."""
    rate, trip, p = max(stages.work), 0.0, len(stages.work)
    for stage in range(p - 1, -1, -1):
        trip += stages.work[stage] + (stages.round_trip[stage] if stage < p - 1 else 0.0)
        if p - stage < num_microbatches:
            rate = max(rate, trip / (p - stage))
    return max([rate, *stages.moves, *stages.occupation])


def _with_chain(stages: _Stages, stage: int, m: int) -> float:
    """Seconds of a 2bw batch where the STEP may have to wait for the reductions of a stage."""
    p, work = len(stages.work), stages.work[stage]
    alone = m * work + stages.step[stage]
    chain = stages.reduce[stage] + stages.reduce_rest
    window = (m - (p - 1 - stage)) * work - sum(stages.forward[:stage])
    if stage < p - 1:
        return alone + max(0.0, chain - window)
    return max(chain, alone + max(0.0, chain - window - stages.step[stage]) / 2)


def moving_part(p: int) -> list[float]:
    """About which part of the microbatches the stages of 1F1B move to their pairs, under BPipe's bound: of n in flight
    as many as exceed the bound, and one more to make room for those that come back."""
    bound = (p + 3) // 2
    return [max(0, p - stage - bound + 1) / (p - stage) if p - stage > bound else 0.0 for stage in range(p)]


def _end(stages: _Stages, p: int) -> float:
    """Seconds from the last backward, which is the first stage's, to the STEP. Later stages have ended before."""
    ends, earlier = [], 0.0
    for rank in range(p):
        ends.append(sum(stages.reduce[rank::p]) - earlier)
        earlier += stages.backward[rank]
    return max(0.0, *ends) + stages.reduce_rest


def simulated(costs: Costs, configuration: Configuration, schedule: Schedule) -> IterationTime:
    """Execute the program of a batch, or of a steady period where batches do not drain.

    Where the batch is large, its time is extrapolated from two batches with fewer microbatches: what further groups of
    p microbatches add, once the pipeline is full, hardly changes. What 2bw hides of its reductions does, as more
    microbatches hide more; so that part is of the closed form.
    """
    m, p = configuration.num_microbatches, configuration.pipeline
    groups = max(4, min(16, _MOST_SIMULATED // (configuration.num_stages * p)))
    more, span = groups * p + m % p, groups // 2 * p
    if m * configuration.num_stages <= _MOST_SIMULATED or m <= more:
        return _time(*_simulate(costs, schedule, m))
    shown = 0.0
    if not schedule.weights.drains:
        hidden = replace(costs, reduce_grad=0.0, reduce_embed=0.0, reduce_norm=0.0)
        shown = closed_form(costs, configuration).seconds - closed_form(hidden, configuration).seconds
        costs = hidden
    fewer_seconds, fewer_busy = _simulate(costs, schedule, more - span)
    seconds, busy = _simulate(costs, schedule, more)
    times = (m - more) / span
    return _time(seconds + times * (seconds - fewer_seconds) + shown, busy + times * (busy - fewer_busy))


def _time(seconds: float, busy: float) -> IterationTime:
    return IterationTime(seconds=seconds, bubble=max(0.0, 1 - busy / seconds))


def _simulate(costs: Costs, schedule: Schedule, num_microbatches: int) -> tuple[float, float]:
    """Seconds of a batch, and those in which the busiest rank computes."""
    programs, periods = _programs(schedule, num_microbatches)
    timelines = [simulate(program, costs) for program in programs]
    ranks = range(schedule.num_ranks)
    if len(timelines) == 1:
        return timelines[0].end, max(map(timelines[0].busy, ranks))
    first, second = timelines
    busy = [second.busy(rank) - first.busy(rank) for rank in ranks]
    return (second.end - first.end) / periods, max(busy) / periods


@lru_cache(maxsize=2)
def _programs(schedule: Schedule, num_microbatches: int) -> tuple[tuple[Program, ...], int]:
    """A batch; or two runs of several that do not drain, and by how many periods the second is longer. Kept for those
    who ask on several costs in turn.
    """
    if schedule.weights.drains:
        return (schedule.build((num_microbatches,)),), 1
    periodic = schedule.build_periodic(num_microbatches)
    # Two periods more, of batches that follow each other: waits for reductions may come in every other one. Pipedream's
    # batches are single microbatches.
    counts = (2, 4) if num_microbatches > 1 else (2 * schedule.num_ranks, 4 * schedule.num_ranks)
    return tuple(map(periodic.unroll, counts)), counts[1] - counts[0]
