"""How long a batch takes of 1F1B whose batches do not drain, on any costs.

A pipeline without a drain repeats itself, so a batch takes as long as the slowest cycle of events that wait for one
another, by how many batches it goes on. There are two kinds of cycles:

- Those that pass through a reduction that ranks share: the norm, for which all wait, or the tied embeddings of a
  prediction. All of them together are found by one look at the rows (event_graph.py): if that reduction of one version
  ends at 0 and nothing was before, when do those of the next versions end?
- Those that pass through none: a microbatch goes on at the rate of the slowest stage or round trip (closed_forms.py),
  and once a batch comes the update of a rank. What is on that rank alone is counted exactly; of a round trip, the
  longest update on its way, even if only some turns meet it. So this is some percent too much or too little where
  updates are a large part of a batch; of few ranks, the rows say what comes back to each update.

Both only grow with any of the costs, and with the number of microbatches. A period cut out of a run need not: the first
batches may fall behind, and catch up slowly, sooner or later.
"""

import math
from dataclasses import replace

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.weight_policies import FLUSH
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.one_f_one_b import OneForwardOneBackward
from megatron.pipeline.simulate.costs import Costs
from megatron.planner.memory.schedule_demand import resized
from megatron.planner.time.event_graph import event_graph, has_event_graph
from megatron.planner.time.microbatch_flow import round_trips
from megatron.planner.time.stage_times import StageTimes, hides_moves

_MOST = 600  # computations of a stage's forwards in the batches that are looked at; longer ones go on at the rate
_FEW_RANKS = 16  # of which updates are looked at
_TURNS = 4  # batches, in which a cycle meets an update
_MOST_RANKS = 32  # for which moves across the borders of batches are looked at
_GROUPS = 8  # of p microbatches, in which moves come to their rate
_BATCHES = 8  # the same where a batch is as long as it is


def has_cycles(schedule: Schedule) -> bool:
    """Whether this is 1F1B as cycles are found in it."""
    return (
        schedule.order_class is OneForwardOneBackward
        and schedule.weights.overlaps_updates
        and not schedule.extra_warmup
        and has_event_graph(schedule)
    )


def steady_seconds(costs: Costs, schedule: Schedule, num_microbatches: int) -> float:
    """Of a batch, once as many are under way as ever. The schedule `has_cycles`."""
    stages, m = StageTimes(costs, schedule), num_microbatches
    rate, alone = round_trips(stages), _alone(stages, m, round_trips(stages))
    if 1 < schedule.num_stages <= _FEW_RANKS and alone > _own(stages, m):
        alone = min(alone, _through_updates(costs, stages, m, rate))
    if not hides_moves(stages):
        rate = max(rate, _rate_with_moves(costs, schedule))
        alone = max(alone, _alone_with_moves(costs, stages, m, rate))
    if not any(stages.partial) and _latest(stages, m, rate) <= alone:
        return alone
    return max(alone, _through_reductions(costs, schedule, m, rate))


def _alone(stages: StageTimes, m: int, rate: float) -> float:
    """Circles through no shared reduction."""
    return max(_own(stages, m), m * rate + stages.longest_update(m), *_of_predictions(stages, m, rate))


def _of_predictions(stages: StageTimes, m: int, rate: float) -> list[float]:
    """By stage, from one prediction to the next by way of what it reduces over its own replicas."""
    schedule = stages.schedule
    if not schedule.reduce_partial:
        return []
    parts = zip(_unread(schedule, m), stages.predict, stages.held(m), stages.reduce, strict=True)
    return [(m - left) * rate + predict + held + reduce for left, predict, held, reduce in parts]


def _unread(schedule: Schedule, m: int) -> list[int]:
    """By stage, how many microbatches of a batch come behind those of which a prediction reads gradients."""
    read = schedule.provisional_microbatches
    return [0 if read is None else m - earlier - read for earlier in schedule.remaining_backwards(m)]


def _through_updates(costs: Costs, stages: StageTimes, m: int, rate: float) -> float:
    """The same as `_alone`, exactly but for cycles that meet an update less often than once in `_TURNS` batches."""
    schedule, fewer = stages.schedule, min(m, 2 * stages.schedule.num_stages)
    first = _first_version(schedule)
    graph = event_graph(resized(schedule, m, fewer), (fewer,) * (first + _TURNS + 1 + schedule.weights.delay))
    still, most = without_reductions(costs), _own(stages, m)
    for rank in range(schedule.num_ranks):
        events = [graph.own[Kind.STEP, rank, version] for version in range(first, first + _TURNS + 1)]
        for batches, seconds in enumerate(graph.returns(still, events[0], events[1:]), start=1):
            most = max(most, seconds / batches + (m - fewer) * rate)
    return max(most, m * rate, *_of_predictions(stages, m, rate))


def _own(stages: StageTimes, m: int) -> float:
    """What the slowest rank takes alone; the receive of a batch's first forward stands behind its update."""
    parts = zip(stages.work, stages.updates(m), stages.arrival_forward, strict=True)
    return max(m * work + update + arrival for work, update, arrival in parts)


def _through_reductions(costs: Costs, schedule: Schedule, m: int, rate: float) -> float:
    delay, fewer = schedule.weights.delay, _fewer(schedule, m)
    first = _first_version(schedule)
    last = first + delay + 1
    in_flight = -(-schedule.num_stages // fewer)  # batches that begin before one has ended
    graph = event_graph(resized(schedule, m, fewer), (fewer,) * (last + in_flight))
    norms = [graph.shared[Kind.REDUCE_NORM, version] for version in range(first, last + 1)]
    growth, most = (m - fewer) * rate, 0.0
    for batches, seconds in enumerate(graph.returns(costs, norms[0], norms[1:]), start=1):
        most = max(most, (seconds + max(0, batches - delay) * growth) / batches)
    ties = [graph.shared.get((Kind.REDUCE_PARTIAL_EMBED, version)) for version in (first, first + 1)]
    if None not in ties:
        until = sorted([ties[1], *(each for each in norms if each > ties[0])])
        most = max(most, graph.returns(costs, ties[0], until)[until.index(ties[1])] + growth)
    return most


def _first_version(schedule: Schedule) -> int:
    """From which on rows repeat themselves: the first batch is not predicted."""
    return 2 if schedule.weights.predicts else 1


def _fewer(schedule: Schedule, m: int) -> int:
    return min(m, max(schedule.num_stages, _MOST // schedule.num_stages))


def _latest(stages: StageTimes, m: int, rate: float) -> float:
    """The same, at most, if all that ranks wait for is at its latest at once."""
    p, delay, update = len(stages.work), stages.schedule.weights.delay, stages.longest_update(m)
    begin, way = update + max(stages.arrival_forward), []
    for stage in range(p):  # forwards down the pipeline
        way.append(max(begin, way[-1] + stages.forward[stage - 1] + stages.arrival_forward[stage]) if way else begin)
    ends, above = [0.0] * p, -math.inf
    for stage in reversed(range(p)):  # backwards up
        turn = way[stage] + stages.forward[stage] - rate
        above = ends[stage] = max(turn, above + stages.arrival_backward[stage] - rate) + stages.backward[stage]
    found = [max(stages.reduce)]
    for batches in range(1, delay + 2):
        behind = (batches - delay) * m - 1 + p
        if behind > 0:
            extra = max(0, batches - delay) * update
            ended = (end + rate * (behind - stage) + reduce
                     for stage, (end, reduce) in enumerate(zip(ends, stages.reduce, strict=True)))  # fmt: skip
            found.append((max(ended) + extra) / batches)
    chain = stages.reduce_norm + stages.reduce_embed + 2 * max(stages.partial)
    return max(each + chain for each in found)


def _rate_with_moves(costs: Costs, schedule: Schedule) -> float:
    """Seconds from one microbatch to the next where moves of saved activations decide."""
    p = schedule.num_ranks
    drained = replace(schedule, weights=FLUSH, provisional_microbatches=None, reduce_partial=False)
    graph = event_graph(drained, (_GROUPS * p,))
    ends = graph.ends(without_reductions(costs, step=0.0, predict=0.0, hold=0.0))
    first, second = (ends[graph.done[groups * p]] for groups in (_GROUPS // 2 - 1, _GROUPS - 2))
    return (second - first) / ((_GROUPS // 2 - 1) * p)


def _alone_with_moves(costs: Costs, stages: StageTimes, m: int, rate: float) -> float:
    """The same as `_alone` where moves decide."""
    schedule = stages.schedule
    if schedule.num_ranks > _MOST_RANKS:
        return _alone(stages, m, rate)
    found, fewer = [_moving(costs, schedule, m, rate)], _fewer(schedule, m)
    if schedule.reduce_partial:
        graph = event_graph(resized(schedule, m, fewer), (fewer,) * 5)
        for stage in range(schedule.num_stages):
            first, second = (graph.own[Kind.REDUCE_PARTIAL, stage, version] for version in (2, 3))
            found += [seconds + (m - fewer) * rate for seconds in graph.returns(costs, first, [second])]
    return max(found)


def _moving(costs: Costs, schedule: Schedule, m: int, rate: float) -> float:
    """A batch without reductions. The shorter it is, the smaller is the part of its microbatches that move."""
    fewer = _fewer(schedule, m)
    graph = event_graph(resized(schedule, m, fewer), (fewer,) * _BATCHES)
    ends = graph.ends(without_reductions(costs))
    first, second = (ends[graph.done[batches * fewer]] for batches in (_BATCHES // 2 - 1, _BATCHES - 2))
    return (second - first) / (_BATCHES // 2 - 1) + (m - fewer) * rate


def without_reductions(costs: Costs, **changes: float) -> Costs:
    """The costs with reductions that take no time, and what else changes."""
    return replace(costs, reduce_grad=0.0, reduce_embed=0.0, reduce_norm=0.0, **changes)
