"""A picture of a partition: the graph's nodes by device, and each device's memory and utilisation (Figure 8)."""

from pathlib import Path

from megatron.documents.picture import new_figure, save
from megatron.partition.compete import CompeteResult
from megatron.partition.graph import Graph

GIB = 2**30


def draw(graph: Graph, result: CompeteResult, path: Path) -> None:
    """Draw a partition to `path`, in the format of its suffix.

    Above are the nodes, in the order of computation and at the height of their device, with a line for each edge
    between devices. Below is a box for each device: its width is the memory in use, its filled part the utilisation.
    """
    partition, value = result.partition, result.value
    figure = new_figure(9.0, 3.0 + 0.5 * graph.num_devices, layout="constrained")
    above, below = figure.subplots(2, 1)
    inputs = {node.id for node in graph.nodes if node.input}
    order = [node for node in graph.order() if node not in inputs]
    place = {node: (index, partition.device_of_node(node)) for index, node in enumerate(order)}
    for source, target in graph.edges:
        if source in place and place[source][1] != place[target][1]:
            above.plot(*zip(place[source], place[target], strict=True), color="0.75", linewidth=0.6, zorder=1)
    colours = [f"C{partition.stage_of_node[node] % 10}" for node in order]
    above.scatter(*zip(*place.values(), strict=True), c=colours, s=14, marker="s", zorder=2)
    above.set_title(f"{graph.name}: {result.method}, {value.objective_ms:.1f} ms; colours tell stages apart")
    above.set_xlabel("node, in the order of computation")
    for device in range(graph.num_devices):
        memory = value.memory_bytes[device] / GIB
        used = value.compute_ms[device] / value.objective_ms if value.objective_ms else 0
        below.barh(device, memory, height=0.8, facecolor="none", edgecolor="0.3")
        below.barh(device, memory, height=0.8 * used, color=f"C{device % 10}", alpha=0.6)
        below.text(memory, device, f" {used:.0%}", va="center", fontsize=8)
    below.set_xlabel("memory in use (GiB); the filled part of the height is utilisation")
    below.set_xlim(right=1.12 * max(value.memory_bytes) / GIB or 1)
    for axes in (above, below):
        axes.set_ylabel("device")
        axes.set_yticks(range(graph.num_devices))
        axes.invert_yaxis()
    save(figure, path, dpi=130)
