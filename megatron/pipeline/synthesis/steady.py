"""Programs for weights that do not drain: the least period within the limits, and at this period the least memory.

Under 2bw batches follow one another without a wait, so no time is lost at their ends, and the busiest rank can always
be busy. Only memory can be gained. A pattern (`seeds.py`) whose period is the time that the busiest rank computes for
one microbatch loses no time, and the waits along its path decide how much the ranks hold.

Three bounds on the period hold for every program with the problem's placement, costs and limits that goes on for ever,
even if it repeats with several microbatches only:

- The period is at least the time that a rank computes for one microbatch.
- The memory of a microbatch on a rank, times the time for which it is held, is at most the period times the memory that
  the rank may hold.
- A batch begins with weights that have the gradients of the batch before the last, so the microbatches of that batch
  have left by then.
"""

import hashlib
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import TWO_BW, WeightPolicy
from megatron.pipeline.schedules.program_schedule import ProgramSchedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.synthesis.bound import held_over_time
from megatron.pipeline.synthesis.problem import ROUNDING, Problem, Words, csv_of
from megatron.pipeline.synthesis.seeds import Pattern, Patterns, named_words
from megatron.pipeline.synthesis.timing import Clock
from megatron.processes import map_forked

_ATTEMPTS = 1_000  # of a round
_PARENTS = 8
_AT_RANDOM = 0.2  # the part of attempts that change no parent
_PERIODS = 1.0, 1.0, 1.0, 1.01, 1.02, 1.05, 1.1, 1.2
_STEP = 1.02  # the factor between periods that are tried one after another
_STRICTLY = 1e-6
_NAMED = 3  # batches of a registered order: the second one starts when the pipeline is full
_AFTER = 3  # batches behind the first whose pattern is whole: two that are alike, and one that drains


@dataclass(frozen=True, kw_only=True)
class Steady:
    """A synthesized program of batches that follow one another, with its time, its memory and lower bounds.

    Attributes:
        problem: the problem that it solves; its microbatches are those of one batch.
        program: the complete program: computations, updates, versions, transfers.
        period: seconds of a microbatch in the pattern.
        receives_ahead: a receive stands this many computations before the one that needs the tensor.
        seconds: the simulated time of a batch between fill and drain.
        bound: a lower bound on the seconds of a batch, for every program of the problem.
        bound_from: the origin of the bound, in words.
        held: the most that each rank holds at any time, in the unit of `Problem.saved`.
        least_held: for each rank, a lower bound on `held` at this period.
        named: the most that a rank holds under each registered order that has the placement and does not drain.
        begun_with: the registered order, or the name of the pattern, from which the program was made.
        rounds: the number of rounds of each process.
        seed: the seed of the search.
    """

    problem: Problem
    program: Program
    period: float
    receives_ahead: int
    seconds: float
    bound: float
    bound_from: str
    held: tuple[float, ...]
    least_held: tuple[float, ...]
    named: dict[str, float]
    begun_with: str
    rounds: tuple[int, ...]
    seed: int

    @property
    def fullness(self) -> float:
        """The largest fraction of its limit that a rank holds; without a limit, the amount itself."""
        return fullness_of(self.problem, self.held)

    @property
    def csv(self) -> str:
        """The computations of a fill, of batches that are alike, and of a drain, for `--pipeline-program`."""
        return csv_of(self.program, self.receives_ahead)

    def certificate(self) -> dict[str, object]:
        """Return the program's figures, and the programs over which the bounds hold, as values for JSON."""
        return {
            "seconds": self.seconds,
            "period_of_a_microbatch": self.period,
            "bound": self.bound,
            "bound_from": self.bound_from,
            "bound_holds_for": self.problem.facts | {"weights": self.program.weights.name},
            "held": self.held,
            "receives_ahead": self.receives_ahead,
            "least_held_at_this_period": self.least_held,
            "registered_orders_hold": self.named,
            "begun_with": self.begun_with,
            "rounds": self.rounds,
            "seed": self.seed,
            "csv_sha256": hashlib.sha256(self.csv.encode()).hexdigest(),
        }


def synthesize_steady(
    problem: Problem,
    *,
    weights: WeightPolicy = TWO_BW,
    seconds: float = 30.0,
    rounds: int | None = None,
    seed: int = 0,
    processes: int = 1,
    done: Callable[[float], None] = lambda _: None,
) -> Steady:
    """Search for the program with the least period, and of these for one that holds least.

    Args:
        problem: costs and limits; `num_microbatches` is the size of each batch.
        weights: the policy. Its pipelines do not drain.
        seconds: how long to search, without the time of the round that is under way then. The search ends sooner where
            both bounds are reached.
        rounds: the number of rounds of each process, in place of `seconds`. The result then depends on nothing else but
            the seed and the number of processes.
        seed: the seed of all choices at random.
        processes: the number of processes.
        done: called in the first process behind each round, with the part of the search that is over.

    Raises:
        ValueError: nothing takes any time, times overflow, or some microbatches of a recomputed stage are kept.
    """
    assert not weights.drains
    if problem.kept:
        raise ValueError(
            "where batches follow one another all microbatches are alike: recompute all microbatches of a stage or none"
        )
    bound, _ = _least_period(problem)
    search = partial(_search, problem, bound, seconds, rounds, done)
    results = map_forked(search, [seed + 1_000_003 * each for each in range(processes)], processes)
    best = min((each for each, _ in results), key=lambda each: each.score)
    words, num_batches = _words(problem, best)
    numbers = tuple(number for _, number in results)
    return _made(
        problem, weights, words, num_batches, period=best.waits.period, begun_with=best.name, rounds=numbers, seed=seed
    )  # fmt: skip


def begin_steady(problem: Problem, *, weights: WeightPolicy = TWO_BW) -> Steady:
    """Return the registered order that holds least within the limits; if none keeps them, the result of one round.

    Raises ValueError as `synthesize_steady` does.
    """
    named = [
        (fullness_of(problem, problem.held(words)), name, words)
        for name, words in named_words(problem, weights.name, _NAMED)
        if problem.accepts(words)
    ]
    if not named:
        return synthesize_steady(problem, weights=weights, rounds=1)
    _, name, words = min(named)
    return _made(problem, weights, words, _NAMED, begun_with=name)


def fullness_of(problem: Problem, held: Sequence[float]) -> float:
    """Return the largest fraction of its limit that a rank holds; without a limit, the amount itself."""
    return max(each / scale for each, scale in zip(held, _scales(problem), strict=True))


def _made(
    problem: Problem,
    weights: WeightPolicy,
    words: Words,
    num_batches: int,
    *,
    begun_with: str,
    period: float | None = None,
    rounds: tuple[int, ...] = (0,),
    seed: int = 0,
) -> Steady:
    """Return the program of words with its figures. `period`: None: the simulated one."""
    bound, bound_from = _least_period(problem)
    bare, timed = problem.program(words, weights, num_batches), []
    for ahead in problem.receives_ahead:
        program = ProgramSchedule.of(bare, name="synthesized", receives_ahead=ahead).program  # proved for any number
        seconds_of_batch = simulate(program, problem.costs).steady_time_per_batch()
        timed.append((round(seconds_of_batch / bound, 9), ahead, seconds_of_batch, program))
    _, ahead, seconds_of_batch, program = min(timed, key=lambda each: each[:2])
    m = problem.num_microbatches
    period = seconds_of_batch / m if period is None else period
    return Steady(
        problem=problem,
        program=program,
        period=period,
        receives_ahead=ahead,
        seconds=seconds_of_batch,
        bound=bound * m,
        bound_from=bound_from,
        held=problem.held(words),
        least_held=tuple(_least_held(problem, rank, period) for rank in range(problem.num_ranks)),
        named={name: max(problem.held(each)) for name, each in named_words(problem, weights.name, _NAMED)},
        begun_with=begun_with,
        rounds=rounds,
        seed=seed,
    )


# --- bounds


def _least_period(problem: Problem) -> tuple[float, str]:
    """Return a lower bound on the seconds of a microbatch, and its origin in words."""
    found = []
    for rank in range(problem.num_ranks):
        found.append((problem.work(rank) / problem.num_microbatches, f"the work of rank {rank}"))
        found.append((held_over_time(problem, rank) / problem.room_of(rank), f"the room of rank {rank} over time"))
    # On stage 0, from the first forward of a batch to that of the batch after the next: there have to be the other
    # forwards of the batch, and the way of its last microbatch.
    m, forward = problem.num_microbatches, problem.seconds[problem.path[0]]
    found.append(((_latency(problem) + (m - 1) * forward) / (2 * m), "the way of a batch's last microbatch"))
    if not max(found)[0]:
        raise ValueError("nothing takes any time, so there is no period; give the seconds of computations")
    if not all(math.isfinite(seconds) for seconds, _ in found):
        raise ValueError("the times of a batch are more than a number can hold; give smaller costs")
    return max(found)


def _latency(problem: Problem) -> float:
    """The least seconds from the first forward of a microbatch to the end of its last computation on stage 0."""
    sent = sum(problem.sources[queue][1] for queue in problem.path)
    weight = problem.seconds[problem.number_of[Kind.BACKWARD_WEIGHT, 0]] if problem.splits else 0.0
    return sum(problem.seconds[queue] for queue in problem.path) + sent + weight


def _least_held(problem: Problem, rank: int, period: float) -> float:
    """The least that a rank can hold at a period.

    On the average over time it holds `held_over_time` / period. If its microbatches have one size only, the most that
    it holds is a number of whole microbatches.
    """
    least, size = held_over_time(problem, rank) / period, problem.only_size(rank)
    if size:
        least = math.ceil(least / size * (1 - ROUNDING)) * size
    return max(least, problem.least_limits[rank])


# --- the search


@dataclass(frozen=True)
class _Found:
    """A pattern, and the memory that its ranks hold.

    Attributes:
        score: less is better: the excess over limits, the period, the fullness of the fullest rank, the sum over all
            ranks, the latency.
        name: the name of the pattern.
    """

    score: tuple[float, ...]
    waits: Pattern
    offsets: list[float]
    held: list[float]
    name: str = "a repeating pattern"


def _search(
    problem: Problem, bound: float, seconds: float, rounds: int | None, done: Callable[[float], None], seed: int
) -> tuple[_Found, int]:
    """Search in this process. Returns the best pattern that keeps the limits, and the number of rounds."""
    begun, chance = time.monotonic(), random.Random(seed)
    patterns = Patterns(problem, Clock(problem))
    least = max(bound, _latency(problem) / (problem.num_microbatches + 1))  # the least period of a pattern
    parents: list[_Found] = []
    number = 0
    while number < rounds if rounds is not None else time.monotonic() - begun <= seconds:
        for _ in range(_ATTEMPTS):
            if not parents or chance.random() < _AT_RANDOM:
                waits = patterns.at_random(chance)
                waits = replace(waits, period=least * chance.choice(_PERIODS))
            else:
                waits = patterns.changed(chance.choice(parents).waits, chance)
                waits = replace(waits, period=max(least, waits.period))
            offsets = patterns.offsets(waits, moves=False)
            made = None if offsets is None else _judged(problem, patterns, waits, offsets)
            if made is not None and all(made.score != each.score for each in parents):
                parents = sorted([*parents, made], key=lambda each: each.score)[:_PARENTS]
        number += 1
        done(min(1.0, number / rounds if rounds else (time.monotonic() - begun) / seconds))
        if parents and _is_least(problem, bound, parents[0]):
            break
    kept = [each for each in parents if not each.score[0] and _keeps(problem, each)]
    return min([*kept, *_without_waits(problem, patterns, least)], key=lambda each: each.score[1:]), number


def _without_waits(problem: Problem, patterns: Patterns, least: float) -> Iterator[_Found]:
    """Yield the pattern without waits at the least period that keeps the limits, and one that always keeps them.

    Periods are tried in small steps from `least` on. In the second pattern a microbatch leaves before the next one
    begins.
    """
    last, none, period = _one_after_another(problem, patterns), (0.0,) * 2 * problem.num_stages, least
    while period < last.waits.period:
        waits = Pattern(period, none, none)
        offsets = patterns.offsets(waits, moves=False)
        made = None if offsets is None else _judged(problem, patterns, waits, offsets)
        if made is not None and not made.score[0] and _keeps(problem, made):
            yield made
            break
        period = max(period * _STEP, math.nextafter(period, math.inf))
    yield last


def _one_after_another(problem: Problem, patterns: Patterns) -> _Found:
    """Return the pattern in which a microbatch leaves before the next one begins. It keeps all limits."""
    offsets, now = [0.0] * len(problem.queues), 0.0
    for queue in problem.path:
        kind, stage = problem.queues[queue]
        rest = [each for each, (other, at) in enumerate(problem.queues) if at == stage and other is not Kind.FORWARD]
        now += problem.sources[queue][1]
        for each in [queue] if kind is Kind.FORWARD else rest:
            offsets[each] = now
            now += problem.seconds[each]
    # A little longer, so that computations that take no time do not meet those of the next microbatch.
    longer = max(1.01 * now, math.nextafter(now, math.inf))
    found = _judged(problem, patterns, Pattern(longer, (), ()), offsets)
    assert found is not None and _keeps(problem, found)
    return replace(found, name="one microbatch after another")


def _judged(problem: Problem, patterns: Patterns, waits: Pattern, offsets: list[float]) -> _Found | None:
    """Return a pattern, or None if a batch would wait for the step before it.

    The first forward of batch j is (m + 1) periods behind the last one of batch j - 2, and needs the weights with the
    gradients of that batch.
    """
    latency = max(at + problem.seconds[queue] for queue, at in enumerate(offsets))
    until = (problem.num_microbatches + 1) * waits.period
    if latency > until * (1 + ROUNDING) or max(offsets) >= until * (1 - _STRICTLY):  # the last may take no time
        return None
    held = patterns.held([offsets], waits.period)
    parts = [each / scale for each, scale in zip(held, _scales(problem), strict=True)]
    score = patterns.excess(held), waits.period, max(parts), sum(parts), latency
    return _Found(tuple(round(each, 9) for each in score), waits, offsets, held)


def _is_least(problem: Problem, bound: float, found: _Found) -> bool:
    """Whether, by the bounds, no program has a smaller period, or at this period a smaller fullness."""
    period = found.waits.period
    least = [_least_held(problem, rank, period) / scale for rank, scale in enumerate(_scales(problem))]
    return period <= bound * (1 + ROUNDING) and not found.score[0] and found.score[2] <= max(least) * (1 + ROUNDING)


def _keeps(problem: Problem, found: _Found) -> bool:
    """Whether the words keep the limits. In words, memory that comes and goes at one time does so one by one."""
    return problem.accepts(_words(problem, found)[0])


def _scales(problem: Problem) -> list[float]:
    """The unit of each rank's fullness: its limit, or 1 without a limit."""
    return [1.0 if math.isinf(limit) else limit for limit in map(problem.limit_of, range(problem.num_ranks))]


def _words(problem: Problem, found: _Found) -> tuple[Words, int]:
    """Return the words of a pattern from fill to drain, over enough batches to show how it repeats; and their count."""
    period, turn = found.waits.period, {queue: place for place, queue in enumerate(problem.path)}
    cycles, places = [], []
    for queue, at in enumerate(found.offsets):
        cycle, rest = divmod(at / period + ROUNDING, 1.0)
        kind, stage = problem.queues[queue]
        on_path = turn.get(queue)
        if on_path is None:  # R directly before the I or B of its stage, W directly behind: each frees what it can
            on_path = turn[problem.number_of[problem.begins_backward, stage]]
            on_path += -0.5 if kind is Kind.RECOMPUTE else 0.25
        cycles.append(int(cycle))
        places.append((round(rest, 9), on_path))
    num_batches = math.ceil((max(cycles) + 1) / problem.num_microbatches) + _AFTER
    number, words = num_batches * problem.num_microbatches, []
    for own in problem.queues_of_rank:
        turns = sorted(own, key=lambda queue: places[queue])
        words.append([
            queue for cycle in range(number + max(cycles)) for queue in turns if 0 <= cycle - cycles[queue] < number
        ])  # fmt: skip
    return words, num_batches
