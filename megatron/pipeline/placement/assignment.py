"""The cost of putting model parts on nodes, and what it changes when parts are exchanged.

The unit is one stage of one replica with all its tensor ranks; unit i is replica i // p, stage i % p. Which units share
a location decides everything that the choice can change: traffic inside a location costs the same whichever it is. So
the cost counts, for each byte that leaves a location, by how much that is dearer than staying. It is additive over
pairs of units and over the all-reduces of replicas, which makes the effect of an exchange cheap to compute.

A location is a node, or slots that one tensor parallel group takes. Tensor parallel ranks talk in every layer, so a
group stays inside a node wherever the node has t free slots. Nodes whose GPUs do not divide by t leave slots over;
these are put together, in slot order, to groups that span nodes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pipeline.placement.degrees import Degrees
from megatron.pipeline.placement.topology import Topology
from megatron.pipeline.placement.traffic import Traffic, point_to_point, ring_bytes

# --- groups of t slots that one tensor parallel group takes -----------------------------------------------------------


@dataclass(frozen=True)
class SlotGroup:
    """Slots of one tensor parallel group, in order, and a number that groups of the same node share."""

    slots: tuple[int, ...]
    location: int


@dataclass(frozen=True)
class SlotGroups:
    """All groups of a topology. A location is a node, or a single group that spans nodes.

    `network_seconds_per_byte` and `node_seconds_per_byte`, by location, are what a byte costs that one GPU sends to
    another location or within its own.
    """

    groups: tuple[SlotGroup, ...]
    network_seconds_per_byte: tuple[float, ...]
    node_seconds_per_byte: float

    @property
    def capacities(self) -> list[int]:
        """Number of groups by location."""
        counts = [0] * len(self.network_seconds_per_byte)
        for group in self.groups:
            counts[group.location] += 1
        return counts


def slot_groups_of(topology: Topology, tensor: int) -> SlotGroups:
    """The slot groups of `topology` for tensor parallel groups of `tensor` ranks, which divides its number of slots."""
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
    """Units on locations, by `location_of[unit]`; `exchange` swaps two units and keeps the cost up to date."""

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
        """Start from these locations; returns the cost in seconds beyond that of traffic that leaves no location."""
        self.location_of = list(location_of)
        self.members = [[] for _ in self.capacities]
        self.replicas = [Counter() for _ in range(self.num_stages)]  # by stage: how many replicas at which location
        self.ring_extra = [0.0] * self.num_stages  # by stage: sum of `extra` over these locations
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
        """What exchanging two units would add to the cost."""
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
        """When one of the stage's replicas goes from one location to another."""
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
