"""The time of an iteration: in closed form, to rank thousands of configurations, or by simulating the program itself.

`priced` uses the closed form of the schedule's order and weight policy (closed_forms.py). For 1F1B that does not drain
it uses the slowest cycle of dependencies (steady.py). If there is no closed form, or the form does not hold for these
costs, the rows of the schedule are timed (event_graph.py). This equals a simulation but builds no program. A schedule
without an event graph is simulated. A long batch is extrapolated from batches with fewer microbatches.

`CostModel` is the interface between predictions of costs (first principles, or a profile) and the users of costs.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Protocol

from megatron.pipeline.program.instruction import BUSY, COMPUTATIONS, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs, PerStage
from megatron.pipeline.simulate.timeline import Timeline
from megatron.planner.job.configuration import Configuration
from megatron.planner.memory.schedule_demand import representative_sizes, resized
from megatron.planner.time.closed_forms import closed_form_of
from megatron.planner.time.event_graph import event_graph, has_event_graph
from megatron.planner.time.microbatch_flow import StageTimes
from megatron.planner.time.steady import has_cycles, steady_seconds, without_reductions


class CostModel(Protocol):
    """Predicts the costs of a configuration's instructions, for one model on one cluster.

    Attributes:
        pressed_efficiency: the fraction of its speed that a rank short of memory keeps, as in `Constants`.
    """

    @property
    def pressed_efficiency(self) -> float: ...

    def costs(self, configuration: Configuration, layers: Sequence[int]) -> Costs:
        """Return the costs of a configuration, with one number for each stage or edge.

        `forward` and `backward` include tensor-parallel communication. `backward` includes the recomputation of the
        configuration's scope, since programs have no instructions for it. Both include transfers that do not overlap
        with computation. All other transfers are in `bandwidth` and the bytes.

        Args:
            configuration: degrees, microbatch, recompute scope, schedule, mapping.
            layers: the number of layers of each of the p * v stages.

        Raises:
            ValueError: the configuration cannot be predicted, with the reason.
        """
        ...

    def moves(
        self, configuration: Configuration, sizes: Sequence[float], ways: Collection[str]
    ) -> dict[str, list[float]]:
        """Return the seconds of moves of saved activations, as `Costs` names them.

        Args:
            sizes: bytes of a microbatch at each stage.
            ways: `host`, `pair`: where they may go.

        Raises:
            ValueError: such moves cannot be predicted, with the reason.
        """
        ...


_MOST_SIMULATED = 60_000  # computations of a batch; a longer batch is extrapolated from batches of fewer microbatches
_MOST_PRICED = 4_000  # the same in `priced`, which a search calls hundreds of times
_STEADY = 2e-3  # largest relative change of the time per further microbatch with which a batch is extrapolated


@dataclass(frozen=True, kw_only=True)
class IterationTime:
    """The time of one batch. `bubble`: the fraction of it in which the busiest rank does not compute, 0 to 1."""

    seconds: float
    bubble: float

    @property
    def busy(self) -> float:
        """Seconds in which the busiest rank computes or steps."""
        return (1 - self.bubble) * self.seconds


def priced(costs: Costs, configuration: Configuration, schedule: Schedule) -> IterationTime:
    """Return the time of a batch by the fastest method that holds: slowest cycle, closed form, rows or simulation."""
    m = configuration.num_microbatches
    if has_cycles(schedule):
        return _time(steady_seconds(costs, schedule, m), _busy(StageTimes(costs, schedule), m))
    closed = _closed(costs, configuration, schedule)
    if closed is None and has_event_graph(schedule):
        return _extrapolated(costs, schedule, m, _MOST_PRICED, _time_rows)
    return closed or simulated(costs, configuration, schedule, most=_MOST_PRICED)


def closed_form(costs: Costs, configuration: Configuration) -> IterationTime | None:
    """Return the time of a batch in closed form; None if the schedule has none or it does not hold for these costs."""
    return _closed(costs, configuration, configuration.pipeline_schedule(tied_embeddings=False))


def _closed(costs: Costs, configuration: Configuration, schedule: Schedule) -> IterationTime | None:
    form = closed_form_of(schedule)
    if form is None:
        return None
    stages, m = StageTimes(costs, schedule), configuration.num_microbatches
    seconds = form(stages, m)
    if seconds is None:
        return None
    return _time(seconds, _busy(stages, m))


def simulated(
    costs: Costs, configuration: Configuration, schedule: Schedule, *, most: int | None = None
) -> IterationTime:
    """Return the time of a batch by simulating its program. If batches do not drain, simulate a steady period.

    If a batch has more than `most` computations, its time is extrapolated from batches with fewer microbatches: in a
    full pipeline each further group of p microbatches adds nearly the same time. Only the hidden part of a batch's
    reductions grows with the number of microbatches. If batches do not drain, the part that shows comes from the closed
    form. Without a closed form two extrapolations are compared. If they differ, the whole batch is simulated.
    """
    most = _MOST_SIMULATED if most is None else most
    m, p = configuration.num_microbatches, schedule.num_ranks
    if schedule.residency:
        return _time(*(_relayed(costs, schedule, m, most) or _simulate(costs, schedule, m)))
    groups = _num_groups(schedule, most)
    more, span = groups * p + m % p, groups // 2 * p
    if m * schedule.num_stages <= most or m <= more:
        return _time(*_simulate(costs, schedule, m))
    hidden, shown = without_reductions(costs), 0.0
    if not schedule.weights.drains:
        closed = [_closed(each, configuration, schedule) for each in (costs, hidden)]
        if None in closed:
            return _extrapolated(costs, schedule, m, most, _simulate)
        shown, costs = closed[0].seconds - closed[1].seconds, hidden
    elif closed_form_of(schedule) is None:
        return _extrapolated(costs, schedule, m, most, _simulate)
    fewer_seconds, fewer_busy = _simulate(costs, resized(schedule, m, more - span), more - span)
    seconds, busy = _simulate(costs, resized(schedule, m, more), more)
    times = (m - more) / span
    return _time(seconds + times * (seconds - fewer_seconds) + shown, busy + times * (busy - fewer_busy))


# --- batches that stand for larger ones


_Run = Callable[[Costs, Schedule, int], tuple[float, float]]
"""(costs, schedule, microbatches of a batch) -> (its seconds, the seconds in which the busiest rank computes)."""


def _extrapolated(costs: Costs, schedule: Schedule, m: int, most: int, run: _Run) -> IterationTime:
    """Return the time of a batch by `run`, extrapolated from smaller batches if it is long and they agree."""
    groups = _num_groups(schedule, most)
    if m * schedule.num_stages <= most or m <= groups * schedule.num_ranks:
        return _time(*run(costs, schedule, m))
    return _time(*(_steady(costs, schedule, m, groups, run) or run(costs, schedule, m)))


def _num_groups(schedule: Schedule, most: int) -> int:
    """Return the number of groups of p microbatches in a batch that stands for a larger batch."""
    return max(4, min(16, most // (schedule.num_stages * schedule.num_ranks)))


def _steady(costs: Costs, schedule: Schedule, m: int, groups: int, run: _Run) -> tuple[float, float] | None:
    """Extrapolate the result of `run` from three batches of at most `groups` groups of p microbatches.

    Returns None if the three do not agree. If batches do not drain, the three are doubled until they hide their
    reductions, since longer batches then hide them, too.
    """
    drains, p, hidden = schedule.weights.drains, schedule.num_ranks, without_reductions(costs)
    while sizes := representative_sizes(schedule, m, least=groups // 2 * p, step=groups // 4 * p, count=3):
        of_size = [resized(schedule, m, size) for size in sizes]
        longest = run(costs, of_size[2], sizes[2])
        if drains or _hides_reductions(costs, of_size[1:], sizes[1:], run):
            shown = costs if drains else hidden
            least, fewer = (run(shown, *each) for each in zip(of_size[:2], sizes[:2], strict=True))
            reference = longest if drains else run(hidden, of_size[2], sizes[2])
            before, last = fewer[0] - least[0], reference[0] - fewer[0]
            if abs(before - last) > _STEADY * last:
                return None
            times = (m - sizes[2]) / (sizes[2] - sizes[1])
            return longest[0] + times * last, longest[1] + times * (reference[1] - fewer[1])
        groups *= 2
    return None


def _relayed(costs: Costs, schedule: Schedule, m: int, most: int) -> tuple[float, float] | None:
    """Extrapolate the result of `_simulate` for a long batch with weights on the host.

    Returns None if the batch is short, or if the simulated batches do not agree. With weights on the host further
    microbatches hide more of the copies and updates that happen once a batch, so the added time is not constant. It is
    constant if copies, reductions and updates grow in proportion to the batch. So batches of fewer microbatches are
    simulated with copies and updates shortened in proportion. Three sizes have to agree.
    """
    p = schedule.num_ranks
    sizes = (2 * p, 3 * p, 4 * p)
    if m * schedule.num_stages <= most // 4 or m <= 2 * sizes[-1]:
        return None
    first, second, third = (_simulate(_shortened(costs, size / m), schedule, size)[0] for size in sizes)
    if abs((third - second) - (second - first)) > _STEADY * (third - second):
        return None
    seconds = third + (m - sizes[-1]) / p * (third - second)
    return seconds, _busy(StageTimes(costs, schedule), m)


def _shortened(costs: Costs, part: float) -> Costs:
    """Return the costs with the fraction `part` of the time of all work done once a batch."""
    names = ("fetch", "store", "update", "reduce_grad", "reduce_embed", "reduce_norm", "step")
    return replace(costs, **{name: _times(getattr(costs, name), part) for name in names})


def _times(value: PerStage, factor: float) -> PerStage:
    return [factor * each for each in value] if isinstance(value, Sequence) else factor * value


def _hides_reductions(costs: Costs, schedules: Sequence[Schedule], sizes: Sequence[int], run: _Run) -> bool:
    """Return whether batches of the last size hide their reductions completely.

    If the weights are predicted, each prediction waits for its own reductions. Then return whether batches of the last
    size show as much of their reductions as batches of the first size.
    """
    hidden = without_reductions(costs)

    def shown(schedule: Schedule, size: int) -> float:
        return run(costs, schedule, size)[0] - run(hidden, schedule, size)[0]

    seconds = shown(schedules[-1], sizes[-1])
    expected = shown(schedules[0], sizes[0]) if schedules[0].weights.predicts else 0.0
    return abs(seconds - expected) <= 1e-9 * run(hidden, schedules[-1], sizes[-1])[0]


def _time(seconds: float, busy: float) -> IterationTime:
    return IterationTime(seconds=seconds, bubble=max(0.0, 1 - busy / seconds))


# --- programs and rows


def _simulate(costs: Costs, schedule: Schedule, num_microbatches: int) -> tuple[float, float]:
    """Return the seconds of a batch, and the seconds in which the busiest rank computes, by simulation."""
    is_small = num_microbatches * schedule.num_stages <= _MOST_PRICED
    programs, periods, counts = (_small_programs if is_small else _programs)(schedule, num_microbatches)
    ends = [_end(simulate(program, costs)) for program in programs]
    seconds = ends[0] if len(ends) == 1 else (ends[1] - ends[0]) / periods
    stages = StageTimes(costs, schedule)
    if counts is None:
        return seconds, _busy(stages, num_microbatches)
    return seconds, _busy_with_halves(stages, costs, counts)


def _time_rows(costs: Costs, schedule: Schedule, num_microbatches: int) -> tuple[float, float]:
    """Return the results of `_simulate` without programs. Requires `has_event_graph` of the schedule."""
    runs, periods = _runs(schedule, num_microbatches)
    graphs = [event_graph(schedule, batches) for batches in runs]
    ends, stages = [graph.seconds(costs) for graph in graphs], StageTimes(costs, schedule)
    seconds = ends[0] if len(ends) == 1 else (ends[1] - ends[0]) / periods
    if not schedule.splits_backward:
        return seconds, _busy(stages, num_microbatches)
    counts = _per_period([graph.counts for graph in graphs], periods)
    return seconds, _busy_with_halves(stages, costs, counts)


def _runs(schedule: Schedule, num_microbatches: int) -> tuple[list[tuple[int, ...]], int]:
    """Return the batches of one run that drains or of two that do not, and by how many periods the second is longer."""
    if schedule.weights.drains:
        return [(num_microbatches,)], 1
    count = _num_periods(schedule, num_microbatches)
    return [(num_microbatches,) * (schedule.num_fill + times * count) for times in (1, 2)], count


def _busy(stages: StageTimes, num_microbatches: int) -> float:
    """Return the seconds of a batch in which the busiest rank computes, predicts or steps."""
    by_rank = zip(stages.by_rank(stages.work), stages.by_rank(stages.updates(num_microbatches)), strict=True)
    return max(num_microbatches * work + update for work, update in by_rank)


_Counts = tuple[Mapping[tuple[Kind, int], float], ...]  # by rank: (kind, stage) -> its computations in a batch


def _busy_with_halves(stages: StageTimes, costs: Costs, counts: _Counts) -> float:
    """Return the result of `_busy` if some backwards are split, from the program's counts of computations."""
    seconds = costs.seconds(stages.schedule.num_stages)
    by_rank = zip(counts, stages.by_rank(stages.step), strict=True)
    return max(
        step + sum(seconds[kind][stage] * count for (kind, stage), count in of_rank.items())
        for of_rank, step in by_rank
    )


def _counts(programs: Sequence[Program], periods: int) -> _Counts:
    """Return the computations by which the last program exceeds the first, per period; or those of the only program."""
    counts = [
        [Counter((each.kind, each.stage) for each in row if each.kind in COMPUTATIONS) for row in program.rows]
        for program in programs
    ]
    return _per_period(counts, periods)


def _per_period(counts: Sequence[Sequence[Counter[tuple[Kind, int]]]], periods: int) -> _Counts:
    of_rank = counts[0] if len(counts) == 1 else [last - first for first, last in zip(*counts, strict=True)]
    return tuple({key: count / periods for key, count in each.items()} for each in of_rank)


def _end(timeline: Timeline) -> float:
    """Return the end of the last computation or STEP. Only the last of each rank is looked at."""
    ends = [0.0]
    for row, of_row in zip(timeline.rows, timeline.ends, strict=True):
        ends += islice((end for each, end in zip(reversed(row), reversed(of_row), strict=True) if each.kind in BUSY), 1)
    return max(ends)


def _build(schedule: Schedule, num_microbatches: int) -> tuple[tuple[Program, ...], int, _Counts | None]:
    """Return (programs, periods, counts) of a batch.

    There is one program if batches drain, else two, of which the second is `periods` longer. `counts`: how often a
    batch has each computation, if some backwards are split, else None.
    """
    programs, periods = _build_programs(schedule, num_microbatches)
    return programs, periods, _counts(programs, periods) if schedule.splits_backward else None


def _build_programs(schedule: Schedule, num_microbatches: int) -> tuple[tuple[Program, ...], int]:
    if schedule.residency:  # the first batch finds its weights ready, and later batches wait for updates
        return tuple(schedule.build((num_microbatches,) * count) for count in (2, 3)), 1
    runs, count = _runs(schedule, num_microbatches)
    if len(runs) == 1:
        return (schedule.build(*runs),), count
    periodic = schedule.build_periodic(num_microbatches)
    return (periodic.unroll(count), periodic.unroll(2 * count)), count


def _num_periods(schedule: Schedule, num_microbatches: int) -> int:
    """Return a number of periods that fill the pipeline twice, rounded up to a multiple of delay + 1 batches.

    A wait for reductions may occur only once in delay + 1 batches.
    """
    delay, in_flight = schedule.weights.delay, schedule.max_in_flight
    if delay is None:  # batches are single microbatches
        return 4 * schedule.num_ranks  # it takes long until a slow stage delays the stages before it
    if in_flight is None:  # unknown: assume that each rank works on a different batch
        in_flight = schedule.num_ranks * num_microbatches
    return (delay + 1) * -(-2 * in_flight // ((delay + 1) * num_microbatches))


_programs = lru_cache(maxsize=2)(_build)  # kept for callers that simulate several costs in turn
_small_programs = lru_cache(maxsize=64)(_build)
