"""The competition of partitioning methods: each returns its best partition, `evaluate` prices it, and one is chosen.

The chosen partition has the least objective. Among partitions within a factor of `ALIKE`, the least depth decides,
since depth is staleness, and then the bytes that cross between devices.

METIS (section 4, "Metis") divides the units into devices of equal work with little traffic between them; stages follow
from the devices. METIS knows neither the objective nor memory, so its result may not fit. `pip install .[metis]`
installs pymetis.
"""

import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from megatron.documents import GIB
from megatron.partition.exact import cut_sequentially, improve
from megatron.partition.graph import Graph, Partition, Valuation, evaluate, in_order, stage_edges, stage_graph
from megatron.partition.mixed import Found, merge_stages, mix, stages_of_devices
from megatron.partition.refine import PriceBudget, refine
from megatron.partition.units import PartitionState, Units, compiled, partition_of

# --- METIS ------------------------------------------------------------------------------------------------------------

LARGEST_WEIGHT = 10**6
"""The largest sum of weights. METIS adds up weights as integers of 32 bits."""


def _require_metis() -> None:
    if importlib.util.find_spec("pymetis") is None:
        raise ValueError("metis needs pymetis, which is not installed; pip install .[metis], or leave metis out")


def _cut_with_metis(units: Units, seed: int = 0) -> tuple[list[int], list[int]]:
    """The stage of each unit and the device of each stage. Raises ValueError if METIS is missing, or for unequal
    devices."""
    _require_metis()
    if units.unequal:
        raise ValueError("metis divides among equal devices only; leave metis out, or make the devices equal")
    import pymetis

    neighbours, weights, edges = adjacency(units)
    if units.num_devices == 1:
        return stages_of_devices(units, [0] * len(units))
    rows = pymetis.CSRAdjacency([*accumulate(map(len, neighbours), initial=0)], [*chain.from_iterable(neighbours)])
    options, bytes_of = pymetis.Options(seed=seed), [*chain.from_iterable(edges)]
    _, devices = pymetis.part_graph(units.num_devices, rows, vweights=weights, eweights=bytes_of, options=options)
    return stages_of_devices(units, devices)


def adjacency(units: Units) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """The undirected graph for METIS: neighbours of each unit, weights of units by time, and weights of the edges to
    those neighbours by bytes."""
    near: list[dict[int, int]] = [{} for _ in range(len(units))]
    for tensor in units.tensors:
        for unit in tensor.consumers:
            size = near[unit].get(tensor.source, 0) + tensor.num_bytes
            near[unit][tensor.source] = near[tensor.source][unit] = size
    most_time = max(1, *units.time)
    most_bytes = max([1, *(size for each in near for size in each.values())])
    weights = [1 + time * LARGEST_WEIGHT // (most_time * len(units)) for time in units.time]
    neighbours = [sorted(each) for each in near]
    edges = [[1 + near[unit][other] * 1000 // most_bytes for other in others] for unit, others in enumerate(neighbours)]
    return neighbours, weights, edges


# --- the competition --------------------------------------------------------------------------------------------------

METHODS = ("sequential", "mixed", "metis", "milp")
ALIKE = 1 + 1e-4
MOST_ROUNDS = 4
"""The most rounds of the search for a fixed point: nodes in a last stage are priced without recompute, which may move
them."""

MOST_SEQUENTIAL_UNITS = 2500
"""The most units for the sequential method, whose tables grow with the square of the number of units."""

MOST_EFFORT_UNITS = 600
"""The number of units beyond which the search after refinement is shortened in proportion."""

SHARE = 0.1
"""The search may take this fraction of the greatest time that it could save in the run."""


@dataclass(frozen=True)
class CompeteResult:
    """The partition that a method has found, with its price. `note`: its origin within the method, as text."""

    method: str
    partition: Partition
    value: Valuation
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Competition:
    """The results of all methods.

    Attributes:
        results: one for each successful method.
        failures: name of a method without a result -> the reason.
        choice: the chosen one of `results`.
    """

    results: tuple[CompeteResult, ...]
    failures: dict[str, str]
    choice: CompeteResult


def compete(
    graph: Graph,
    *,
    methods: Sequence[str] = ("sequential", "mixed"),
    max_stages_per_device: int = 3,
    milp_seconds: float | None = None,
    seed: int = 0,
    effort: float = 1.0,
    num_microbatches: float = math.inf,
    seconds: float | None = None,
    milliseconds_of: Callable[[CompeteResult], float] = lambda result: result.value.objective_ms,
    alike: float = ALIKE,
    progress: Callable[[str], None] = lambda text: None,
) -> Competition:
    """Cut a graph by several methods, and choose the best result.

    The method mixed does not search once the best result is as fast as the graph's bound. The result depends on the
    machine's speed only if `seconds` or milp are used. Raises ValueError, with the reason of each method, if no method
    has a result.

    Args:
        methods: names in `METHODS`.
        max_stages_per_device: mixed searches partitions of P, 2P, ... stages up to this multiple of P, the number of
            devices.
        milp_seconds: time limit of milp, which starts from the best result of the other methods.
        seed: seed of the random searches.
        effort: factor on the length of mixed's search after refinement.
        num_microbatches: number of microbatches of the run, which bounds mixed's search to a share (`SHARE`) of the
            time that it could save in the run.
        seconds: time limit of mixed in place of that bound. Results found by then count.
        milliseconds_of: result -> milliseconds of a microbatch, if more is known than the objective.
        alike: factor on the least time within which results count as equally fast.
        progress: called with a line on the search's progress.
    """
    _check(methods, max_stages_per_device, milp_seconds)
    ends_at = math.inf if seconds is None else time.monotonic() + seconds
    results: list[CompeteResult] = []
    failures: dict[str, str] = {}

    def enter(name: str, find: Callable[[Units], tuple[Partition, str] | None]) -> None:
        progress(name)
        start = time.perf_counter()
        try:
            found = _fixed_point(graph, find, max_stages_per_device)
        except ValueError as error:
            failures[name] = str(error)
            return
        results.append(CompeteResult(name, found[0], found[1], time.perf_counter() - start, found[2]))

    effort *= min(1.0, MOST_EFFORT_UNITS / len(graph.nodes))
    if "sequential" in methods:
        enter("sequential", _sequential)
    if "mixed" in methods:
        common_budget = None if seconds is None else PriceBudget(math.inf, ends_at=ends_at)
        for stages in range(1, max_stages_per_device + 1):
            name, least = f"mixed L={stages * graph.num_devices}", min(map(milliseconds_of, results), default=math.inf)
            if results and common_budget is None:
                saved = max(0.0, least - graph.bound_ms) / 1000 * num_microbatches
                common_budget = PriceBudget(SHARE * saved / _seconds_of_a_price(graph))
            if least <= graph.bound_ms * alike:
                failures[name] = f"not searched, since the best so far is within {alike - 1:.2%} of the bound"
            elif common_budget is not None and results and common_budget.spent:
                spent = "--seconds are over" if seconds is not None else "it would take longer than it can save"
                failures[name] = f"not searched, since {spent}"
            else:
                enter(name, _Mixed(stages, max_stages_per_device, seed, effort, common_budget, progress))
    if "metis" in methods:
        enter("metis", lambda units: _metis(units, seed))
    if "milp" in methods:
        if results:
            best = choose(results)
            enter("milp", lambda units: _milp(units, best.partition, milp_seconds))
        else:
            failures["milp"] = "it starts from another method's partition, and there is none"
    if not results:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        raise ValueError(f"nothing fits: {_scarcity(graph)} ({reasons})")
    return Competition(tuple(results), failures, choose(results))


def choose(results: Sequence[CompeteResult]) -> CompeteResult:
    least = min(result.value.objective_ms for result in results)
    near = [result for result in results if result.value.objective_ms <= least * ALIKE]
    return min(near, key=lambda each: (each.value.depth, each.value.crossing_bytes, each.value.objective_ms))


def _check(methods: Sequence[str], max_stages_per_device: int, milp_seconds: float | None) -> None:
    for method in methods:
        if method not in METHODS:
            raise ValueError(f"{method!r} is no method; choose from {', '.join(METHODS)}")
    if not methods:
        raise ValueError(f"no method is given; choose from {', '.join(METHODS)}")
    if max_stages_per_device < 1:
        raise ValueError(f"{max_stages_per_device} stages per device are too few; give 1 or more")
    if "metis" in methods:
        _require_metis()
    if "milp" in methods and milp_seconds is None:
        raise ValueError("milp needs a time limit; give seconds (--milp)")


def _fixed_point(
    graph: Graph, find: Callable[[Units], tuple[Partition, str] | None], most_stages: int
) -> tuple[Partition, Valuation, str]:
    """The best partition of several rounds, each of which prices the nodes of the previous round's last stages without
    recompute."""
    best, reason, plain, seen = None, "no partition that it tried fits", frozenset(), set()
    two_profiles = any(node.has_plain for node in graph.nodes)
    while plain not in seen and len(seen) < MOST_ROUNDS:
        seen.add(plain)
        found = find(compiled(graph, plain))
        if found is None:
            break
        partition, note = found
        if two_profiles:
            senders = {source for source, _ in stage_edges(graph, partition)}
            plain = frozenset(node for node, stage in partition.stage_of_node.items() if stage not in senders)
        try:
            partition = merge_stages(graph, partition)
            value = evaluate(graph, partition)
        except ValueError as error:
            reason = str(error)
            continue
        if partition.most_stages_on_a_device() > most_stages:
            reason = f"needs {partition.most_stages_on_a_device()} stages on a device, and {most_stages} are allowed"
        elif best is None or value.objective_ms < best[1].objective_ms:
            best = (partition, value, note)
    if best is None:
        raise ValueError(reason)
    return best


def _sequential(units: Units) -> tuple[Partition, str] | None:
    if len(units) > MOST_SEQUENTIAL_UNITS:
        raise ValueError(f"{len(units)} units are more than {MOST_SEQUENTIAL_UNITS}; coarsen the graph, or use mixed")
    best = None
    for name, order in _orders(units).items():
        ordered = units.reordered(order)
        found = cut_sequentially(ordered)
        if found is not None and (best is None or found.worst < best[0]):
            proof = "best of its order" if found.proven else "not proven"
            best = (found.worst, partition_of(ordered, found.stage_of_unit(), found.devices), f"{name}, {proof}")
    return None if best is None else best[1:]


def _orders(units: Units) -> dict[str, list[int]]:
    """Two orders of computation by name: the file's order, and depth first (the newest ready unit is next)."""
    waits = [len(each) for each in units.producers]
    ready, deep = [unit for unit in reversed(range(len(units))) if not waits[unit]], []
    while ready:
        unit = ready.pop()
        deep.append(unit)
        for each in reversed(units.consumers[unit]):
            waits[each] -= 1
            if not waits[each]:
                ready.append(each)
    given = list(range(len(units)))
    return {"order of the file": given} | ({"depth first": deep} if deep != given else {})


@dataclass
class _Mixed:
    """Searches for a mixed partition (mixed.py) of the units that it is called with.

    Later calls start from the partition that the call before found.
    """

    stages: int
    most_stages: int
    seed: int
    effort: float
    common_budget: PriceBudget | None
    progress: Callable[[str], None]
    found: Found | None = None

    def __call__(self, units: Units) -> tuple[Partition, str] | None:
        found = mix(
            units, self.stages * units.num_devices, self.most_stages, seed=self.seed, effort=self.effort,
            common_budget=self.common_budget, before=self.found, progress=self.progress,
        )  # fmt: skip
        if found is None:
            return None
        self.found = found
        return partition_of(units, found.placed.stage_of, found.placed.device_of), self.found.start


def _seconds_of_a_price(graph: Graph) -> float:
    """The approximate seconds of pricing one partition on a core: a formula, so that budgets are equal on all
    machines."""
    return 2e-5 + 2e-7 * len(graph.nodes)


def _metis(units: Units, seed: int) -> tuple[Partition, str]:
    stage_of, device_of = _cut_with_metis(units, seed)
    return partition_of(units, stage_of, device_of), "stages follow from devices"


def _milp(units: Units, partition: Partition, seconds: float) -> tuple[Partition, str] | None:
    number = in_order(stage_graph(units.graph, partition))
    stage_of = [number[partition.stage_of_node[nodes[0]]] for nodes in units.nodes]
    device_of = [partition.device_of_stage[stage] for stage in number]
    found = improve(units, PartitionState(units, stage_of, device_of).placed(), seconds)
    if found is None:
        raise ValueError(f"HiGHS found nothing in {seconds:g} s; give it more")
    state = PartitionState(units, found.stage_of, found.device_of)
    refine(state, PriceBudget(20_000))
    return partition_of(units, state.stage_of, state.device_of), "around the best of the others"


def _scarcity(graph: Graph) -> str:
    weight = graph.weight_bytes_per_parameter
    need = [node.saved_bytes(plain=False) + weight * node.params for node in graph.nodes if not node.input]
    limits = [graph.memory_limit(device) for device in range(graph.num_devices)]
    return (
        f"the nodes need {sum(need) / GIB:.2f} GiB and the largest {max(need) / GIB:.2f}, the devices have "
        f"{sum(limits) / GIB:.2f} together and {max(limits) / GIB:.2f} at most; add devices, memory or stages"
    )
