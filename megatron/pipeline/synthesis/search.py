"""The search for a program: it improves the best first words in rounds, and gives a lower bound beside the result."""

import hashlib
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import ProgramSchedule, read_schedule
from megatron.pipeline.schedules.completion import completed
from megatron.pipeline.simulate import simulate
from megatron.pipeline.synthesis.bound import lower_bound
from megatron.pipeline.synthesis.improve import Climb, shaken
from megatron.pipeline.synthesis.lattice import words_of_lattices
from megatron.pipeline.synthesis.moved_rows import MovedProgram, Mover, most_held
from megatron.pipeline.synthesis.moves import Way, moved_microbatches, relaxed, ways_of
from megatron.pipeline.synthesis.moves_bound import bound_with_moves
from megatron.pipeline.synthesis.orders_bound import tightened
from megatron.pipeline.synthesis.problem import ROUNDING, Problem, Words, csv_of
from megatron.pipeline.synthesis.search_with_moves import changed, fastest
from megatron.pipeline.synthesis.seeds import Patterns, listed, named_words, one_after_another
from megatron.pipeline.synthesis.squeeze import Squeeze
from megatron.pipeline.synthesis.timing import Clock
from megatron.processes import map_forked

KNOWN = "known words"
"""The name of words with which a search began because its caller named them."""

_PATTERNS, _MOVES = 200, 2_000  # of the first rounds; later ones make fewer patterns and more moves
_SEEDS, _SHAKES = 2, 12  # of a round: the orders, and the patterns, that it squeezes; and the changes that it makes
_SWEEPS = 10  # the most pairs of sweeps for words to begin with
_LONGEST = 10  # the most moves of a round, as a multiple of those of the first round
_KEPT = 6  # the number of different words that are improved in turns
_SIMULATED = 3  # the number of words of which the simulator chooses one
CHANGES, _MOVED = 40, 3  # the changes of a round of programs with moves, and the number of these that are completed
_PARTS = 4  # the share of time for the moves of one way; the search under one set of limits has a share of 1
_COMPUTATIONS = 1_200  # rounds of larger problems make fewer moves, so that a round takes about a second or two


@dataclass(frozen=True, kw_only=True)
class Synthesis:
    """A synthesized program with its time, its memory and a lower bound.

    Attributes:
        problem: the problem that it solves.
        words: the computations of each rank.
        program: the complete program: computations, updates, versions, transfers.
        held: the most that each rank holds at any time, in the unit of `Problem.saved`.
        seconds: the simulated time of the batch.
        bound: a lower bound in seconds on every program with the words and the placement of `problem`.
        bound_from: the relaxation that gives the bound, in words.
        receives_ahead: a receive stands this many computations before the one that needs the tensor.
        begun_with: the order or pattern that the search improved into this program.
        named: the fastest registered order that keeps the limits, and its seconds; None if none does.
        rounds: the number of rounds of each process.
        seed: the seed of the search.
        ways: the ways that moves of activations may take.
        way: the way that the program's moves take; None: it has none.
    """

    problem: Problem
    words: Words
    program: Program
    held: tuple[float, ...]
    seconds: float
    bound: float
    bound_from: str
    receives_ahead: int
    begun_with: str
    named: tuple[str, float] | None
    rounds: tuple[int, ...]
    seed: int
    ways: tuple[Way, ...] = ()
    way: Way | None = None

    @property
    def moved(self) -> dict[int, tuple[int, ...]]:
        """Stage -> the microbatches whose activations move; stages without any are left out."""
        return moved_microbatches(self.program)

    @property
    def recomputed(self) -> dict[int, tuple[int, ...]]:
        """Stage -> the microbatches that it recomputes; stages without any are left out."""
        return self.problem.recomputed_microbatches

    @property
    def bubble(self) -> float:
        """The idle part of the busiest rank's batch, where recomputes count as idle."""
        return bubble(self.problem, self.seconds)

    @property
    def csv(self) -> str:
        """The text of the computations, for `--pipeline-program`.

        The passes add the rest for the run that reads it, such as reductions over replicas and of tied embeddings.
        """
        return csv_of(self.program, self.receives_ahead)

    def schedule(self, *, tied_embeddings: bool = False, data_parallel: bool = False) -> ProgramSchedule:
        """Return the schedule of the program for a run, proved for any number of batches.

        Args:
            tied_embeddings: the first and the last stage share an embedding.
            data_parallel: the pipeline has replicas.
        """
        return read_schedule("synthesized", text=self.csv, tied_embeddings=tied_embeddings, data_parallel=data_parallel)

    def certificate(self) -> dict[str, object]:
        """Return the program's figures, and the programs over which the bound holds, as values for JSON."""
        problem = self.problem
        return {
            "seconds": self.seconds,
            "bubble": self.bubble,
            "bound": self.bound,
            "bound_from": self.bound_from,
            "bound_holds_for": problem.facts | self._facts_of_moves,
            "held": self.held,
            "recomputed_microbatches_of_stage": self.recomputed,
            "moves": None if self.way is None else {"to": self.way.name, "microbatches_of_stage": self.moved},
            "receives_ahead": self.receives_ahead,
            "begun_with": self.begun_with,
            "best_registered_order": self.named,
            "rounds": self.rounds,
            "seed": self.seed,
            "csv_sha256": hashlib.sha256(self.csv.encode()).hexdigest(),
        }  # fmt: skip

    @property
    def _facts_of_moves(self) -> dict[str, object]:
        """The moves that the programs under the bound may have, with their seconds, as values for JSON."""
        seconds = {way.name: dict(zip(("out", "back"), way.seconds(self.problem), strict=True)) for way in self.ways}
        return {"seconds_of_moves_to": seconds} if seconds else {}


def bubble(problem: Problem, seconds: float) -> float:
    """Return 1 - (the busiest rank's F, I and W) / seconds."""
    return 1 - max(map(problem.work_without_recompute, range(problem.num_ranks))) / seconds


@dataclass(frozen=True)
class _Found:
    """Words with their seconds.

    Attributes:
        name: the order or pattern that the words are, or from which they were improved.
        is_order: whether the words are a registered order without any change.
    """

    seconds: float
    words: Words
    name: str
    is_order: bool = False


@dataclass(frozen=True)
class _Result:
    """The result of one process: its fastest words, the fastest registered order, and its number of rounds."""

    pool: list[_Found]
    named: _Found | None
    rounds: int


def synthesize(
    problem: Problem,
    *,
    moves: str = "none",
    seconds: float = 30.0,
    rounds: int | None = None,
    seed: int = 0,
    processes: int = 1,
    known: Sequence[Words] = (),
    done: Callable[[float], None] = lambda _: None,
    tightens: bool = True,
) -> Synthesis:
    """Search for the fastest program of a problem.

    Args:
        problem: costs and limits.
        moves: where saved activations may wait: `none`, `host`, on the other rank of a `pair`, or the `best` of these.
            A program without moves is always among those that are compared.
        seconds: how long to search, without the time of the round that is under way then, and of `tightens`. The search
            ends sooner where the bound is reached.
        rounds: the number of rounds of each process, in place of `seconds`. The result then depends on nothing else but
            the seed and the number of processes. With moves, each set of relaxed limits has this number of rounds.
        seed: the seed of all choices at random.
        processes: the number of processes.
        known: further words to begin with, such as those that were found for a smaller limit.
        done: called in the first process behind each round, with the part of the search that is over.
        tightens: behind the search, the bound may take seconds of its own (`orders_bound.py`).

    Raises:
        ValueError: there is no such choice of moves, or a rank has no pair.
    """
    ways, begun = ways_of(moves, problem), time.monotonic()
    relaxations = {way: relaxed(problem, way) for way in ways}
    parts, number = 1 + sum(_PARTS + len(each) for each in relaxations.values() if each), 0
    seeds = [seed + 1_000_003 * each for each in range(processes)]

    def searched(problem: Problem, bound: float) -> list[_Result]:
        nonlocal number
        before, number = number, number + 1
        within = [*filter(problem.accepts, known)]
        search = partial(
            _search, problem, bound, seconds / parts, rounds, within, lambda part: done((before + part) / parts)
        )
        return map_forked(search, seeds, processes)

    bound, bound_from = lower_bound(problem)
    found = _chosen(problem, bound, bound_from, searched(problem, bound), seed)
    if not ways:
        if tightens and not problem.kept:
            bound, bound_from = tightened(problem, bound, bound_from, found.seconds)
        return replace(found, bound=bound, bound_from=bound_from)
    bound, bound_from = bound_with_moves(problem, ways)
    found = replace(found, bound=bound, bound_from=bound_from, ways=ways)
    for way, problems in relaxations.items():
        if not problems or found.seconds <= bound * (1 + ROUNDING):
            continue
        words = [(KNOWN, each) for each in known] + list(named_words(problem))
        for each in problems:
            if number > 1 and rounds is None and time.monotonic() > begun + seconds * (number + 1) / parts:
                number += 1  # earlier rounds have used up its time
            else:
                words += [(one.name, one.words) for result in searched(each, bound) for one in result.pool]
        number += _PARTS
        now = time.monotonic()
        until = max(begun + seconds * number / parts, now + seconds * _PARTS / parts) if rounds is None else math.inf
        mover = Mover(problem, way)
        kept = fastest(mover, words, until)
        if kept:
            attempts = math.inf if rounds is None else rounds * CHANGES * part_of_round(problem)
            change = partial(changed, mover, problems, kept, bound, partial(goes_on, until, attempts))
            kept = [each for kept in map_forked(change, seeds, processes) for each in kept[:_MOVED]]
            found = min((found, *(with_moves(found, each) for each in kept)), key=lambda each: each.seconds)
        done(number / parts)
    return found


def goes_on(until: float, attempts: float, number: int) -> bool:
    return number < attempts and time.monotonic() < until


def with_moves(found: Synthesis, moved: MovedProgram) -> Synthesis:
    """Return the complete and proved program with moves, with its receives where the program is fastest."""
    problem = found.problem
    made = (_timed(problem, moved.program, ahead) for ahead in problem.receives_ahead)
    seconds, ahead, program = min(made, key=lambda each: each[:2])
    return replace(
        found, words=moved.words, program=program, held=most_held(problem, program), seconds=seconds,
        receives_ahead=ahead, begun_with=moved.begun_with, way=moved.way if moved_microbatches(program) else None,
    )  # fmt: skip


def _chosen(problem: Problem, bound: float, bound_from: str, results: list[_Result], seed: int) -> Synthesis:
    """Return the fastest of the words found, as a program."""
    named = results[0].named
    best_words = _best([each for result in results for each in result.pool])
    # The simulator also knows when receives are posted and channels are free, so other words may be fastest there.
    contenders = best_words[:_SIMULATED] if problem.has_transfers else best_words[:1]
    contenders = [*filter(None, [named]), *contenders]
    timed = [
        (*_timed(problem, problem.program(each.words), ahead), each)
        for each in contenders for ahead in problem.receives_ahead
    ]  # fmt: skip
    named_seconds = timed[0][0]  # with receives where they stand in the preset
    least = min(each[0] for each in timed)
    seconds, ahead, program, best = min((each for each in timed if each[0] <= least * (1 + ROUNDING)),
                                        key=lambda each: each[1])  # fmt: skip
    return Synthesis(
        problem=problem,
        words=best.words,
        program=program,
        held=problem.held(best.words),
        seconds=seconds,
        bound=bound,
        bound_from=bound_from,
        receives_ahead=ahead,
        begun_with=best.name,
        named=None if named is None else (named.name, named_seconds),
        rounds=tuple(result.rounds for result in results),
        seed=seed,
    )


def _timed(problem: Problem, bare: Program, receives_ahead: int) -> tuple[float, int, Program]:
    """Complete and prove a program. Return its simulated seconds, `receives_ahead`, and the complete program."""
    program = completed(bare, receives_ahead=receives_ahead)
    return simulate(program, problem.costs).makespan, receives_ahead, program


def named_points(problem: Problem) -> dict[str, tuple[float, float]]:
    """Return, for each registered order that has the placement, the most that a rank holds, and a batch's seconds."""
    clock, points = Clock(problem), {}
    for name, words in named_words(problem):
        times = clock.times(words)
        if times is not None:
            points[name] = max(problem.held(words)), times.seconds
    return points


def _search(
    problem: Problem,
    bound: float,
    seconds: float,
    rounds: int | None,
    known: Sequence[Words],
    done: Callable[[float], None],
    seed: int,
) -> _Result:
    """Search in this process."""
    begun, clock, chance = time.monotonic(), Clock(problem), random.Random(seed)
    part = part_of_round(problem)
    begin = list(_begin(problem, clock, known))
    named = min((each for each in begin if each.is_order), key=lambda each: each.seconds, default=None)
    pool, orders, made = _best(begin), _best(begin), []
    squeeze, patterns, number = Squeeze(problem, clock), Patterns(problem, clock), 0
    count = max(1, round(_SEEDS * part))
    while pool[0].seconds > bound * (1 + ROUNDING):
        if number >= rounds if rounds is not None else time.monotonic() - begun > seconds:
            break
        if number < 2 or number % 4 == 0:
            made = _best([*made, *_patterns(patterns, chance, max(10, round(_PATTERNS * part)))])
        if number == 0:
            until = begun + seconds / 4 if rounds is None else math.inf
            several = words_of_lattices(patterns, random.Random(seed), pool[0].seconds, until)
            made = _best([*made, *(_Found(*each, "a pattern of several microbatches") for each in several)])
        fresh, orders, made = orders[:count] + made[:count], orders[count:], made[count:]
        pool = _best([*pool, *(_Found(*squeeze.words(each.words, _SWEEPS), each.name) for each in fresh)])
        index = 0 if number % 4 < 2 else number // 4 % len(pool)
        if number % 2 == 0:
            changed = shaken(squeeze, pool[index].words, chance, max(2, round(_SHAKES * part)))
        else:
            climb = Climb(problem, clock, pool[index].words, chance)
            attempts = _MOVES * part * min(_LONGEST, 1 + number // 3)
            climb.run(max(200, round(attempts)), warmth=chance.choice((0.2, 1.0, 1.0, 4.0)))
            changed = squeeze.words(climb.best[1], _SWEEPS)
        if changed[0] <= pool[index].seconds:
            pool[index] = _Found(*changed, pool[index].name)
            pool = _best(pool)
        number += 1
        done(min(1.0, number / rounds if rounds else (time.monotonic() - begun) / seconds))
    return _Result(pool, named, number)


def part_of_round(problem: Problem) -> float:
    """The part of a round's moves that a round of this problem makes: 1, or less for a large problem."""
    return min(1.0, _COMPUTATIONS / (problem.num_microbatches * len(problem.queues)))


def _begin(problem: Problem, clock: Clock, known: Sequence[Words]) -> Iterator[_Found]:
    """Yield known words, and registered orders; an order that exceeds limits is changed by list scheduling."""
    found = [("one microbatch after another", one_after_another(problem), False)]
    found += [(KNOWN, words, False) for words in known]
    for name, words in named_words(problem):
        if problem.accepts(words):
            found.append((name, words, True))
        elif (within := listed(problem, words)) is not None:
            found.append((f"within limits: {name}", within, False))
    for name, words, is_order in found:
        if (times := clock.times(words)) is not None:
            yield _Found(times.seconds, words, name, is_order)


def _patterns(patterns: Patterns, chance: random.Random, count: int) -> Iterator[_Found]:
    for _ in range(count):
        if (made := patterns.words(chance)) is not None:
            yield _Found(*made, "a pattern")


def _best(found: list[_Found]) -> list[_Found]:
    """Return the fastest of the words found, of which no two take equally long."""
    kept: dict[str, _Found] = {}
    for each in sorted(found, key=lambda each: each.seconds):
        kept.setdefault(f"{each.seconds:.9g}", each)
    return list(kept.values())[:_KEPT]
