"""The cost of putting model parts on nodes, and what it changes when parts are exchanged.

The unit is one stage of one replica with all its tensor ranks; unit i is replica i // p, stage i % p. Which units share
a location decides everything that the choice can change: traffic inside a location costs the same whichever it is. So
the cost counts, for each byte that leaves a location, by how much that is dearer than staying. It is additive over
pairs of units and over the all-reduces of replicas, which makes the effect of an exchange cheap to compute.
"""

from collections import Counter
from collections.abc import Sequence

from megatron.placement.degrees import Degrees
from megatron.placement.slot_groups import SlotGroups
from megatron.placement.traffic import Traffic, point_to_point, ring_bytes


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
