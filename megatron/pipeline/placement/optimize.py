"""A search for the mapping with the least total transfer time on a topology.

Problem: to choose the stages and replicas that share a node is to partition a graph into parts of given sizes, for
which no fast exact method is known. 4,096 GPUs have to be placed in seconds.

Solution: small jobs are solved exactly, by branch and bound over all distinct assignments. For larger jobs the search
starts from regular arrangements (blocks of replicas by stages, in standard and pair-adjacent order) and exchanges
units, alone and together with their pairs, as long as the cost falls. A few random exchanges, followed by descent,
leave local optima; the best result is kept. The named mappings are candidates too, so the result is never worse than a
named mapping. The seed of the random numbers is fixed: the same input gives the same mapping.

Cost. The unit is one stage of one replica with all its tensor ranks; unit i is stage i % p of replica i // p. Traffic
inside a location costs the same in every location, so the cost depends only on which units share a location. For each
byte that leaves a location, the cost counts the difference to a byte that stays. The cost is additive over pairs of
units and over the all-reduces of replicas, so the effect of an exchange is cheap to compute.

A location is a node, or the slots of one tensor parallel group. Tensor parallel ranks communicate in every layer, so a
group stays within a node wherever the node has t free slots. Slots left over on nodes whose number of GPUs t does not
divide form groups that span nodes, in slot order.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.pipeline.placement.cost import placement_cost
from megatron.pipeline.placement.mapping import Degrees, Mapping, pair_adjacent, pair_order, standard
from megatron.pipeline.placement.topology import Topology
from megatron.pipeline.placement.traffic import Traffic, point_to_point, ring_bytes
from megatron.pipeline.program.lane_order import pair_of

# --- groups of t slots, one for each tensor parallel group ------------------------------------------------------------


@dataclass(frozen=True)
class SlotGroup:
    """The slots of one tensor parallel group, in order, and the number of its location."""

    slots: tuple[int, ...]
    location: int


@dataclass(frozen=True)
class SlotGroups:
    """All slot groups of a topology. A location is a node, or a single group that spans nodes.

    `network_seconds_per_byte`: by location, the seconds for one GPU to send a byte to another location.
    `node_seconds_per_byte`: the seconds for one GPU to send a byte within its own location.
    """

    groups: tuple[SlotGroup, ...]
    network_seconds_per_byte: tuple[float, ...]
    node_seconds_per_byte: float

    @property
    def capacities(self) -> list[int]:
        """The number of slot groups by location."""
        counts = [0] * len(self.network_seconds_per_byte)
        for group in self.groups:
            counts[group.location] += 1
        return counts


def slot_groups_of(topology: Topology, tensor: int) -> SlotGroups:
    """The slot groups of `topology` for tensor parallel groups of `tensor` ranks.

    `tensor` must divide the number of slots.
    """
    assert topology.num_slots % tensor == 0
    groups, left_over, slot = [], [], 0
    for index, node in enumerate(topology.nodes):
        slots = tuple(range(slot, slot + node.gpus))
        slot += node.gpus
        num_whole = node.gpus // tensor
        groups += [SlotGroup(slots[k * tensor : (k + 1) * tensor], index) for k in range(num_whole)]
        left_over += slots[num_whole * tensor :]
    costs = [1 / (topology.network_share(index) * 1e9) for index in range(len(topology.nodes))]
    for first in range(0, len(left_over), tensor):
        slots = tuple(left_over[first : first + tensor])
        groups.append(SlotGroup(slots, len(costs)))
        costs.append(sum(costs[topology.node_of_slot[each]] for each in slots) / tensor)
    return SlotGroups(tuple(groups), tuple(costs), 1 / (topology.bandwidth.within_node * 1e9))


# --- the cost ---------------------------------------------------------------------------------------------------------


class Assignment:
    """An assignment of units to locations, `location_of[unit]`, with the cost of exchanging two units."""

    def __init__(self, degrees: Degrees, traffic: Traffic, groups: SlotGroups) -> None:
        self.num_stages, self.num_units = degrees.pipeline, degrees.pipeline * degrees.data
        stays = groups.node_seconds_per_byte
        self.extra = [leaves - stays for leaves in groups.network_seconds_per_byte]
        self.capacities = groups.capacities
        self.edges: list[list[tuple[int, float]]] = [[] for _ in range(self.num_units)]
        for edge in point_to_point(traffic):
            weight = edge.bytes_each_way * degrees.tensor
            for first in range(edge.first_stage, self.num_units, self.num_stages):
                second = first + edge.second_stage - edge.first_stage
                self.edges[first].append((second, weight))
                self.edges[second].append((first, weight))
        self.ring = [ring_bytes(num_bytes, degrees.data) * degrees.tensor for num_bytes in traffic.data]
        self.location_of: list[int] = []
        self.members: list[list[int]] = []

    def set(self, location_of: Sequence[int]) -> float:
        """Start from the given location of each unit, and return the cost in seconds.

        The cost is the time beyond that of the same traffic within locations.
        """
        self.location_of = list(location_of)
        self.members = [[] for _ in self.capacities]
        self.replicas = [Counter() for _ in range(self.num_stages)]  # by stage: number of replicas by location
        self.ring_extra = [0.0] * self.num_stages  # by stage: sum of `extra` over the locations of its replicas
        for unit, location in enumerate(self.location_of):
            self.members[location].append(unit)
            self._add(unit % self.num_stages, location, 1)
        cost = sum(
            self._ring_cost(stage, len(self.replicas[stage]), self.ring_extra[stage])
            for stage in range(self.num_stages)
        )
        for unit, location in enumerate(self.location_of):
            cost += (
                sum(self._edge_cost(weight, location, self.location_of[other]) for other, weight in self.edges[unit])
                / 2
            )
        return cost

    def change(self, first: int, second: int) -> float:
        """The change of the cost if two units were exchanged, in seconds."""
        a, b = self.location_of[first], self.location_of[second]
        change = 0.0
        for unit, here, there in ((first, a, b), (second, b, a)):
            for other, weight in self.edges[unit]:
                if other not in (first, second):
                    location = self.location_of[other]
                    change += self._edge_cost(weight, there, location) - self._edge_cost(weight, here, location)
        if first % self.num_stages != second % self.num_stages:
            change += self._ring_change(first % self.num_stages, a, b) + self._ring_change(
                second % self.num_stages, b, a
            )
        return change

    def exchange(self, first: int, second: int) -> None:
        """Swap two units of different locations."""
        a, b = self.location_of[first], self.location_of[second]
        for unit, here, there in ((first, a, b), (second, b, a)):
            self.location_of[unit] = there
            self.members[here].remove(unit)
            self.members[there].append(unit)
            self._add(unit % self.num_stages, here, -1)
            self._add(unit % self.num_stages, there, 1)

    def _edge_cost(self, weight: float, first: int, second: int) -> float:
        return weight * (self.extra[first] + self.extra[second]) if first != second else 0.0

    def _ring_cost(self, stage: int, num_locations: int, extra: float) -> float:
        return self.ring[stage] * extra if num_locations > 1 else 0.0

    def _ring_change(self, stage: int, here: int, there: int) -> float:
        """The change of the cost of a stage's all-reduce if one replica moves to another location, in seconds."""
        locations, extra = self.replicas[stage], self.ring_extra[stage]
        leaves, enters = locations[here] == 1, there not in locations
        after = extra - leaves * self.extra[here] + enters * self.extra[there]
        before = self._ring_cost(stage, len(locations), extra)
        return self._ring_cost(stage, len(locations) - leaves + enters, after) - before

    def _add(self, stage: int, location: int, number: int) -> None:
        locations = self.replicas[stage]
        if location not in locations:
            self.ring_extra[stage] += self.extra[location]
        locations[location] += number
        if not locations[location]:
            del locations[location]
            self.ring_extra[stage] -= self.extra[location]


_EXACT_ASSIGNMENTS = 20_000  # the greatest number of assignments that are all tried
_EXACT_UNITS = 200  # the greatest depth of recursion of the exact method: one call for each unit
_STARTS = 8  # number of best regular arrangements that are improved further
_KICKS = 40  # number of times that random exchanges start from the best assignment
_EXCHANGES = 300_000  # number of exchanges evaluated in the whole search


def optimized(degrees: Degrees, traffic: Traffic, topology: Topology) -> Mapping:
    """The mapping with the least `placement_cost(...).total_seconds` that the search finds.

    The result is `standard` or `pair-adjacent` if the search finds no better mapping.
    """
    groups = slot_groups_of(topology, degrees.tensor)
    assignment = Assignment(degrees, traffic, groups)
    if assignment.num_units <= _EXACT_UNITS and _num_assignments(assignment.capacities) <= _EXACT_ASSIGNMENTS:
        found = _exact(assignment)
    else:
        found = _searched(assignment, _arrangements(degrees, groups))
    candidates = [standard(degrees), pair_adjacent(degrees), _in_slot_groups(degrees, groups, found)]
    costs = [placement_cost(mapping, degrees, traffic, topology).total_seconds for mapping in candidates]
    best = min(costs)
    return next(each for each, cost in zip(candidates, costs, strict=True) if cost <= best * (1 + 1e-9))


def _num_assignments(capacities: list[int]) -> int:
    """The number of ways to distribute the units over the locations."""
    total, ways = 0, 1
    for capacity in capacities:
        total += capacity
        ways *= math.comb(total, capacity)
    return ways


def _exact(assignment: Assignment) -> list[int]:
    """The best of all assignments, by branch and bound.

    Units are placed in order, and a branch is cut when its cost reaches the best cost found.
    """
    num_units, free = assignment.num_units, list(assignment.capacities)
    can_bound = min(assignment.extra) >= 0
    locations: list[int] = []
    best, best_locations = math.inf, []

    def place_next(cost: float) -> None:
        nonlocal best, best_locations
        if can_bound and cost >= best:
            return
        unit = len(locations)
        if unit == num_units:
            cost = assignment.set(locations)
            if cost < best:
                best, best_locations = cost, list(locations)
            return
        for location, num_free in enumerate(free):
            if num_free:
                free[location] -= 1
                added = sum(
                    weight * (assignment.extra[location] + assignment.extra[locations[other]])
                    for other, weight in assignment.edges[unit]
                    if other < unit and locations[other] != location
                )
                locations.append(location)
                place_next(cost + added)
                locations.pop()
                free[location] += 1

    place_next(0.0)
    return best_locations


def _arrangements(degrees: Degrees, groups: SlotGroups) -> Iterator[list[int]]:
    """Yield regular arrangements, each as locations by unit.

    Each arrangement lays out blocks of replicas by stages that fit a node, one after another.
    """
    capacities = groups.capacities
    by_size = sorted(range(len(capacities)), key=lambda location: -capacities[location])
    for stages in (list(range(degrees.pipeline)), pair_order(degrees.pipeline)):
        for num_replicas in divisors(degrees.data):
            for num_stages in divisors(degrees.pipeline):
                if num_replicas * num_stages > max(capacities):
                    continue
                for replicas_first in (True, False):
                    units = _blocks(degrees, stages, num_replicas, num_stages, replicas_first=replicas_first)
                    for order in (range(len(capacities)), by_size):
                        in_order = [location for location in order for _ in range(capacities[location])]
                        locations = [0] * len(units)
                        for unit, location in zip(units, in_order, strict=True):
                            locations[unit] = location
                        yield locations


def _blocks(
    degrees: Degrees, stages: list[int], num_replicas: int, num_stages: int, *, replicas_first: bool
) -> list[int]:
    """All units, in the order of a tiling with blocks of `num_replicas` x `num_stages`."""
    corners = [
        (replica, stage)
        for replica in range(0, degrees.data, num_replicas)
        for stage in range(0, degrees.pipeline, num_stages)
    ]
    if replicas_first:
        corners.sort(key=lambda corner: (corner[1], corner[0]))
    return [
        replica * degrees.pipeline + stage
        for first_replica, first_stage in corners
        for replica in range(first_replica, first_replica + num_replicas)
        for stage in stages[first_stage : first_stage + num_stages]
    ]


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _searched(assignment: Assignment, arrangements: Iterable[list[int]]) -> list[int]:
    """The locations by unit of the best assignment found from `arrangements`, within a budget of exchanges."""
    starts = {tuple(start): assignment.set(start) for start in arrangements}
    budget, best, best_locations = _EXCHANGES, math.inf, []
    for start in sorted(starts, key=starts.__getitem__)[:_STARTS]:
        if budget > 0:
            cost, budget = _improve(assignment, start, budget)
            if cost < best:
                best, best_locations = cost, list(assignment.location_of)
    draw = random.Random(0)
    units, num_drawn = range(assignment.num_units), 2 + assignment.num_units // 32
    for _ in range(_KICKS if len(assignment.capacities) > 1 else 0):
        if budget <= 0:
            break
        locations = list(best_locations)
        for first, second in zip(draw.choices(units, k=num_drawn), draw.choices(units, k=num_drawn), strict=True):
            locations[first], locations[second] = locations[second], locations[first]
        cost, budget = _improve(assignment, locations, budget)
        if cost < best:
            best, best_locations = cost, list(assignment.location_of)
    return best_locations


def _improve(assignment: Assignment, locations: Sequence[int], budget: int) -> tuple[float, int]:
    """Set `locations`, and exchange pairs and units as long as an exchange lowers the cost.

    The search ends early when `budget` exchanges have been evaluated. Returns the cost and the rest of the budget.
    """
    cost = assignment.set(locations)
    threshold = -1e-12 * (abs(cost) + 1e-30)
    improving = True
    while improving and budget > 0:
        improving = False
        for together in (True, False):
            for unit in range(assignment.num_units):
                for target in _targets(assignment, unit):
                    for other in list(assignment.members[target]):
                        budget -= 1
                        change = _exchange_if_better(assignment, unit, other, threshold, together=together)
                        if change:
                            cost += change
                            improving = True
                            break
                if budget <= 0:
                    break
    return cost, budget


def _targets(assignment: Assignment, unit: int) -> list[int]:
    """The other locations that hold a unit with which `unit` communicates."""
    here, targets = assignment.location_of[unit], {}
    for other, _ in assignment.edges[unit]:
        targets[assignment.location_of[other]] = None
    for replica in (unit - assignment.num_stages, unit + assignment.num_stages):  # the same stage of the next replicas
        targets[assignment.location_of[replica % assignment.num_units]] = None
    targets.pop(here, None)
    return list(targets)


def _exchange_if_better(assignment: Assignment, unit: int, other: int, threshold: float, *, together: bool) -> float:
    """Exchange two units if the exchange lowers the cost. `together`: also exchange the units of their pairs.

    Returns the change of the cost in seconds; 0 if the units stay.
    """
    if assignment.location_of[unit] == assignment.location_of[other]:
        return 0.0
    change = assignment.change(unit, other)
    if not together:
        if change < threshold:
            assignment.exchange(unit, other)
            return change
        return 0.0
    unit_pair, other_pair = _pair(assignment, unit), _pair(assignment, other)
    if len({unit, other, unit_pair, other_pair}) < 4:
        return 0.0
    if (
        assignment.location_of[unit_pair] != assignment.location_of[unit]
        or assignment.location_of[other_pair] != assignment.location_of[other]
    ):
        return 0.0
    assignment.exchange(unit, other)
    change += assignment.change(unit_pair, other_pair)
    if change < threshold:
        assignment.exchange(unit_pair, other_pair)
        return change
    assignment.exchange(unit, other)
    return 0.0


def _pair(assignment: Assignment, unit: int) -> int:
    replica, stage = divmod(unit, assignment.num_stages)
    return replica * assignment.num_stages + pair_of(stage, assignment.num_stages)


def _in_slot_groups(degrees: Degrees, groups: SlotGroups, locations: list[int]) -> Mapping:
    """The mapping that puts units into the slot groups of their locations: replica by replica, pairs side by side."""
    position = {stage: index for index, stage in enumerate(pair_order(degrees.pipeline))}
    by_location: dict[int, list[tuple[int, int, int]]] = {}
    for unit, location in enumerate(locations):
        data, stage = divmod(unit, degrees.pipeline)
        by_location.setdefault(location, []).append((data, position[stage], stage))
    mapping = [0] * degrees.world_size
    waiting = {location: iter(sorted(units)) for location, units in by_location.items()}
    for group in groups.groups:
        data, _, stage = next(waiting[group.location])
        for tensor, slot in enumerate(group.slots):
            mapping[slot] = degrees.rank(tensor=tensor, data=data, stage=stage)
    return tuple(mapping)
