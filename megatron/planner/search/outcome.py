"""The outcome of a search: every choice considered, kept with an estimate or rejected with a reason; and of a sweep.

The outcome also has a comparison with training without a pipeline, with weights split over replicas (FSDP, ZeRO-2 and
3), so that the user sees when no pipeline is better. This project's trainer does not split weights over replicas: a
note names software that does (notes.py). The best configuration and its script are always for this project's trainer.

A `Bill` has the days and the cost of a training, for all tokens and for a million tokens. A bill counts iterations
only: checkpoints, evaluations and restarts come on top.

A sweep has the best configuration for each number of GPUs and each sequence length. More GPUs make a training shorter,
and more expensive, since GPUs wait more for one another. The front of a sequence length is its Pareto front in time and
cost. The knee is the point of the front farthest below the chord between the ends of the front, with both axes scaled
to the front: to the left of the knee a day less costs more than to the right (Satopaa et al. 2011, Finding a "Kneedle"
in a Haystack). The knee depends on the ends of the front. A front with fewer than three points, or without a bend, has
no knee.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, make_dataclass, replace
from functools import cached_property
from operator import attrgetter

from megatron.planner.job.configuration import CHOSEN, KINDS, Configuration
from megatron.planner.job.estimate import Estimate
from megatron.planner.job.software import Software
from megatron.planner.published.interval import Interval, NotValidated
from megatron.planner.search.space import preset_of

_DAY, _HOUR, _MILLION = 86_400, 3_600, 1_000_000


@dataclass(frozen=True, kw_only=True)
class Bill:
    """The time and cost of training one configuration. A field is None if it needs an unknown token count or price.

    Attributes:
        gpu_hours_per_iteration: hours of all GPUs together, whether they compute or wait.
        num_iterations, days, gpu_hours, cost: totals of the whole training.
        cost_per_iteration, cost_per_million_tokens: costs independent of the number of tokens.
        currency: the currency of all costs.
    """

    gpu_hours_per_iteration: float
    num_iterations: int | None = None
    days: float | None = None
    gpu_hours: float | None = None
    cost: float | None = None
    cost_per_iteration: float | None = None
    cost_per_million_tokens: float | None = None
    currency: str | None = None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The size and price of a training, from which bills are computed.

    Attributes:
        num_gpus: number of GPUs.
        sequence_length: tokens of a sequence.
        tokens: tokens of the whole training; None: not known.
        price_per_gpu_hour: price in `currency`; None: not known.
    """

    num_gpus: int
    sequence_length: int
    tokens: float | None = None
    price_per_gpu_hour: float | None = None
    currency: str = "USD"

    def bill(self, *, seconds: float, sequences: int) -> Bill:
        """The bill of a training whose iterations take `seconds` and compute `sequences` sequences each."""
        price, hours = self.price_per_gpu_hour, seconds * self.num_gpus / _HOUR
        tokens = sequences * self.sequence_length
        iterations = None if self.tokens is None else math.ceil(self.tokens / tokens)
        return Bill(
            gpu_hours_per_iteration=hours,
            num_iterations=iterations,
            days=None if iterations is None else iterations * seconds / _DAY,
            gpu_hours=None if iterations is None else iterations * hours,
            cost=None if iterations is None or price is None else iterations * hours * price,
            cost_per_iteration=None if price is None else hours * price,
            cost_per_million_tokens=None if price is None else hours * price * _MILLION / tokens,
            currency=None if price is None else self.currency,
        )


def amount(value: float) -> str:
    """A value as text: three significant digits below 100, whole units from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def money(value: float, currency: str) -> str:
    return f"{amount(value)} {currency}"


_values = attrgetter(*CHOSEN)  # faster than `vars`, after which attributes are slow
_Chosen = make_dataclass("_Chosen", [(name, KINDS[name] | None, None) for name in CHOSEN], frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class Choice(_Chosen):
    """The fields of a configuration that a search has chosen (`CHOSEN`).

    A choice stands for one configuration, or for several that are rejected together: None stands for any value.
    `schedule` is a name in `space.offered()`, which tells whether saved activations move. `context` is also None if a
    search has no context parallelism; `expert` and `expert_tensor` are also None if the model has no experts.
    """

    def configuration(self, *, sequence_parallel: bool) -> Configuration:
        """The configuration, with defaults for fields that are None. Degrees, batches and schedule must be chosen."""
        chosen = {name: value for name, value in zip(CHOSEN, _values(self), strict=True) if value is not None}
        chosen["schedule"], chosen["balance"] = preset_of(self.schedule)
        return Configuration(**chosen, sequence_parallel=sequence_parallel)

    @property
    def key(self) -> tuple:
        """A sort key that breaks ties between choices."""
        return tuple((value is not None, value if value is not None else 0) for value in _values(self))


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A rejected choice.

    Attributes:
        reason: why it was rejected, in one clause.
        missing_gib: GiB that the fullest GPU lacks, if memory is the reason.
    """

    choice: Choice
    reason: str
    missing_gib: float | None = None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A configuration that can run.

    Attributes:
        estimate: time and memory.
        software: the software that trains it; None: not known.
        is_simulated: the time comes from a simulation of the proved program. False: from a closed form, or from shorter
            programs if the schedule has no closed form.
        notes: clauses on causes of slowness and on other consequences of the configuration.
        accuracy: the interval of the time, or why it has none; None: not requested.
        bill: the time and cost of a training; None: not requested.
    """

    choice: Choice
    estimate: Estimate
    software: Software | None = None
    is_simulated: bool = False
    notes: tuple[str, ...] = ()
    accuracy: Interval | NotValidated | None = None
    bill: Bill | None = None

    @property
    def layers(self) -> str:
        """The layers and the attention of the software, as the text of a table cell; empty: not known."""
        return "" if self.software is None else self.software.layers

    @property
    def sequences_per_second(self) -> float:
        return self.choice.global_batch_size / self.estimate.seconds

    @property
    def memory_gib(self) -> float:
        """The memory of the fullest GPU."""
        return self.estimate.memory_gib


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a search.

    Attributes:
        kept: the ranking by `objective`, best first, followed by the configurations beside the ranking, best first.
        rejected: the rejected choices, in the order of the search.
        objective: the objective of the ranking, one of `OBJECTIVES`.
        without_pipeline: the fastest training without a pipeline; None: not compared.
        unasked: names of schedules that are listed beside the ranking (`Space.unasked`).
    """

    kept: tuple[Kept, ...]
    rejected: tuple[Rejected, ...]
    objective: str = "time"
    without_pipeline: WithoutPipeline | None = None
    unasked: frozenset[str] = frozenset()

    @cached_property
    def ranking(self) -> tuple[Kept, ...]:
        """The ranked configurations, best first."""
        return tuple(each for each in self.kept if each.choice.schedule not in self.unasked)

    @cached_property
    def beside(self) -> tuple[Kept, ...]:
        """The configurations beside the ranking (`unasked`), best first."""
        return tuple(each for each in self.kept if each.choice.schedule in self.unasked)

    @property
    def rows(self) -> list[tuple[int | None, Kept]]:
        """All kept configurations with their ranks from 1; None: beside the ranking."""
        return [*enumerate(self.ranking, start=1), *((None, each) for each in self.beside)]

    def gain(self, each: Kept) -> float | None:
        """The relative gain in speed of a configuration beside the ranking over the best of the ranking.

        Returns None if the configuration is in the ranking, or if the ranking is empty.
        """
        if self.best is None or each.choice.schedule not in self.unasked:
            return None
        return each.sequences_per_second / self.best.sequences_per_second - 1

    @property
    def superlative(self) -> str:
        """The word for the best by `objective`: fastest, cheapest or smallest."""
        return SUPERLATIVES[self.objective]

    @property
    def best_without_pressure(self) -> tuple[int, Kept] | None:
        """The best configuration that is not slowed by a shortage of memory, with its rank from 1."""
        ranked = enumerate(self.ranking, start=1)
        return next(((rank, each) for rank, each in ranked if not each.estimate.under_pressure), None)

    @property
    def best(self) -> Kept | None:
        return self.ranking[0] if self.ranking else None

    def with_prices(self, accuracy: Callable[[Kept], Interval | NotValidated], budget: Budget) -> Outcome:
        """This outcome with the interval of the time and the bill of each kept configuration."""
        kept = tuple(
            replace(
                each,
                accuracy=accuracy(each),
                bill=budget.bill(seconds=each.estimate.seconds, sequences=each.choice.global_batch_size),
            )
            for each in self.kept
        )
        return replace(self, kept=kept)

    def best_of_schedules(self) -> tuple[tuple[int | None, Kept], ...]:
        """The best configuration of each schedule, with its rank as in `rows`."""
        found: dict[str, tuple[int | None, Kept]] = {}
        for rank, each in self.rows:
            found.setdefault(each.choice.schedule, (rank, each))
        return tuple(found.values())

    def pareto_front(self) -> tuple[Kept, ...]:
        """The Pareto front of the ranking in speed and memory, fastest first. Of equal points the first is kept."""
        front: list[Kept] = []
        for each in sorted(self.ranking, key=lambda kept: (-kept.sequences_per_second, kept.memory_gib)):
            if not front or each.memory_gib < front[-1].memory_gib:
                front.append(each)
        return tuple(front)


SUPERLATIVES = {"time": "fastest", "cost": "cheapest", "memory": "smallest"}
OBJECTIVES = tuple(SUPERLATIVES)
"""Objectives of a ranking. time: sequences per second. cost: money for a sequence, which gives the same ranking as time
since all GPUs are used. memory: bytes of the fullest GPU, with ties broken by speed."""


@dataclass(frozen=True, kw_only=True)
class WithoutPipeline:
    """The fastest training without a pipeline that fits.

    Attributes:
        estimate: time and memory; None: nothing fits.
        software: the training software.
        missing_gib: if nothing fits, the GiB that the nearest configuration lacks.
        is_slowed: some configurations fit but are left out since the allocator would slow them (`--avoid-pressure`).
    """

    estimate: Estimate | None = None
    software: Software | None = None
    missing_gib: float | None = None
    is_slowed: bool = False

    @property
    def sequences_per_second(self) -> float:
        assert self.estimate is not None
        return self.estimate.configuration.global_batch_size / self.estimate.seconds


_STRAIGHT = 0.01  # a bend of less than 1% is no knee


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """The result of one search of a sweep. `best` is None if nothing can run, for the reason in `reason`."""

    num_gpus: int
    sequence_length: int
    best: Kept | None
    reason: str = ""

    @property
    def time(self) -> float:
        """The days of the whole training; if the number of tokens is not known, the seconds of an iteration."""
        bill = self.best.bill
        return self.best.estimate.seconds if bill.days is None else bill.days

    @property
    def cost(self) -> float:
        """The money for the whole training or, as in `time`, for an iteration; without a price, the GPU hours."""
        bill = self.best.bill
        if bill.days is None:
            return bill.gpu_hours_per_iteration if bill.cost_per_iteration is None else bill.cost_per_iteration
        return bill.gpu_hours if bill.cost is None else bill.cost


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The points of a sweep, by sequence length, then by ascending number of GPUs.

    Attributes:
        tokens: tokens of the whole training; None: points are compared by iteration, since all iterations have the same
            number of tokens.
        currency: the currency of the price; None: no price, so costs are GPU hours.
    """

    points: tuple[SweepPoint, ...]
    tokens: float | None = None
    currency: str | None = None

    @property
    def time_name(self) -> str:
        return "s/iteration" if self.tokens is None else "days"

    @property
    def cost_name(self) -> str:
        unit = self.currency or "GPU hours"
        return f"{unit}/iteration" if self.tokens is None else unit

    @cached_property
    def curves(self) -> dict[int, tuple[SweepPoint, ...]]:
        """The points at which a configuration can run, by sequence length."""
        lengths = dict.fromkeys(point.sequence_length for point in self.points)
        return {
            length: tuple(each for each in self.points if each.best is not None and each.sequence_length == length)
            for length in lengths
        }

    @cached_property
    def fronts(self) -> dict[int, tuple[SweepPoint, ...]]:
        """The Pareto front of time and cost, fastest first, by sequence length."""
        return {length: tuple(front(points)) for length, points in self.curves.items()}

    @cached_property
    def knees(self) -> dict[int, SweepPoint]:
        """The knees by sequence length. A front without a knee has no entry."""
        found = {length: knee([(each.time, each.cost) for each in points]) for length, points in self.fronts.items()}
        return {length: self.fronts[length][index] for length, index in found.items() if index is not None}

    def remarks(self, point: SweepPoint) -> tuple[str, ...]:
        """Remarks on the position of a point on its curve, such as "knee", or the reason why nothing can run."""
        if point.best is None:
            return (point.reason,)
        points, best = self.fronts[point.sequence_length], []
        if point not in points:
            other = next(each for each in points if each.time <= point.time and each.cost <= point.cost)
            return (f"not on the Pareto front: {other.num_gpus} GPUs are at least as fast and as cheap",)
        if point == points[0]:
            best.append("fastest")
        if point == self.knees.get(point.sequence_length):
            best.append("knee")
        if point == points[-1]:
            best.append("cheapest")
        return tuple(best)


def front(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """The Pareto front of time and cost, fastest first. Of equal points the one with the fewest GPUs is kept."""
    found: list[SweepPoint] = []
    for each in sorted(points, key=lambda point: (point.time, point.cost, point.num_gpus)):
        if not found or each.cost < found[-1].cost:
            found.append(each)
    return found


def knee(curve: Sequence[tuple[float, float]]) -> int | None:
    """The index of the knee of a front of (time, cost) pairs with ascending times; None: no knee. See the module."""
    if len(curve) < 3:
        return None
    (left, top), (right, bottom) = curve[0], curve[-1]
    width, height = right - left, top - bottom

    def depth(place: tuple[float, float]) -> float:
        """The distance below the chord, as a fraction of the height of the curve."""
        return 1 - (place[0] - left) / width - (place[1] - bottom) / height

    index = max(range(len(curve)), key=lambda each: depth(curve[each]))
    return index if depth(curve[index]) > _STRAIGHT else None
