"""Mixed-pipe (section 4.1): coarsening, assignment, refinement and stage merging, for L = P, 2P, 3P and so on.

Each coarsening meets each order of assignment. All are refined as coarse units, the best of them as fine ones; the best
few are disturbed and refined again for as long as that gains something, with a seeded generator and a budget that
counts prices and not seconds.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from megatron.partition.balance import ORDERS, assign
from megatron.partition.coarsen import COARSENINGS, without_trifles
from megatron.partition.refine import Budget, kick, refine
from megatron.partition.state import PartitionState, Placed, Score
from megatron.partition.units import PICOSECONDS, Units

NEAR_ENOUGH = 1 + 2e-5
"""Times the bound: no more is searched."""

PRICES_PER_START = 6_000
PRICES_OF_KICKS = 150_000
PATIENCE = 15_000
"""Prices after which a search ends that has not gained anything for them."""

REFINED = 6
KEPT = 3
"""Starts that are refined as fine units, and those of them that are disturbed."""


@dataclass(frozen=True)
class Found:
    """`start`: the coarsening and the order of assignment that it came from."""

    score: Score
    placed: Placed
    start: str


def mix(
    units: Units,
    num_stages: int,
    most_stages: int,
    *,
    seed: int = 0,
    effort: float = 1.0,
    purse: Budget | None = None,
    before: Placed | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Found | None:
    """The best found with `num_stages` stages, of which `most_stages` may lie on a device; None where none fits.

    Args:
        effort: of the search after refinement, in proportion.
        purse: what all searches may spend.
        before: where to start from, and from nowhere else.
    """
    enough = max(units.graph.bound_ms * PICOSECONDS, units.bound) * NEAR_ENOUGH
    starts = (
        _starts(units, num_stages, most_stages, enough, purse, progress) if before is None else [(before, "before")]
    )
    found: dict[Score, Found] = {}
    for number, (placed, start) in enumerate(starts):
        progress(f"L = {num_stages}, start {number + 1} of {len(starts)}")
        state = PartitionState(units, placed.stage_of, placed.device_of)
        score = refine(state, Budget(PRICES_PER_START, of=purse), enough=enough)
        found.setdefault(score, Found(score, state.placed(), start))  # of those that are alike the first
        if not score.excess and score.worst <= enough:
            return found[score]
    best = []
    for each in sorted(found.values(), key=lambda each: each.score)[:KEPT]:
        progress(f"L = {num_stages}, from {each.score.worst / PICOSECONDS:.3f} ms")
        budget = Budget(int(effort * PRICES_OF_KICKS / KEPT), of=purse)
        best.append(_kicked(units, each, random.Random(seed), budget, effort * PATIENCE, enough))
    fitting = [each for each in best if not each.score.excess]
    return min(fitting, key=lambda each: each.score, default=None)


def _starts(
    units: Units,
    num_stages: int,
    most_stages: int,
    enough: float,
    purse: Budget | None,
    progress: Callable[[str], None],
) -> list[tuple[Placed, str]]:
    """The best stages of coarse units as those of fine ones, and where each comes from."""
    seen: set[Placed] = set()
    found: list[tuple[Score, Placed, str]] = []
    coarse_of = without_trifles(units)
    coarse = units.merged(coarse_of)
    for name, coarsening in COARSENINGS.items():
        progress(f"L = {num_stages}, {name}")
        stages = _trimmed(coarsening(coarse, num_stages), num_stages)
        for order in ORDERS:
            placed = Placed(tuple(stages), tuple(assign(coarse, stages, order, most_stages)))
            if placed in seen or _too_many(placed, most_stages):
                continue
            seen.add(placed)
            state = PartitionState(coarse, placed.stage_of, placed.device_of)
            score = refine(state, Budget(PRICES_PER_START, of=purse), enough=enough)
            stage_of = tuple(state.stage_of[each] for each in coarse_of)
            found.append((score, Placed(stage_of, tuple(state.device_of)), f"{name}, {order}"))
    return [(placed, start) for _, placed, start in sorted(found, key=lambda each: each[0])[:REFINED]]


def _kicked(units: Units, start: Found, rng: random.Random, budget: Budget, patience: float, enough: float) -> Found:
    best, state = start, PartitionState(units, start.placed.stage_of, start.placed.device_of)
    gained_at = budget.left
    while not budget.spent and (best.score.excess or best.score.worst > enough):
        if not best.score.excess and gained_at - budget.left > patience:
            break
        kick(state, rng)
        budget.left -= 20
        score = refine(state, budget, enough=enough)
        if score < best.score:
            if score.better_than(best.score._replace(uneven=0.0)):
                gained_at = budget.left
            best = Found(score, state.placed(), start.start)
        elif score > best.score:
            state.restore(best.placed)
    return best


def _trimmed(stages: list[int], num_stages: int) -> list[int]:
    """Where coarsening left more stages, the last ones in the row are one; refinement evens that out."""
    return [min(stage, num_stages - 1) for stage in stages]


def _too_many(placed: Placed, most_stages: int) -> bool:
    return any(placed.device_of.count(device) > most_stages for device in set(placed.device_of))
