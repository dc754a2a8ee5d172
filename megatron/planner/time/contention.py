"""Costs where ranks share a processor: each is slower while others compute, and they do not always.

Problem: on a CPU a microbatch takes longer while the other ranks compute beside it, as memory, caches and clock are
shared. In a pipeline that fills and drains some wait. So what an instruction costs depends on the timeline, and the
timeline on what instructions cost.

Solution: iterate. Simulate with the costs of ranks that all work; see for each kind of work of each stage which part of
it runs while how many work; blend its costs accordingly; and again, until they no longer change. If a piece of work
spends the shares s_k of its duration while k are at work, and would take T_k if that were so throughout, it is done
after 1 / sum(s_k / T_k).
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping

from megatron.pipeline.program.instruction import BUSY, Instruction, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.timeline import Timeline

_ROUNDS = 4

Times = Mapping[tuple[Kind, int], float]
"""Seconds of a kind of work at a stage."""


def settle(
    program: Program, times_at_work: Mapping[int, Times], costs_of: Callable[[Times], Costs], *, batches: range
) -> Costs:
    """The costs of `program` when its own timeline decides who works beside whom.

    Args:
        batches: those that count; where batches do not drain, not the first and the last of the program.
        times_at_work: number of pipeline ranks at work, from 1 to all -> what work takes then throughout.
        costs_of: from such times to a whole table.
    """
    times = times_at_work[max(times_at_work)]
    for _ in range(_ROUNDS):
        timeline = simulate(program, costs_of(times))
        shares = _shares_at_work(timeline, program, batches)
        times = {key: _blend(shares.get(key, {}), times_at_work, key) for key in times}
    return costs_of(times)


def _blend(shares: Mapping[int, float], times_at_work: Mapping[int, Times], key: tuple[Kind, int]) -> float:
    alone = times_at_work[min(times_at_work)][key]
    if not shares or not alone:
        return times_at_work[max(times_at_work)][key]
    return sum(shares.values()) / sum(share / times_at_work[count][key] for count, share in shares.items())


def _shares_at_work(timeline: Timeline, program: Program, batches: range) -> dict[tuple[Kind, int], dict[int, float]]:
    """(kind, stage) -> number of ranks at work -> seconds of it, in those batches, while so many were."""
    spans = [span for span in timeline.spans if span.instruction.kind in BUSY and span.end > span.start]
    borders = sorted([(span.start, 1) for span in spans] + [(span.end, -1) for span in spans])
    events: list[tuple[float, int]] = []  # from when on how many are at work
    count = 0
    for time, change in borders:
        count += change
        if events and events[-1][0] == time:
            events[-1] = (time, count)
        else:
            events.append((time, count))
    shares: dict[tuple[Kind, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    starts = [time for time, _ in events]
    for span in spans:
        if _batch_of(span.instruction, program) not in batches:
            continue
        position = bisect_right(starts, span.start) - 1
        while position < len(events) and events[position][0] < span.end:
            until = events[position + 1][0] if position + 1 < len(events) else span.end
            part = min(until, span.end) - max(events[position][0], span.start)
            shares[span.instruction.kind, span.instruction.stage][events[position][1]] += part
            position += 1
    return shares


def _batch_of(instruction: Instruction, program: Program) -> int:
    return instruction.version - 1 if instruction.microbatch is None else program.batch_of(instruction.microbatch)
