"""Step 2 of Mixed-pipe (section 4.1.2): stages to devices by time and memory, and then as few stages as that allows."""

from collections.abc import Sequence
from itertools import pairwise

import networkx

from megatron.partition.graph import Graph
from megatron.partition.objective import Partition, evaluate, stage_edges
from megatron.partition.units import Units

ORDERS = {
    "largest first": lambda time, memory: -time,
    "smallest first": lambda time, memory: time,
    "most memory first": lambda time, memory: -memory,
}
"""The orders in which stages choose a device. Smallest first is what the published program does; either may win."""


def assign(units: Units, stage_of: Sequence[int], order: str, most_stages: int) -> list[int]:
    """The device of each stage: stages in `order` go to the least busy device that has memory and a place left.

    Where no device has memory left, the one with most of it takes the stage, and refinement has to mend that.

    Args:
        order: a name in ORDERS.
        most_stages: on a device.
    """
    num_stages = 1 + max(stage_of)
    bundles = _bundles(units, stage_of, num_stages)
    time, memory = [0] * num_stages, [0] * num_stages
    for unit, stage in enumerate(stage_of):
        time[stage] += units.time[unit]
        memory[stage] += units.memory[unit]
    for size, users in units.shared:  # counted at each stage: more than it is where stages share a device
        for stage in {stage_of[unit] for unit in users}:
            memory[stage] += size
    sums = [(sum(time[s] for s in bundle), sum(memory[s] for s in bundle), bundle) for bundle in bundles]
    sums.sort(key=lambda each: (ORDERS[order](each[0], each[1]), each[2]))
    busy, used, held = [0] * units.num_devices, [0] * units.num_devices, [0] * units.num_devices
    device_of = [0] * num_stages
    for more_time, more_memory, bundle in sums:
        places = [d for d in range(units.num_devices) if held[d] + len(bundle) <= most_stages] or list(
            range(units.num_devices)
        )
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
    """Stages that must be on one device, because of what must stay there together."""
    joined = networkx.Graph()
    joined.add_nodes_from(range(num_stages))
    for group in units.on_one_device:
        stages = [stage_of[unit] for unit in group]
        joined.add_edges_from(pairwise(stages))
    return [tuple(sorted(each)) for each in networkx.connected_components(joined)]


def stages_of_devices(units: Units, device_of_unit: Sequence[int]) -> tuple[list[int], list[int]]:
    """Few stages for given devices: (stage of each unit, device of each stage).

    The device that can compute most units at once goes next, with all that then become ready on it.
    """
    waits = [len(each) for each in units.producers]
    ready = {unit for unit, count in enumerate(waits) if not count}
    stage_of, device_of = [0] * len(units), []
    while ready:
        batches = {
            device: _reachable(units, device_of_unit, waits, ready, device) for device in range(units.num_devices)
        }
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
    """Merge stages of a device as long as no circle arises and the objective is not worse; least depth first."""
    value = evaluate(graph, partition)
    while True:
        choices = []
        for one, other in _mergeable(graph, partition):
            merged = _merged(graph, partition, one, other)
            try:
                price = evaluate(graph, merged)
            except ValueError:  # the last stage's memory, without recompute
                continue
            if price.objective_ms <= value.objective_ms * (1 + 1e-12):
                choices.append((price.depth, price.crossing_bytes, one, other, merged, price))
        if not choices:
            return partition
        *_, partition, value = min(choices, key=lambda each: each[:4])


def _mergeable(graph: Graph, partition: Partition) -> list[tuple[int, int]]:
    quotient = networkx.DiGraph(stage_edges(graph, partition))
    quotient.add_nodes_from(range(partition.num_stages))
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
    number = {stage: index for index, stage in enumerate(networkx.lexicographical_topological_sort(order))}
    return Partition(
        {node: number[stage] for node, stage in joined.items()},
        tuple(partition.device_of_stage[stage] for stage in number),
    )
