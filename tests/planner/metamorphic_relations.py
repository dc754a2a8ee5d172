"""Of which cases relations are held, and how violations are found.

METAMORPHIC_SEED in the environment draws others: relations have to hold for any.
"""

import functools
import os
from collections.abc import Callable, Iterator, Sequence

import pytest

from megatron.planner.memory.memory import RankMemory
from tests.planner.metamorphic_cases import SEED, Case, cases
from tests.planner.metamorphic_kinds import kinds

_SEED = int(os.environ.get("METAMORPHIC_SEED", SEED))
ROUNDING = 1e-9
QUARTERS = 4
_quarter = 0

Relation = Callable[[Case], Iterator[tuple[float, float]]]
"""Pairs of numbers, the first of which is not above the second; none where it says nothing of the case."""


@functools.cache
def all_cases() -> list[Case]:
    """Drawn where a test asks: that takes seconds, and every process that shares the tests imports this module."""
    return [*cases(_SEED), *kinds(112, _SEED)]


@functools.cache
def roomy() -> list[Case]:
    """Where memory is short, time may jump: these are for relations that do not ask how much there is."""
    return [case.roomy for case in all_cases()]


@pytest.fixture(autouse=True, params=range(QUARTERS), ids="quarter {}".format)
def quarter(request: pytest.FixtureRequest) -> None:
    """Relations are held of every fourth case, so that the usual selection can take one quarter of them."""
    global _quarter
    _quarter = request.param


def violations(relation: Relation, of: Sequence[Case] | None = None, *, fewest: int = 20) -> list[str]:
    """Cases of the quarter of which it is not true, with how far off they are.

    Fails where it says something of fewer, over all quarters.
    """
    found, num_checks = [], 0
    for case in (all_cases() if of is None else of)[_quarter::QUARTERS]:
        for low, high in relation(case):
            num_checks += 1
            if low > high * (1 + ROUNDING):
                found.append(f"{case}: {low:.9g} > {high:.9g}, by {100 * (low / high - 1):.3g}%")
    assert num_checks >= fewest / QUARTERS
    return found


def running(*found: Case | None) -> Iterator[tuple[Case, ...]]:
    """These, where all of them can run."""
    if all(case is not None and case.can_run() for case in found):
        yield found


def saved(rank: RankMemory) -> float:
    """Bytes of microbatches, also of those between the halves of a backward."""
    return rank.parts.activations + rank.parts.deferred
