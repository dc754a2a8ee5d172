"""The time of an iteration: in closed form, to rank thousands of configurations, or by simulating the program itself.

`priced` takes the closed form of the schedule's order and weight policy (closed_forms.py); for 1F1B that does not
drain, the slowest cycle of dependencies (steady.py). Where there is no closed form, or it does not hold for these
times, the rows of the schedule are timed (event_graph.py), which equals a simulation but builds no program. A schedule
without an event graph is simulated. Of a long batch fewer microbatches are simulated.

`CostModel` is the interface between predictions of costs (first principles, or a profile) and the users of costs.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Protocol

from megatron.pipeline.program.instruction import COMPUTATIONS, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs, PerStage
from megatron.pipeline.simulate.timeline import BUSY, Timeline
from megatron.planner.job.configuration import Configuration
from megatron.planner.memory.schedule_demand import representative_sizes, resized
from megatron.planner.time.closed_forms import closed_form_of
from megatron.planner.time.event_graph import event_graph, has_event_graph
from megatron.planner.time.stage_times import StageTimes
from megatron.planner.time.steady import has_cycles, steady_seconds, without_reductions


class CostModel(Protocol):
    """Predicts the costs of a configuration's instructions, for one model on one cluster.

    Attributes:
        pressed_efficiency: the fraction of its speed that a rank keeps which is short of memory, as in `Constants`.
    """

    @property
    def pressed_efficiency(self) -> float: ...

    def costs(self, configuration: Configuration, layers: Sequence[int]) -> Costs:
        """Seconds and bytes with one number for each stage (or edge).

        `forward` and `backward` include tensor-parallel communication, and `backward` includes recomputation, since
        programs do not recompute the scopes of a configuration by instructions. Both include transfers that do not
        overlap with computation; other transfers are in `bandwidth` and the bytes.

        Args:
            configuration: degrees, microbatch, recompute scope, schedule, mapping.
            layers: the number of layers of each of the p * v stages.

        Raises:
            ValueError: the configuration cannot be predicted, with the reason.
        """
        ...


_MOST_SIMULATED = 60_000  # computations; beyond, an iteration is extrapolated from some that have fewer microbatches
_MOST_PRICED = 4_000  # the same for a price, of which a search asks hundreds
_STEADY = 2e-3  # by how much what further microbatches add may change, where no closed form says that it does not


@dataclass(frozen=True, kw_only=True)
class IterationTime:
    """The time of one batch. `bubble`: the fraction in which the busiest rank does not compute, 0 to 1."""

    seconds: float
    bubble: float

    @property
    def busy(self) -> float:
        """Seconds for which the busiest rank computes or steps."""
        return (1 - self.bubble) * self.seconds


def priced(costs: Costs, configuration: Configuration, schedule: Schedule) -> IterationTime:
    """The time of a batch in closed form; if no closed form holds, the time of its rows or programs."""
    m = configuration.num_microbatches
    if has_cycles(schedule):
        return _time(steady_seconds(costs, schedule, m), _busy(StageTimes(costs, schedule), m))
    closed = _closed(costs, configuration, schedule)
    if closed is None and has_event_graph(schedule):
        return _extrapolated(costs, schedule, m, _MOST_PRICED, _time_rows)
    return closed or simulated(costs, configuration, schedule, most=_MOST_PRICED)


def closed_form(costs: Costs, configuration: Configuration) -> IterationTime | None:
    """The time of a batch in closed form; None: the schedule has none, or it does not hold for these costs."""
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
    """The time of a batch by simulating its program, or a steady period if batches do not drain.

    If a batch has more than `most` computations, its time is extrapolated from batches with fewer microbatches: in a
    full pipeline each further group of p microbatches adds nearly the same time. Only the part of a batch's reductions
    that later batches hide grows with the number of microbatches; that part comes from the closed form. Without a
    closed form extrapolations are compared, and where they differ the whole batch is simulated.
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
"""Returns the seconds of a batch of so many microbatches, and the seconds in which the busiest rank computes."""


def _extrapolated(costs: Costs, schedule: Schedule, m: int, most: int, run: _Run) -> IterationTime:
    """What a run says, of a batch or of smaller ones that tell."""
    groups = _num_groups(schedule, most)
    if m * schedule.num_stages <= most or m <= groups * schedule.num_ranks:
        return _time(*run(costs, schedule, m))
    return _time(*(_steady(costs, schedule, m, groups, run) or run(costs, schedule, m)))


def _num_groups(schedule: Schedule, most: int) -> int:
    """Of how many groups of p microbatches a batch is that stands for a larger one."""
    return max(4, min(16, most // (schedule.num_stages * schedule.num_ranks)))


def _steady(costs: Costs, schedule: Schedule, m: int, groups: int, run: _Run) -> tuple[float, float] | None:
    """What a run says, extrapolated from three batches of so many groups of p microbatches and fewer; None: they do not
    tell.

    Where batches do not drain, they are doubled until they hide their reductions, as longer ones then do.
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
    """What `_simulate` says of weights on the host, extrapolated where a batch is long; None: it is not, or the batches
    that are looked at do not tell.

    Here further microbatches do not just add to a batch: they hide what is copied and updated once. But where copies,
    reductions and updates grow with the batch, nothing that overlaps changes its part, and what a microbatch more adds
    is always as much. So batches of fewer microbatches are looked at, with so much shorter copies and updates; three
    sizes have to agree.
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
    """The costs with what is done once a batch taking this part of its time."""
    names = ("fetch", "store", "update", "reduce_grad", "reduce_embed", "reduce_norm", "step")
    return replace(costs, **{name: _times(getattr(costs, name), part) for name in names})


def _times(value: PerStage, factor: float) -> PerStage:
    return [factor * each for each in value] if isinstance(value, Sequence) else factor * value


def _hides_reductions(costs: Costs, schedules: Sequence[Schedule], sizes: Sequence[int], run: _Run) -> bool:
    """Whether batches of the last of these sizes show nothing of their reductions.

    Where the weights predict, they show as much as those of the first: each prediction waits for reductions of its own.
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
    """Seconds of a batch, and those in which the busiest rank computes."""
    is_small = num_microbatches * schedule.num_stages <= _MOST_PRICED
    programs, periods, counts = (_small_programs if is_small else _programs)(schedule, num_microbatches)
    ends = [_end(simulate(program, costs)) for program in programs]
    seconds = ends[0] if len(ends) == 1 else (ends[1] - ends[0]) / periods
    stages = StageTimes(costs, schedule)
    if counts is None:
        return seconds, _busy(stages, num_microbatches)
    return seconds, _busy_with_halves(stages, costs, counts)


def _time_rows(costs: Costs, schedule: Schedule, num_microbatches: int) -> tuple[float, float]:
    """The same without programs. The schedule `has_event_graph`."""
    runs, periods = _runs(schedule, num_microbatches)
    graphs = [event_graph(schedule, batches) for batches in runs]
    ends, stages = [graph.seconds(costs) for graph in graphs], StageTimes(costs, schedule)
    seconds = ends[0] if len(ends) == 1 else (ends[1] - ends[0]) / periods
    if not schedule.splits_backward:
        return seconds, _busy(stages, num_microbatches)
    counts = _per_period([graph.counts for graph in graphs], periods)
    return seconds, _busy_with_halves(stages, costs, counts)


def _runs(schedule: Schedule, num_microbatches: int) -> tuple[list[tuple[int, ...]], int]:
    """The batches of one run that drains, or of two that do not, and by how many periods the second is longer."""
    if schedule.weights.drains:
        return [(num_microbatches,)], 1
    count = _num_periods(schedule, num_microbatches)
    return [(num_microbatches,) * (schedule.num_fill + times * count) for times in (1, 2)], count


def _busy(stages: StageTimes, num_microbatches: int) -> float:
    """Seconds of a batch in which the rank that computes most computes, predicts or steps."""
    by_rank = zip(stages.by_rank(stages.work), stages.by_rank(stages.updates(num_microbatches)), strict=True)
    return max(num_microbatches * work + update for work, update in by_rank)


_Counts = tuple[Mapping[tuple[Kind, int], float], ...]  # by rank, how often a batch has a computation of a stage


def _busy_with_halves(stages: StageTimes, costs: Costs, counts: _Counts) -> float:
    """The same where some backwards are split: by what stands in the program."""
    seconds = costs.seconds(stages.schedule.num_stages)
    by_rank = zip(counts, stages.by_rank(stages.step), strict=True)
    return max(
        step + sum(seconds[kind][stage] * count for (kind, stage), count in of_rank.items())
        for of_rank, step in by_rank
    )


def _counts(programs: Sequence[Program], periods: int) -> _Counts:
    """What the last of some programs computes more than the first, by period; or what the only one does."""
    counts = [
        [Counter((each.kind, each.stage) for each in row if each.kind in COMPUTATIONS) for row in program.rows]
        for program in programs
    ]
    return _per_period(counts, periods)


def _per_period(counts: Sequence[Sequence[Counter[tuple[Kind, int]]]], periods: int) -> _Counts:
    of_rank = counts[0] if len(counts) == 1 else [last - first for first, last in zip(*counts, strict=True)]
    return tuple({key: count / periods for key, count in each.items()} for each in of_rank)


def _end(timeline: Timeline) -> float:
    """The end of the last computation or STEP; those of a rank follow one another."""
    ends = [0.0]
    for row, of_row in zip(timeline.rows, timeline.ends, strict=True):
        ends += islice((end for each, end in zip(reversed(row), reversed(of_row), strict=True) if each.kind in BUSY), 1)
    return max(ends)


def _build(schedule: Schedule, num_microbatches: int) -> tuple[tuple[Program, ...], int, _Counts | None]:
    """A batch; or two runs of several that do not drain, and by how many periods the second is longer. And where some
    backwards are split, how often a batch has each computation.
    """
    programs, periods = _build_programs(schedule, num_microbatches)
    return programs, periods, _counts(programs, periods) if schedule.splits_backward else None


def _build_programs(schedule: Schedule, num_microbatches: int) -> tuple[tuple[Program, ...], int]:
    if schedule.residency:  # the first batch's weights are there, and later ones wait for updates
        return tuple(schedule.build((num_microbatches,) * count) for count in (2, 3)), 1
    runs, count = _runs(schedule, num_microbatches)
    if len(runs) == 1:
        return (schedule.build(*runs),), count
    periodic = schedule.build_periodic(num_microbatches)
    return (periodic.unroll(count), periodic.unroll(2 * count)), count


def _num_periods(schedule: Schedule, num_microbatches: int) -> int:
    """As many periods as fill the pipeline twice, and as many more as bring back each wait for reductions.

    Waits may come once in every delay + 1 batches.
    """
    delay, in_flight = schedule.weights.delay, schedule.max_in_flight
    if delay is None:  # batches are single microbatches
        return 4 * schedule.num_ranks  # a stage that is slower than those before it holds them up late
    if in_flight is None:  # nobody says of how many batches: as if each rank worked on another
        in_flight = schedule.num_ranks * num_microbatches
    return (delay + 1) * -(-2 * in_flight // ((delay + 1) * num_microbatches))


_programs = lru_cache(maxsize=2)(_build)  # kept for those who ask on several costs in turn
_small_programs = lru_cache(maxsize=64)(_build)
