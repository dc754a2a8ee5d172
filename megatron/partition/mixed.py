"""Mixed-pipe (section 4.1): coarsening, assignment, refinement and stage merging, for L = P, 2P, 3P and so on.

Every coarsening is combined with every order of assignment (step 2, section 4.1.2: stages to devices by time and
memory). All results are refined as coarse units, and the best results also as fine units. The best few are disturbed
and refined again as long as this improves them, with a seeded generator and a budget that counts priced partitions, not
seconds. At the end stages of a device are merged if the objective does not grow.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx

from megatron.partition.coarsen import COARSENINGS, without_trifles
from megatron.partition.graph import Graph, Partition, evaluate, in_order, stage_edges, stage_graph
from megatron.partition.refine import PriceBudget, kick, refine
from megatron.partition.units import PICOSECONDS, PartitionState, Placed, Score, Units

ORDERS = {
    "largest first": lambda time, memory: -time,
    "smallest first": lambda time, memory: time,
    "most memory first": lambda time, memory: -memory,
}
"""The orders in which stages are assigned to devices. The published program uses smallest first; any may win."""


def assign(units: Units, stage_of: Sequence[int], order: str, most_stages: int) -> list[int]:
    """The device of each stage: stages in `order` go to the least busy device with enough memory and a free place.

    If no device has enough memory, the stage goes to the device with most free memory, and refinement has to repair the
    excess.

    Args:
        order: a name in ORDERS.
        most_stages: the most stages on a device.
    """
    num_stages = 1 + max(stage_of)
    bundles = _bundles(units, stage_of, num_stages)
    time, memory = [0] * num_stages, [0] * num_stages
    for unit, stage in enumerate(stage_of):
        time[stage] += units.time[unit]
        memory[stage] += units.memory[unit]
    for size, users in units.shared:  # counted at each stage, which is too much if stages share a device
        for stage in {stage_of[unit] for unit in users}:
            memory[stage] += size
    sums = [(sum(time[s] for s in bundle), sum(memory[s] for s in bundle), bundle) for bundle in bundles]
    sums.sort(key=lambda each: (ORDERS[order](each[0], each[1]), each[2]))
    every = range(units.num_devices)
    busy, used, held = [0] * units.num_devices, [0] * units.num_devices, [0] * units.num_devices
    device_of = [0] * num_stages
    for more_time, more_memory, bundle in sums:
        places = [d for d in every if held[d] + len(bundle) <= most_stages] or every
        fitting = [d for d in places if used[d] + more_memory <= units.limits[d]]
        if fitting:
            device = min(fitting, key=lambda d: ((busy[d] + more_time) / units.speeds[d], d))
        else:
            device = max(places, key=lambda d: (units.limits[d] - used[d], -d))
        busy[device] += more_time
        used[device] += more_memory
        held[device] += len(bundle)
        for stage in bundle:
            device_of[stage] = device
    return device_of


def _bundles(units: Units, stage_of: Sequence[int], num_stages: int) -> list[tuple[int, ...]]:
    """The sets of stages that must be on one device, because they contain units that must stay on one device."""
    joined = networkx.Graph()
    joined.add_nodes_from(range(num_stages))
    for group in units.on_one_device:
        stages = [stage_of[unit] for unit in group]
        joined.add_edges_from(pairwise(stages))
    return [tuple(sorted(each)) for each in networkx.connected_components(joined)]


def stages_of_devices(units: Units, device_of_unit: Sequence[int]) -> tuple[list[int], list[int]]:
    """Divide units with given devices into few stages. Returns (stage of each unit, device of each stage).

    The next stage is on the device that can compute most units without waiting for another device, and contains all
    these units.
    """
    waits = [len(each) for each in units.producers]
    ready = {unit for unit, count in enumerate(waits) if not count}
    stage_of, device_of = [0] * len(units), []
    while ready:
        devices = range(units.num_devices)
        batches = {device: _reachable(units, device_of_unit, waits, ready, device) for device in devices}
        device = max(batches, key=lambda each: (len(batches[each]), sum(units.time[u] for u in batches[each]), -each))
        for unit in batches[device]:
            stage_of[unit] = len(device_of)
            ready.discard(unit)
            for each in units.consumers[unit]:
                waits[each] -= 1
                if not waits[each]:
                    ready.add(each)
        ready -= set(batches[device])
        device_of.append(device)
    return stage_of, device_of


def _reachable(units, device_of_unit, waits, ready, device) -> list[int]:
    found, left = [unit for unit in sorted(ready) if device_of_unit[unit] == device], {}
    for unit in found:  # grows while it is read
        for each in units.consumers[unit]:
            left[each] = left.get(each, waits[each]) - 1
            if not left[each] and device_of_unit[each] == device:
                found.append(each)
    return found


def merge_stages(graph: Graph, partition: Partition) -> Partition:
    """Merge stages of a device as long as no circle arises and the objective does not grow; least depth first."""
    value = evaluate(graph, partition)
    while True:
        choices = []
        for one, other in _mergeable(graph, partition):
            merged = _merged(graph, partition, one, other)
            try:
                price = evaluate(graph, merged)
            except ValueError:  # too much memory, for example of a last stage without recompute
                continue
            if price.objective_ms <= value.objective_ms * (1 + 1e-12):
                choices.append((price.depth, price.crossing_bytes, one, other, merged, price))
        if not choices:
            return partition
        *_, partition, value = min(choices, key=lambda each: each[:4])


def _mergeable(graph: Graph, partition: Partition) -> list[tuple[int, int]]:
    quotient = stage_graph(graph, partition)
    reached = {stage: networkx.descendants(quotient, stage) for stage in quotient}
    found = []
    for other in range(partition.num_stages):
        for one in range(other):
            if partition.device_of_stage[one] == partition.device_of_stage[other]:
                first, last = (other, one) if one in reached[other] else (one, other)
                if not any(last in reached[between] for between in quotient[first] if between != last):
                    found.append((one, other))
    return found


def _merged(graph: Graph, partition: Partition, one: int, other: int) -> Partition:
    joined = {node: one if stage == other else stage for node, stage in partition.stage_of_node.items()}
    edges = {(one if a == other else a, one if b == other else b) for a, b in stage_edges(graph, partition)}
    order = networkx.DiGraph()
    order.add_nodes_from(stage for stage in range(partition.num_stages) if stage != other)
    order.add_edges_from((a, b) for a, b in edges if a != b)
    number = in_order(order)
    return Partition(
        {node: number[stage] for node, stage in joined.items()},
        tuple(partition.device_of_stage[stage] for stage in number),
    )


NEAR_ENOUGH = 1 + 2e-5
"""The factor on the lower bound within which a result ends the search."""

PRICES_PER_START = 6_000
PRICES_OF_KICKS = 150_000
PATIENCE = 15_000
"""The number of priced partitions without an improvement after which a search ends."""

REFINED = 6
KEPT = 3
"""The number of starts that are refined as fine units, and the number of starts that are disturbed."""


@dataclass(frozen=True)
class Found:
    """A partition that a search has found. `start`: the coarsening and order of assignment from which it started."""

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
    common_budget: PriceBudget | None = None,
    before: Found | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Found | None:
    """The best partition found with `num_stages` stages, at most `most_stages` on a device; None if none fits.

    Args:
        effort: factor on the length of the search after refinement.
        common_budget: the budget of all searches together.
        before: the only partition to start from; None: start from all coarsenings.
    """
    enough = max(units.graph.bound_ms * PICOSECONDS, units.bound) * NEAR_ENOUGH
    starts = _starts(units, num_stages, most_stages, enough, common_budget, progress) if before is None else [before]
    found: dict[Score, Found] = {}
    for number, start in enumerate(starts):
        progress(f"L = {num_stages}, start {number + 1} of {len(starts)}")
        state = PartitionState(units, start.placed.stage_of, start.placed.device_of)
        score = refine(state, PriceBudget(PRICES_PER_START, of=common_budget), enough=enough)
        found.setdefault(score, Found(score, state.placed(), start.start))  # of equal scores the first is kept
        if not score.excess and score.worst <= enough:
            return found[score]
    best = []
    for each in sorted(found.values(), key=lambda each: each.score)[:KEPT]:
        progress(f"L = {num_stages}, from {each.score.worst / PICOSECONDS:.3f} ms")
        budget = PriceBudget(int(effort * PRICES_OF_KICKS / KEPT), of=common_budget)
        best.append(_kicked(units, each, random.Random(seed), budget, effort * PATIENCE, enough))
    fitting = [each for each in best if not each.score.excess]
    return min(fitting, key=lambda each: each.score, default=None)


def _starts(
    units: Units, num_stages: int, most_stages: int, enough: float, common_budget: PriceBudget | None,
    progress: Callable[[str], None],
) -> list[Found]:  # fmt: skip
    """The best refined partitions of coarse units, expressed in fine units."""
    seen: set[Placed] = set()
    found: list[Found] = []
    coarse_of = without_trifles(units)
    coarse = units.merged(coarse_of)
    for name, coarsening in COARSENINGS.items():
        progress(f"L = {num_stages}, {name}")
        stages = [min(stage, num_stages - 1) for stage in coarsening(coarse, num_stages)]  # refinement balances this
        for order in ORDERS:
            placed = Placed(tuple(stages), tuple(assign(coarse, stages, order, most_stages)))
            if placed in seen or _too_many(placed, most_stages):
                continue
            seen.add(placed)
            state = PartitionState(coarse, placed.stage_of, placed.device_of)
            score = refine(state, PriceBudget(PRICES_PER_START, of=common_budget), enough=enough)
            stage_of = tuple(state.stage_of[each] for each in coarse_of)
            found.append(Found(score, Placed(stage_of, tuple(state.device_of)), f"{name}, {order}"))
    return sorted(found, key=lambda each: each.score)[:REFINED]


def _kicked(
    units: Units, start: Found, rng: random.Random, budget: PriceBudget, patience: float, enough: float
) -> Found:
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


def _too_many(placed: Placed, most_stages: int) -> bool:
    return any(placed.device_of.count(device) > most_stages for device in set(placed.device_of))
