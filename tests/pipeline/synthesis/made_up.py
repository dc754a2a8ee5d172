"""Small problems at random, and the least time of each by trying every order of every rank; and rows with moves."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from megatron.pipeline.program.edges import round_robin, v
from megatron.pipeline.program.extent import Kept
from megatron.pipeline.program.instruction import MOVES, USES_SAVED, Instruction, Kind, Row
from megatron.pipeline.program.lane_order import Pairs
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis.moves import Way
from megatron.pipeline.synthesis.problem import Problem


def small(seed: int) -> Problem:
    """A problem with p <= 3, m <= 4 and integer costs, of which every order can be tried; limits bind in most."""
    chance = random.Random(seed)
    while True:
        kind = chance.choice(("halves", "whole", "recompute", "two stages"))
        p, m = chance.choice((2, 3)), chance.choice((2, 3, 4))
        if kind in ("halves", "recompute"):
            m = min(m, 3)
        if kind == "two stages":
            p, m = 2, 2
        placement = chance.choice((v, round_robin))(p, 2 if kind == "two stages" else 1)
        stages = len(placement)

        def each(least: int = 1, count: int = stages) -> list[float]:
            return [float(chance.randint(least, 5)) for _ in range(count)]

        halves = kind == "halves"
        costs = Costs(
            forward=each(), backward=each(), recompute=each(), latency=float(chance.choice((0, 0, 1, 2))),
            **({"backward_input": each(), "backward_weight": each(0)} if halves else {}),
        )  # fmt: skip
        recomputed = frozenset(each for each in range(stages) if kind == "recompute" and chance.random() < 0.7)
        try:
            return Problem(
                rank_of_stage=placement, num_microbatches=m, costs=costs, splits=halves, recomputed=recomputed,
                deferred=chance.choice((1.0, 0.5)) if halves else None, stage_input=0.25 if recomputed else 0.0,
                limits=[chance.choice((1.0, 1.5, 2.0, 3.0)) * (stages // p) for _ in range(p)],
            )  # fmt: skip
        except ValueError:
            continue  # the limit is too small for one microbatch


def little_memory(seed: int, most: int) -> Problem:
    """A problem with up to three ranks and limits of one to two microbatches, which has at most `most` words."""
    chance = random.Random(seed)
    while True:
        placement = chance.choice(((0, 1), (0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1), (0, 0, 1), (0, 1, 0)))
        stages, splits = len(placement), chance.random() < 0.6

        def each(stages: int = stages) -> list[float]:
            return [float(chance.choice((chance.randint(0, 5), chance.uniform(0, 5)))) for _ in range(stages)]

        recomputed = frozenset(each for each in range(stages) if chance.random() < 0.15)
        problem = Problem(
            rank_of_stage=placement, num_microbatches=chance.choice((2, 3, 4)), splits=splits, recomputed=recomputed,
            costs=Costs(
                forward=each(), backward=each(), backward_input=each(), backward_weight=each(), recompute=each(),
                latency=float(chance.choice((0, 0, 1, 3))),
            ),
            saved=[chance.choice((1.0, 1.0, 1.5)) for _ in range(stages)], deferred=chance.choice((1.0, 0.5)),
            stage_input=0.25,
        )  # fmt: skip
        limits = [least * chance.choice((1.0, 1.25, 1.5, 2.0)) for least in problem.least_limits]
        problem = replace(problem, limits=limits)
        words = (len(list(itertools.islice(all_words(problem, rank), most + 1))) for rank in range(problem.num_ranks))
        if math.prod(words) <= most:
            return problem


_numbers = st.one_of(st.integers(0, 5).map(float), st.floats(0.0, 9.0))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Zeros, ties, slow links and very different stages, with limits that may leave room for one microbatch only."""
    placements = [(0,), (0, 1), (0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1), (0, 0, 1), round_robin(3, 2)]
    placement = draw(st.sampled_from(placements))
    each, edge = (st.lists(_numbers, min_size=count, max_size=count) for count in (len(placement), len(placement) - 1))
    costs = Costs(
        forward=draw(each), backward_input=draw(each), backward_weight=draw(each), backward=draw(each),
        latency=draw(edge),
    )  # fmt: skip
    problem = Problem(
        rank_of_stage=placement, num_microbatches=draw(st.integers(1, 8)), costs=costs,
        saved=draw(st.lists(st.floats(0.1, 3.0), min_size=len(placement), max_size=len(placement))),
        splits=draw(st.booleans()), recomputed=draw(st.sampled_from([frozenset(), frozenset({0})])),
    )  # fmt: skip
    limits = [least * draw(st.sampled_from([1.0, 1.5, math.inf])) for least in problem.least_limits]
    return replace(problem, limits=limits)


def least_of_any_recompute(problem: Problem) -> float:
    """The least time over all words and over all choices of the microbatches that its recomputed stages keep."""
    items = [Kept(stage, at) for stage in sorted(problem.recomputed) for at in range(problem.num_microbatches)]
    choices = itertools.chain.from_iterable(itertools.combinations(items, size) for size in range(len(items) + 1))
    found = [math.inf]
    for kept in choices:
        with suppress(ValueError):  # one microbatch with all that it keeps exceeds the limit
            found.append(least_seconds(replace(problem, kept=kept)))
    return min(found)


def least_seconds(problem: Problem) -> float:
    """The least time over all words of all ranks, timed by a loop of its own."""
    orders = [list(all_words(problem, rank)) for rank in range(problem.num_ranks)]
    return min(map(timer(problem), itertools.product(*orders)))


def all_words(problem: Problem, rank: int) -> Iterator[tuple[int, ...]]:
    """All orders of a rank that keep its limit and the order of each microbatch at each stage."""
    own, m = problem.queues_of_rank[rank], problem.num_microbatches
    limit = problem.limit_of(rank) + 1e-9

    def extend(word: tuple[int, ...], counts: dict[int, int], held: float) -> Iterator[tuple[int, ...]]:
        if len(word) == len(own) * m:
            yield word
        for place, queue in enumerate(own):
            stage = problem.queues[queue][1]
            earlier = own[place - 1] if place and problem.queues[own[place - 1]][1] == stage else None
            if counts[queue] == m or (earlier is not None and counts[queue] >= counts[earlier]):
                continue
            takes = _takes(problem, queue, counts[queue])
            if held + takes <= limit:
                after = counts | {queue: counts[queue] + 1}
                yield from extend((*word, queue), after, held + takes - problem.gives[queue])

    yield from extend((), dict.fromkeys(own, 0), 0.0)


def _takes(problem: Problem, queue: int, microbatch: int) -> float:
    kind, stage = problem.queues[queue]
    is_recomputed = stage in problem.recomputed and (stage, microbatch) not in problem.kept
    if kind is Kind.FORWARD:
        return problem.input_sizes[stage] if is_recomputed else problem.saved_sizes[stage]
    return problem.saved_sizes[stage] - problem.input_sizes[stage] if kind is Kind.RECOMPUTE and is_recomputed else 0.0


def timer(problem: Problem) -> Callable[[tuple[tuple[int, ...], ...]], float]:
    """Words -> the end of the last computation; infinity in a deadlock."""
    numbered, sources, took = cache(_numbered), problem.sources, _seconds_taken(problem)
    return lambda words: _end_of(list(map(numbered, words)), sources, took)


def _numbered(word: tuple[int, ...]) -> list[tuple[int, int]]:
    """Each queue of a word with the number of its microbatch: how often the queue stands before."""
    counts: Counter[int] = Counter()
    found = []
    for queue in word:
        found.append((queue, counts[queue]))
        counts[queue] += 1
    return found


def _seconds_taken(problem: Problem) -> list[list[float]]:
    """By queue and microbatch, what a computation takes."""
    seconds, numbers = problem.costs.seconds(problem.num_stages), range(problem.num_microbatches)

    def took(kind: Kind, stage: int, number: int) -> float:
        return 0.0 if kind is Kind.RECOMPUTE and (stage, number) in problem.kept else seconds[kind][stage]

    return [[took(kind, stage, number) for number in numbers] for kind, stage in problem.queues]


def _end_of(
    words: Sequence[list[tuple[int, int]]], sources: Sequence[tuple[int, float]], took: list[list[float]]
) -> float:
    """By one step after another."""
    ends: dict[tuple[int, int], float] = {}
    free, places = [0.0] * len(words), [0] * len(words)
    moved = True
    while moved:
        moved = False
        for rank, word in enumerate(words):
            place, end = places[rank], free[rank]
            for queue, number in word[place:]:
                source, delay = sources[queue]
                if source >= 0:
                    if (source, number) not in ends:
                        break
                    end = max(end, ends[source, number] + delay)
                end += took[queue][number]
                ends[queue, number] = end
                place += 1
            moved = moved or place > places[rank]
            places[rank], free[rank] = place, end
    done = all(place == len(word) for place, word in zip(places, words, strict=True))
    return max(free) if done else float("inf")


# --- moves


def moved_anywhere(row: Row, problem: Problem, way: Way, chance: random.Random) -> Row:
    """The row with up to three of its microbatches moved, from anywhere to anywhere before they are needed."""
    uses, forwards, seen = {}, {}, Counter()
    for at, each in enumerate(row):
        item = each.stage, each.microbatch
        if each.kind is Kind.FORWARD:
            seen[each.stage] += 1
            forwards[item] = at
        elif each.kind in USES_SAVED:
            uses.setdefault(item, at)
    second = {stage: sorted(at for item, at in forwards.items() if item[0] == stage)[1] for stage in seen}
    moves: list[list[Instruction]] = [[] for _ in range(len(row) + 1)]
    for item in chance.sample(sorted(uses), min(len(uses), chance.randint(1, 3))):
        first = max(forwards[item], second[item[0]]) + 1
        if first <= uses[item]:
            out = chance.choice((first, chance.randint(first, uses[item])))
            moves[out].insert(0, Instruction(way.out, *item))
            moves[chance.randint(out, uses[item])].append(Instruction(way.back, *item))
    return tuple(each for at, own in enumerate(row) for each in (*moves[at], own))


def two_ranks(seed: int, sizes: Sequence[int]) -> Problem:
    """A stage on each rank, with integer costs, slow links and limits of two to three microbatches."""
    chance = random.Random(seed)
    splits, seconds = chance.random() < 0.4, chance.choice((0.0, 0.5, 1.0, 2.0, 4.0))
    forward, backward, first, second = ([float(chance.randint(*ends)) for _ in range(2)]
                                        for ends in ((1, 3), (1, 4), (1, 3), (0, 2)))  # fmt: skip
    costs = Costs(
        forward=forward, backward=backward, backward_input=first, backward_weight=second,
        latency=float(chance.choice((0, 1, 2, 4, 8))), swap_out=seconds, evict=seconds,
    )  # fmt: skip
    return Problem(
        rank_of_stage=(0, 1), num_microbatches=sizes[splits], costs=costs, splits=splits,
        limits=[chance.choice((2.0, 2.5, 3.0)) for _ in range(2)], deferred=chance.choice((1.0, 0.5)),
    )  # fmt: skip


def with_ends(problem: Problem, rows: Sequence[Row], made: Sequence[Row], rank: int) -> list[Row]:
    """The moves of one rank, with their other ends on the other."""
    pairs = Pairs(problem.rank_of_stage)
    ends = tuple(pairs.counterpart(each) for each in made[rank] if each.kind in MOVES)
    return [made[rank] if at == rank else ends + row for at, row in enumerate(rows)]
