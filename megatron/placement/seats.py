"""Seats: groups of t slots that one tensor parallel group takes.

Tensor parallel ranks talk in every layer, so a group stays inside a node wherever the node has t free slots. Nodes
whose GPUs do not divide by t leave slots over; these are put together, in slot order, to seats that span nodes.
"""

from dataclasses import dataclass

from megatron.placement.topology import Topology


@dataclass(frozen=True)
class Seat:
    """Slots of one tensor parallel group, in order, and a number that seats of the same node share."""

    slots: tuple[int, ...]
    place: int


@dataclass(frozen=True)
class Seats:
    """All seats of a topology. A place is a node, or a single seat that spans nodes.

    `network_seconds_per_byte` and `node_seconds_per_byte`, by place, are what a byte costs that one GPU sends to
    another place or within its own.
    """

    seats: tuple[Seat, ...]
    network_seconds_per_byte: tuple[float, ...]
    node_seconds_per_byte: float

    @property
    def capacities(self) -> list[int]:
        """Number of seats by place."""
        counts = [0] * len(self.network_seconds_per_byte)
        for seat in self.seats:
            counts[seat.place] += 1
        return counts


def seats_of(topology: Topology, tensor: int) -> Seats:
    """The seats of `topology` for tensor parallel groups of `tensor` ranks, which divides its number of slots."""
    assert topology.num_slots % tensor == 0
    seats, left_over, slot = [], [], 0
    for index, node in enumerate(topology.nodes):
        slots = tuple(range(slot, slot + node.gpus))
        slot += node.gpus
        num_whole = node.gpus // tensor
        seats += [Seat(slots[k * tensor : (k + 1) * tensor], index) for k in range(num_whole)]
        left_over += slots[num_whole * tensor :]
    costs = [1 / (topology.network_share(index) * 1e9) for index in range(len(topology.nodes))]
    for first in range(0, len(left_over), tensor):
        slots = tuple(left_over[first : first + tensor])
        seats.append(Seat(slots, len(costs)))
        costs.append(sum(costs[topology.node_of_slot[each]] for each in slots) / tensor)
    return Seats(tuple(seats), tuple(costs), 1 / (topology.bandwidth.within_node * 1e9))
