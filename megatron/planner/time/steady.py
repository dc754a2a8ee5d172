"""The time of a batch of 1F1B whose batches do not drain, under any costs.

A pipeline without a drain repeats itself. So the time of a batch is the largest ratio, over all cycles of events that
wait for one another, of the cycle's seconds to the number of batches by which the cycle advances. There are two kinds
of cycles:

- Cycles through a reduction that ranks share: the norm, for which all ranks wait, or the tied embeddings of a
  prediction. One pass over the rows (event_graph.py) finds all of them: let that reduction of one version end at 0 with
  no events before, and compute when the reductions of the next versions end.
- Cycles through no shared reduction. A microbatch advances at the rate of the slowest stage or round trip
  (microbatch_flow.py), and a rank updates once a batch. A cycle on one rank is counted exactly. For a round trip the
  longest update of a rank is counted, even if only some turns meet it. So the result is some percent too large or too
  small if updates are a large part of a batch. With few ranks the rows give the cycle of each update.

Both results grow monotonically with each cost and with the number of microbatches. The simulated time of a period
within a run need not: the first batches may fall behind and catch up slowly, at any later time.
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
from megatron.planner.time.microbatch_flow import StageTimes, hides_moves, round_trips

_MOST = 600  # most stages times microbatches of a batch in a graph; a longer batch continues at the steady rate
_FEW_RANKS = 16  # most ranks with which the cycle of each update is computed from the rows
_TURNS = 4  # most batches after which a cycle may meet an update again
_MOST_RANKS = 32  # most ranks with which moves between batches are computed from the rows
_GROUPS = 8  # groups of p microbatches that are timed to find the rate with moves
_BATCHES = 8  # batches that are timed to find the time of a batch with moves


def has_cycles(schedule: Schedule) -> bool:
    """Return whether the schedule is 1F1B for which `steady_seconds` holds: without drains, and with an event graph."""
    return (
        schedule.order_class is OneForwardOneBackward
        and schedule.weights.overlaps_updates
        and not schedule.extra_warmup
        and has_event_graph(schedule)
    )


def steady_seconds(costs: Costs, schedule: Schedule, num_microbatches: int) -> float:
    """Return the seconds of a batch in a full pipeline. Requires `has_cycles` of the schedule."""
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
    """Return the seconds of a batch by the cycles through no shared reduction; see the module."""
    return max(_own(stages, m), m * rate + stages.longest_update(m), *_of_predictions(stages, m, rate))


def _of_predictions(stages: StageTimes, m: int, rate: float) -> list[float]:
    """Return, by stage, the seconds from one prediction to the next through its reduction over replicas."""
    schedule = stages.schedule
    if not schedule.reduce_partial:
        return []
    parts = zip(_unread(schedule, m), stages.predict, stages.held(m), stages.reduce, strict=True)
    return [(m - left) * rate + predict + held + reduce for left, predict, held, reduce in parts]


def _unread(schedule: Schedule, m: int) -> list[int]:
    """Return, by stage, the number of a batch's microbatches behind those whose gradients a prediction reads."""
    read = schedule.provisional_microbatches
    return [0 if read is None else m - earlier - read for earlier in schedule.remaining_backwards(m)]


def _through_updates(costs: Costs, stages: StageTimes, m: int, rate: float) -> float:
    """Return the result of `_alone`, from the rows: exact except for cycles longer than `_TURNS` batches."""
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
    """Return the seconds of a batch on the slowest rank alone.

    They include the arrival of the batch's first activation, since its receive is posted behind the update.
    """
    parts = zip(stages.work, stages.updates(m), stages.arrival_forward, strict=True)
    return max(m * work + update + arrival for work, update, arrival in parts)


def _through_reductions(costs: Costs, schedule: Schedule, m: int, rate: float) -> float:
    """Return the seconds of a batch by the cycles through shared reductions; see the module."""
    delay, fewer = schedule.weights.delay, _fewer(schedule, m)
    first = _first_version(schedule)
    last = first + delay + 1
    in_flight = -(-schedule.num_stages // fewer)  # batches that begin before a batch has ended
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
    """Return the version from which on rows repeat themselves: the first batch is not predicted."""
    return 2 if schedule.weights.predicts else 1


def _fewer(schedule: Schedule, m: int) -> int:
    return min(m, max(schedule.num_stages, _MOST // schedule.num_stages))


def _latest(stages: StageTimes, m: int, rate: float) -> float:
    """Return an upper bound of `_through_reductions`, in closed form: all waits are at their latest at once."""
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
    """Return the seconds from one microbatch to the next if moves of saved activations limit the rate."""
    p = schedule.num_ranks
    drained = replace(schedule, weights=FLUSH, provisional_microbatches=None, reduce_partial=False)
    graph = event_graph(drained, (_GROUPS * p,))
    ends = graph.ends(without_reductions(costs, step=0.0, predict=0.0, hold=0.0))
    first, second = (ends[graph.done[groups * p]] for groups in (_GROUPS // 2 - 1, _GROUPS - 2))
    return (second - first) / ((_GROUPS // 2 - 1) * p)


def _alone_with_moves(costs: Costs, stages: StageTimes, m: int, rate: float) -> float:
    """Return the result of `_alone` if moves of saved activations limit the rate."""
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
    """Return the seconds of a batch without reductions. In short batches a smaller part of the microbatches moves."""
    fewer = _fewer(schedule, m)
    graph = event_graph(resized(schedule, m, fewer), (fewer,) * _BATCHES)
    ends = graph.ends(without_reductions(costs))
    first, second = (ends[graph.done[batches * fewer]] for batches in (_BATCHES // 2 - 1, _BATCHES - 2))
    return (second - first) / (_BATCHES // 2 - 1) + (m - fewer) * rate


def without_reductions(costs: Costs, **changes: float) -> Costs:
    """Return the costs with reductions that take no time, and with `changes`."""
    return replace(costs, reduce_grad=0.0, reduce_embed=0.0, reduce_norm=0.0, **changes)
