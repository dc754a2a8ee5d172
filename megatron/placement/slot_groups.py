"""Slot groups: groups of t slots that one tensor parallel group takes.

Tensor parallel ranks talk in every layer, so a group stays inside a node wherever the node has t free slots. Nodes
whose GPUs do not divide by t leave slots over; these are put together, in slot order, to groups that span nodes.
"""

from dataclasses import dataclass

from megatron.placement.topology import Topology


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
