"""METIS (section 4, "Metis"): devices of even work with little traffic between them; stages follow from the devices.

It knows neither the objective nor memory, so what it yields may not fit. `pip install .[metis]` brings pymetis.
"""

import importlib.util

from megatron.partition.balance import stages_of_devices
from megatron.partition.units import Units

LARGEST_WEIGHT = 10**6
"""METIS takes whole numbers of 32 bits, and adds them up."""


def require_metis() -> None:
    if importlib.util.find_spec("pymetis") is None:
        raise ValueError("metis needs pymetis, which is not installed; pip install .[metis], or leave metis out")


def cut_with_metis(units: Units, seed: int = 0) -> tuple[list[int], list[int]]:
    """The stage of each unit and the device of each stage; raises ValueError where METIS cannot do it."""
    require_metis()
    if units.unequal:
        raise ValueError("metis divides among equal devices only; leave it out, or make the devices alike")
    import pymetis

    neighbours, weights, edges = adjacency(units)
    starts, flat, bytes_of = [0], [], []
    for unit, near in enumerate(neighbours):
        flat += near
        bytes_of += edges[unit]
        starts.append(len(flat))
    if units.num_devices == 1:
        return stages_of_devices(units, [0] * len(units))
    options = pymetis.Options(seed=seed)
    _, devices = pymetis.part_graph(
        units.num_devices, pymetis.CSRAdjacency(starts, flat), vweights=weights, eweights=bytes_of, options=options
    )
    return stages_of_devices(units, devices)


def adjacency(units: Units) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """Neighbours of each unit, weights of units by time, and weights of these edges by bytes, both ways alike."""
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
