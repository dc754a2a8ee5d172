"""The exact price and the validity of a partition, from the graph alone.

Equation 1 of FTPipe, as it is used here: T_s = C + max(0, F_s - C) + max(0, B_s - C) for a stage s. C is the compute
time of the *whole device* that holds s, forward and backward. F_s is the time of sending s's tensors to stages on other
devices, each tensor once for each receiving stage. B_s is the time of receiving the gradients of the same tensors, and
so equal to F_s. The objective is the largest T_s.

Every method's result is priced by `evaluate`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import networkx

from megatron.partition.graph import Graph


@dataclass(frozen=True)
class Partition:
    """A partition of a graph: the stage of each node by id, inputs included, and the device of each stage, from 0."""

    stage_of_node: Mapping[int, int]
    device_of_stage: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.device_of_stage)

    def device_of_node(self, node: int) -> int:
        return self.device_of_stage[self.stage_of_node[node]]

    def most_stages_on_a_device(self) -> int:
        return max(map(self.device_of_stage.count, self.device_of_stage))


@dataclass(frozen=True)
class Valuation:
    """The price of a valid partition.

    Attributes:
        objective_ms: the largest of `stage_ms`.
        stage_ms: T_s of each stage.
        compute_ms: C of each device.
        memory_bytes: memory in use on each device.
        crossing_bytes: bytes that a microbatch's forward sends between devices; its backward sends the same number
            back.
        depth: number of edges of the longest path of stages, the most steps by which weights can be stale.
    """

    objective_ms: float
    stage_ms: tuple[float, ...]
    compute_ms: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    crossing_bytes: float
    depth: int


def evaluate(graph: Graph, partition: Partition) -> Valuation:
    """Price a partition. Raises ValueError, with the first reason, for an invalid partition."""
    stages, devices = partition.stage_of_node, partition.device_of_stage
    _check_form(graph, partition)
    edges = stage_edges(graph, partition)
    quotient = networkx.DiGraph(edges)
    quotient.add_nodes_from(range(len(devices)))
    if not networkx.is_directed_acyclic_graph(quotient):
        circle = ">".join(str(edge[0]) for edge in networkx.find_cycle(quotient))
        raise ValueError(f"stages {circle} form a circle; move a node so that each stage waits for earlier ones only")

    compute, memory = [0.0] * graph.num_devices, [0.0] * graph.num_devices
    for node in graph.nodes:
        stage = stages[node.id]
        plain = quotient.out_degree(stage) == 0
        device = devices[stage]
        compute[device] += node.milliseconds(plain=plain) / graph.speed(device)
        if not node.input:
            memory[device] += node.saved_bytes(plain=plain) + graph.weight_bytes_per_parameter * node.params
    for shared in graph.shared_parameters:
        for device in {partition.device_of_node(node) for node in shared.nodes}:
            memory[device] += graph.weight_bytes_per_parameter * shared.params
    for device, num_bytes in enumerate(memory):
        if num_bytes > graph.memory_limit(device):
            raise ValueError(
                f"device {device} would hold {num_bytes / 2**30:.2f} GiB of at most "
                f"{graph.memory_limit(device) / 2**30:.2f}; give it less, or more memory"
            )

    sent = [0.0] * len(devices)
    for source, num_bytes, consumers in tensors(graph):
        stage = stages[source]
        receivers = {stages[node] for node in consumers}
        sent[stage] += num_bytes * sum(devices[receiver] != devices[stage] for receiver in receivers)
    stage_ms = []
    for stage, device in enumerate(devices):
        once = max(0.0, graph.milliseconds_of(sent[stage]) - compute[device])
        stage_ms.append(compute[device] + 2 * once)
    return Valuation(
        objective_ms=max(stage_ms),
        stage_ms=tuple(stage_ms),
        compute_ms=tuple(compute),
        memory_bytes=tuple(memory),
        crossing_bytes=sum(sent),
        depth=networkx.dag_longest_path_length(quotient, default_weight=1),
    )


def tensors(graph: Graph) -> list[tuple[int, float, tuple[int, ...]]]:
    """The producer, bytes and consumers of each tensor that may cross between stages: outputs of nodes, then shared
    parameters."""
    consumers: dict[int, dict[int, None]] = {node.id: {} for node in graph.nodes if not node.input}
    for source, target in graph.edges:
        if source in consumers:
            consumers[source][target] = None
    out_bytes = {node.id: node.out_bytes for node in graph.nodes}
    found = [(source, out_bytes[source], tuple(targets)) for source, targets in consumers.items() if targets]
    for shared in graph.shared_parameters:
        owner = graph.owner(shared)
        found.append((owner, shared.out_bytes, tuple(node for node in shared.nodes if node != owner)))
    return found


def stage_edges(graph: Graph, partition: Partition) -> set[tuple[int, int]]:
    """The edges between stages, as (earlier, later): the later stage waits for the earlier. Inputs do not count."""
    of = partition.stage_of_node
    pairs = {(of[source], of[node]) for source, _, consumers in tensors(graph) for node in consumers}
    return {(source, target) for source, target in pairs if source != target}


def _check_form(graph: Graph, partition: Partition) -> None:
    stages, devices = partition.stage_of_node, partition.device_of_stage
    if set(stages) != {node.id for node in graph.nodes}:
        raise ValueError("the partition's nodes are not the graph's; cut this graph anew")
    for stage in stages.values():
        if not 0 <= stage < len(devices):
            raise ValueError(f"a node is in stage {stage}, and there are {len(devices)}; number stages from 0")
    computing = {stages[node.id] for node in graph.nodes if not node.input}
    for stage, device in enumerate(devices):
        if not 0 <= device < graph.num_devices:
            raise ValueError(f"stage {stage} is on device {device}, and there are {graph.num_devices}")
        if stage not in computing:
            raise ValueError(f"stage {stage} computes nothing; leave it out")
    for group in graph.together:
        places = {stages[n] if group.where == "stage" else partition.device_of_node(n) for n in group.nodes}
        if len(places) > 1:
            raise ValueError(f"nodes {', '.join(map(str, group.nodes))} are to stay on one {group.where}, and do not")
