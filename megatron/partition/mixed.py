"""Mixed-pipe (section 4.1): coarsening, assignment, refinement and stage merging, for L = P, 2P, 3P and so on.

Each coarsening meets each order of assignment. All are refined; the best few are disturbed and refined again, with a
seeded generator and a budget that counts prices and not seconds.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from megatron.partition.balance import ORDERS, assign
from megatron.partition.coarsen import COARSENINGS, without_trifles
from megatron.partition.refine import Budget, kick, refine
from megatron.partition.state import PartitionState, Placed, Score
from megatron.partition.units import Units

NEAR_ENOUGH = 1 + 2e-5
"""Times the bound: no more is searched."""

PRICES_PER_START = 6_000
PRICES_OF_KICKS = 150_000
KEPT = 3


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
    progress: Callable[[str], None] = lambda text: None,
) -> Found | None:
    """The best found with `num_stages` stages, of which `most_stages` may lie on a device; None where none fits.

    Args:
        effort: of the search after refinement, in proportion.
    """
    enough = units.graph.bound_ms * 1e9 * NEAR_ENOUGH
    seen: set[Placed] = set()
    found: list[Found] = []
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
            refine(state, Budget(PRICES_PER_START), enough=enough)
            fine = PartitionState(units, [state.stage_of[each] for each in coarse_of], state.device_of)
            score = refine(fine, Budget(PRICES_PER_START), enough=enough)
            found.append(Found(score, fine.placed(), f"{name}, {order}"))
            if not score.excess and score.worst <= enough:
                return found[-1]
    found.sort(key=lambda each: each.score)
    best = [
        _kicked(units, each, random.Random(seed), Budget(int(effort * PRICES_OF_KICKS / KEPT)), enough)
        for each in found[:KEPT]
    ]
    fitting = [each for each in best if not each.score.excess]
    return min(fitting, key=lambda each: each.score, default=None)


def _kicked(units: Units, start: Found, rng: random.Random, budget: Budget, enough: float) -> Found:
    best, state = start, PartitionState(units, start.placed.stage_of, start.placed.device_of)
    while not budget.spent and (best.score.excess or best.score.worst > enough):
        kick(state, rng)
        budget.left -= 20
        score = refine(state, budget, enough=enough)
        if score < best.score:
            best = Found(score, state.placed(), start.start)
        elif score > best.score:
            state.restore(best.placed)
    return best


def _trimmed(stages: list[int], num_stages: int) -> list[int]:
    """Where coarsening left more stages, the last ones in the row are one; refinement evens that out."""
    return [min(stage, num_stages - 1) for stage in stages]


def _too_many(placed: Placed, most_stages: int) -> bool:
    return any(placed.device_of.count(device) > most_stages for device in set(placed.device_of))
