"""Moves of saved activations away from a rank and back, and relaxed limits for the search.

Saved activations leave for the host (SWAP_OUT, SWAP_IN) or for the other rank of a pair (EVICT, LOAD). The search for
words knows nothing of moves. It makes words under relaxed limits, a pass puts moves into them (`moved_rows.py`), and
the fastest of these are changed at random (`search_with_moves.py`).

- For the host, a microbatch counts less between its forward and its backward, when it may be away, and in full from its
  I to its W, when it may not.
- For a pair, the limit of the early rank grows by some microbatches, and that of the late rank shrinks by one more,
  which is the one on its way.
"""

import math
import operator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.lane_order import Pairs
from megatron.pipeline.program.program import Program
from megatron.pipeline.synthesis.problem import Problem

# The part of the time from its forward to its backward for which a microbatch is away, and how many are on their way.
_AWAY = (1.0, 0), (0.7, 1), (0.4, 0), (1.0, 1), (0.7, 0), (0.4, 1)
_PARTS = 0.34, 0.67, 1.0  # of the room that the other rank of a pair has


@dataclass(frozen=True)
class Way:
    """The place to which moves lead, with the words of the moves away and back."""

    name: str
    out: Kind
    back: Kind

    def seconds(self, problem: Problem) -> tuple[list[float], list[float]]:
        """For each stage, the seconds of a move away and of one back."""
        seconds = problem.costs.seconds(problem.num_stages)
        return seconds[self.out], seconds[self.back]


HOST, PAIR = Way("host", Kind.SWAP_OUT, Kind.SWAP_IN), Way("pair", Kind.EVICT, Kind.LOAD)
CHOICES = {"none": (), "host": (HOST,), "pair": (PAIR,), "best": (HOST, PAIR)}
"""The ways that a search may take, by the name of the choice."""


@dataclass(frozen=True, kw_only=True)
class Lighter(Problem):
    """A problem in which a microbatch takes less memory between forward and backward, as if a part of it were away.

    Attributes:
        away: the part that is away, from 0 to 1.
    """

    away: float = 0.0

    @cached_property
    def takes_at(self) -> tuple[tuple[float, ...], ...]:
        takes = list(super().takes_at)
        for stage in range(self.num_stages):
            forward = self.number_of[Kind.FORWARD, stage]
            first = self.number_of[self.begins_backward if stage not in self.recomputed else Kind.RECOMPUTE, stage]
            less = [self.away * each * may_move(self, stage, at) for at, each in enumerate(takes[forward])]
            takes[forward] = tuple(map(operator.sub, takes[forward], less))
            takes[first] = tuple(map(operator.add, takes[first], less))
        return tuple(takes)


def ways_of(name: str, problem: Problem) -> tuple[Way, ...]:
    """Return the ways of a choice (`CHOICES`); `best` leaves pairs out where ranks have none.

    Raises ValueError for an unknown choice, and for pairs where ranks have none.
    """
    if name not in CHOICES:
        raise ValueError(f"moves are {name!r}; choose {', '.join(CHOICES)}")
    ways = CHOICES[name]
    if PAIR not in ways:
        return ways
    try:
        ranks = pair_ranks(problem)
        if any(rank != other for rank, other in enumerate(ranks)):
            return ways
        refusal = ValueError("the pair stages of each rank lie on the rank itself, so nothing can move; choose host")
    except ValueError as error:
        refusal = error
    if name == "pair":
        raise refusal
    return (HOST,)


def pair_ranks(problem: Problem) -> list[int]:
    """Return the other rank of each rank's pair; the rank itself where it has none.

    Raises ValueError where the pair stages of a rank lie on several ranks.
    """
    pairs = Pairs(problem.rank_of_stage)
    return [pairs.of_rank(rank) for rank in range(problem.num_ranks)]


def relaxed(problem: Problem, way: Way) -> list[Problem]:
    """Return problems with other limits. Moves may bring solutions of these within the limits of `problem`."""
    limits = list(map(problem.limit_of, range(problem.num_ranks)))
    sizes = [max(max(problem.takes_at[each]) for each in own) for own in problem.queues_of_rank]
    if all(map(math.isinf, limits)):
        return []
    made: list[Problem] = []
    if way is HOST:
        given = {each.name: getattr(problem, each.name) for each in fields(problem) if each.init}
        for part, on_its_way in _AWAY:
            room = [limit - on_its_way * size for limit, size in zip(limits, sizes, strict=True)]
            with suppress(ValueError):  # no room for one microbatch then
                made.append(Lighter(**given | {"away": part, "limits": room}))
        return made
    others = pair_ranks(problem)
    for part, falls in product(_PARTS, (False, True)):
        room = list(limits)
        for early, late in enumerate(others):
            if early < late and sizes[early] and math.isfinite(limits[late]):
                spare = limits[late] - problem.least_limits[late] - sizes[early]  # one microbatch is on its way
                far = (late - early) / (problem.num_ranks - 1) if falls else 1.0
                if (count := round(part * far * (spare // sizes[early]))) > 0:
                    room[early] += count * sizes[early]
                    room[late] -= (count + 1) * sizes[early]
        if room not in (limits, *(each.limits for each in made)):
            made.append(replace(problem, limits=room))
    return made


def may_move(problem: Problem, stage: int, microbatch: int) -> bool:
    """Whether a microbatch may leave its stage. If a stage keeps some microbatches, those that it recomputes stay."""
    number = problem.num_recomputed.get(stage, 0)
    return number in (0, problem.num_microbatches) or problem.keeps(stage, microbatch)


def moved_size(problem: Problem, stage: int) -> float:
    """The memory that moves with a microbatch at a stage, in the unit of `saved`."""
    return max(problem.takes_at[problem.number_of[Kind.FORWARD, stage]])


def moved_microbatches(program: Program) -> dict[int, tuple[int, ...]]:
    """Stage -> the microbatches whose activations leave it; stages without any are left out."""
    found: dict[int, list[int]] = {}
    for row in program.rows:
        for each in row:
            if each.kind in (HOST.out, PAIR.out):
                found.setdefault(each.stage, []).append(each.microbatch)
    return {stage: tuple(sorted(found[stage])) for stage in sorted(found)}
