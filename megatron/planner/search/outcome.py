"""The outcome of a search: every choice considered, kept with an estimate or rejected with a reason.

The outcome also has a comparison with training without a pipeline, with weights split over replicas (FSDP, ZeRO-2 and
3), so that the user sees when no pipeline is better. This project's trainer does not split weights over replicas: the
outcome names software that does. The best configuration and its script are always for this project's trainer.

A `Bill` has the days and the cost of a training, for all tokens and for a million tokens. A bill counts iterations
only: checkpoints, evaluations and restarts come on top.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    """A value as text: three digits below 100, whole units above."""
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


TRAINED_BY = {3: ("torchtitan", "Megatron-FSDP", "DeepSpeed"), 2: ("Megatron-FSDP", "DeepSpeed")}
"""Systems that split weights over replicas, by ZeRO stage."""

MARGIN_OF_SPLIT, MARGIN_OF_WHOLE = 0.37, 0.2
"""The relative gain in predicted speed from which split or whole weights are called the better answer
(docs/planner_sharded.md).

Split weights need the larger margin: the largest error of a published run, 37% (ZeRO-3), which also covers the most
optimistic prediction, 30% too fast. Whole weights, mostly with a pipeline, need a fifth. Their margin is smaller since
13 of 18 runs of split weights were predicted too fast: most errors already favour split weights."""


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


def described(configuration: Configuration) -> str:
    """Describe a configuration with split weights in short text."""
    sharding = configuration.sharding
    assert sharding is not None
    parts = [f"t={configuration.tensor}", f"d={configuration.data}"]
    if sharding.shards < configuration.data:
        parts.append(f"shards over {sharding.shards}")
    parts.append(f"microbatches of {configuration.micro_batch_size}")
    if configuration.recompute.value != "none":
        parts.append(f"recompute {configuration.recompute.value}")
    return f"{sharding.name}, {', '.join(parts)}"


def without_pipeline_sentence(outcome: Outcome, *, has_script: bool) -> str | None:
    """The comparison with training without a pipeline as a sentence; None if nothing was compared.

    `has_script`: whether a script that starts the best configuration was written (best.sh).
    """
    found = outcome.without_pipeline
    if found is None:
        return None
    if found.is_slowed:
        return (
            "without a pipeline nothing is left, weights split over replicas (FSDP) included: the allocator would slow "
            "what fits, and --avoid-pressure leaves that out"
        )
    if found.estimate is None:
        short = "" if found.missing_gib is None else f": the nearest misses {found.missing_gib:.1f} GiB"
        return f"without a pipeline nothing fits, weights split over replicas (FSDP) included{short}"
    estimate = found.estimate
    trained_by = TRAINED_BY[estimate.configuration.sharding.stage]
    text = (
        f"without a pipeline: {described(estimate.configuration)} would take ~{estimate.seconds:.3g} s an iteration, "
        f"{found.sequences_per_second:.3g} sequences/s and {estimate.memory_gib:.1f} GiB"
    )
    if estimate.under_pressure:
        text += " (slowed for want of memory)"
    if outcome.best is not None:
        text += f", {_compared(found, outcome)}"
    return (
        f"{text}; {', '.join(trained_by[:-1])} and {trained_by[-1]} train so, this project does not"
        + (", and best.sh starts the best that it trains" if outcome.best is not None and has_script else "")
    )  # fmt: skip


def _compared(found: WithoutPipeline, outcome: Outcome) -> str:
    """The comparison in sequences per second with the fastest ranked configuration, as a clause.

    The best by memory may be slow, so it is not the one compared. The fastest may have no pipeline either.
    """
    best: Kept = max(outcome.ranking, key=lambda each: each.sequences_per_second)
    ratio = found.sequences_per_second / best.sequences_per_second
    name = "best" if best is outcome.best else "fastest"
    part = f"{100 * abs(ratio - 1):.1f}%"
    text = f"{part} {'faster' if ratio > 1 else 'slower'} than the {name} here"
    if part == "0.0%":
        text = f"as fast as the {name} here"
    if found.software is not None and found.software.layers != best.layers:
        text += f" (with other layers: {found.software.layers}, not {best.layers})"
    if -MARGIN_OF_WHOLE <= ratio - 1 <= MARGIN_OF_SPLIT:
        return f"{text}, which is less than such predictions may be off (docs/planner.md)"
    if best.choice.pipeline == 1:
        return f"{text}, so {'split' if ratio > 1 else 'whole'} weights are the better answer"
    return f"{text}, so {'no' if ratio > 1 else 'a'} pipeline is the better answer"


def without_pipeline_record(found: WithoutPipeline | None) -> dict | None:
    """The comparison as a JSON record; None if nothing was compared."""
    if found is None:
        return None
    if found.estimate is None:
        return {"fits": False, "missing_gib": found.missing_gib, **({"verdict": "slowed"} if found.is_slowed else {})}
    estimate, configuration = found.estimate, found.estimate.configuration
    return {
        "fits": True,
        "strategy": "fsdp",
        "trained_by": list(TRAINED_BY[configuration.sharding.stage]),
        "trained_here": False,
        "zero_stage": configuration.sharding.stage,
        "shards": configuration.sharding.shards,
        "tensor": configuration.tensor,
        "data": configuration.data,
        "transformer_impl": found.software and found.software.transformer_impl,
        "attention": found.software and found.software.attention,
        "micro_batch_size": configuration.micro_batch_size,
        "global_batch_size": configuration.global_batch_size,
        "recompute": configuration.recompute.value,
        "iteration_seconds": estimate.seconds,
        "sequences_per_second": found.sequences_per_second,
        "mfu": estimate.mfu,
        "memory_gib": estimate.memory_gib,
        "verdict": estimate.verdict.word,
    }
