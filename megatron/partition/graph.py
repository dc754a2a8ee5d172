"""The graph of a model for the partitioner, and the exact price and the validity of a partition of it.

The file form is JSON: `nodes`, `edges` ([producer, consumer]) and the machine. Times are milliseconds of one
microbatch, sizes are bytes, bandwidth is 10^9 bytes per second. Any error in a file is a ValueError of one sentence.

Equation 1 of FTPipe, as it is used here: T_s = C + max(0, F_s - C) + max(0, B_s - C) for a stage s. C is the compute
time of the *whole device* that holds s, forward and backward. F_s is the time of sending s's tensors to stages on other
devices, each tensor once for each receiving stage. B_s is the time of receiving the gradients of the same tensors, and
so equal to F_s. The objective is the largest T_s. Every method's result is priced by `evaluate`.
"""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import networkx
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from megatron.documents import GIB

_Milliseconds = Annotated[float, Field(ge=0, le=1e12)]
_Bytes = Annotated[float, Field(ge=0, le=1e18)]
_Limit = Annotated[float, Field(gt=0, le=1e18)]
_Factor = Annotated[float, Field(ge=1e-6, le=1e6)]  # beyond them sums of times are no longer exact, or infinite

_record = validated(frozen=True, config=ConfigDict(extra="forbid"))


@_record
class GraphNode:
    """An operator or a layer.

    Attributes:
        id: the number of the node in edges and partitions.
        fwd_ms: milliseconds of its forward.
        bwd_ms: milliseconds of its backward, with the recompute of its forward.
        params: number of parameters that only this node uses.
        mem_bytes: bytes saved between forward and backward.
        out_bytes: bytes of its output.
        scope: its path in the model, such as `T5/T5Block[3]/Linear[q]`.
        block: the type of the block that contains it; empty for none.
        input: whether the node is data, which costs nothing and is not sent.
        fwd_plain_ms, bwd_plain_ms, mem_plain_bytes: the same quantities without recompute, for a stage on which no
            other stage depends (section 4.3); None if they were not profiled.
    """

    id: int
    fwd_ms: _Milliseconds
    bwd_ms: _Milliseconds
    params: Annotated[int, Field(ge=0, le=10**18)]
    mem_bytes: _Bytes
    out_bytes: _Bytes
    scope: str = ""
    block: str = ""
    input: bool = False
    fwd_plain_ms: _Milliseconds | None = None
    bwd_plain_ms: _Milliseconds | None = None
    mem_plain_bytes: _Bytes | None = None

    @property
    def has_plain(self) -> bool:
        return self.fwd_plain_ms is not None

    def milliseconds(self, *, plain: bool) -> float:
        """The milliseconds of forward and backward of one microbatch at speed 1; 0 for an input."""
        if self.input:
            return 0.0
        return self.fwd_plain_ms + self.bwd_plain_ms if plain and self.has_plain else self.fwd_ms + self.bwd_ms

    def saved_bytes(self, *, plain: bool) -> float:
        if self.input:
            return 0.0
        return self.mem_plain_bytes if plain and self.has_plain else self.mem_bytes


@_record
class PartitionDevice:
    """A device: its memory in bytes, and its speed, by which the nodes' times are divided."""

    memory_limit_bytes: _Limit
    speed: _Factor = 1.0


@_record
class Together:
    """Nodes that must be in one stage; with `where` "device" they must be on one device, and may be in different
    stages."""

    nodes: Annotated[tuple[int, ...], Field(min_length=1)]
    where: Literal["stage", "device"] = "stage"


@_record
class SharedByNodes:
    """Parameters that several nodes use.

    The parameters count once on each device that has a user. The first user in the order of computation owns them. For
    each microbatch its stage sends `out_bytes` (the parameters' bytes over the microbatches of a weight version) to
    each stage on another device that uses them.
    """

    nodes: Annotated[tuple[int, ...], Field(min_length=2)]
    params: Annotated[int, Field(ge=0, le=10**18)]
    out_bytes: _Bytes


@_record
class Graph:
    """A model and the machine that it is cut for.

    Attributes:
        weight_bytes_per_parameter: bytes of a parameter on its device, with its gradient and optimizer state.
        special_block: the block type by which to coarsen; empty for none.
        devices: one entry for each device if devices are unequal; otherwise empty, and `memory_limit_bytes` is the
            limit of each device.
    """

    nodes: Annotated[tuple[GraphNode, ...], Field(min_length=1)]
    edges: tuple[tuple[int, int], ...]
    num_devices: Annotated[int, Field(ge=1, le=65_536)]
    bandwidth_gigabytes_per_second: _Factor
    memory_limit_bytes: _Limit
    weight_bytes_per_parameter: Annotated[float, Field(ge=0, le=1e6)]
    name: str = ""
    special_block: str = ""
    devices: tuple[PartitionDevice, ...] = ()
    together: tuple[Together, ...] = ()
    shared_parameters: tuple[SharedByNodes, ...] = ()
    unknown: tuple[str, ...] = field(default=())
    """Keys of the file that are ignored because they are unknown."""

    def __post_init__(self) -> None:
        ids = {node.id for node in self.nodes}
        if len(ids) < len(self.nodes):
            twice = next(node.id for i, node in enumerate(self.nodes) if node.id in {n.id for n in self.nodes[:i]})
            raise ValueError(f"node {twice} is there twice; give each node an id of its own")
        inputs = {node.id for node in self.nodes if node.input}
        if ids == inputs:
            raise ValueError("all nodes are inputs, so there is nothing to compute; mark only data with input")
        for node in self.nodes:
            plain = (node.fwd_plain_ms, node.bwd_plain_ms, node.mem_plain_bytes)
            if None in plain and plain != (None, None, None):
                raise ValueError(
                    f"node {node.id} has a part of a profile without recompute; give fwd_plain_ms, bwd_plain_ms and "
                    "mem_plain_bytes, or none of them"
                )
        for source, target in self.edges:
            for end in (source, target):
                if end not in ids:
                    raise ValueError(f"edge {source}>{target} ends at node {end}, which is not among the nodes; add it")
            if target in inputs:
                raise ValueError(f"edge {source}>{target} leads into an input; only what is computed has edges in")
        if self.devices and len(self.devices) != self.num_devices:
            raise ValueError(
                f"devices lists {len(self.devices)} and num_devices is {self.num_devices}; let them be the same number"
            )
        for name in ("together", "shared_parameters"):
            for group in getattr(self, name):
                for node in group.nodes:
                    if node not in ids or node in inputs:
                        raise ValueError(f"{name} names node {node}, which is no node that computes; leave it out")
        graph = networkx.DiGraph(self.edges)
        if not networkx.is_directed_acyclic_graph(graph):
            circle = [edge[0] for edge in networkx.find_cycle(graph)]
            raise ValueError(f"the edges form a circle, {'>'.join(map(str, [*circle, circle[0]]))}; break it")

    def memory_limit(self, device: int) -> float:
        return self.devices[device].memory_limit_bytes if self.devices else self.memory_limit_bytes

    def speed(self, device: int) -> float:
        return self.devices[device].speed if self.devices else 1.0

    def milliseconds_of(self, num_bytes: float) -> float:
        """The milliseconds in which one device sends `num_bytes` to another."""
        return num_bytes / (self.bandwidth_gigabytes_per_second * 1e6)

    @cached_property
    def bound_ms(self) -> float:
        """A lower bound of the objective of any partition, in milliseconds.

        It is the greater of two bounds: all work spread evenly, where devices with a last stage compute without
        recompute the nodes for which this saves most; and the longest nodes, spread over devices as evenly as possible.
        """
        times = [(node.milliseconds(plain=False), node.milliseconds(plain=True)) for node in self.nodes]
        speeds = sorted((self.speed(device) for device in range(self.num_devices)), reverse=True)
        waited_for = {source for source, _ in self.edges}
        last_ones = sum(1 for node in self.nodes if not node.input and node.id not in waited_for)  # or fewer stages
        last, left, done = sum(speeds[:last_ones]), sum(most for most, _ in times), 0.0
        for most, plain in sorted(times, key=lambda each: each[1] / each[0] if each[0] else 1.0):
            room = last * left / sum(speeds) - done
            if plain >= most or room <= 0:
                break
            part = min(1.0, room / (plain + last * (most - plain) / sum(speeds)))
            done, left = done + part * plain, left - part * (most - plain)
        return max(left / sum(speeds), crowded([min(each) for each in times], speeds))

    def order(self) -> list[int]:
        """Node ids in an order of computation: producers before consumers, and otherwise in the order of the file."""
        return list(self._place)

    @cached_property
    def _place(self) -> dict[int, int]:
        """Node -> its place in the order of computation, in that order. Every price of a partition needs it."""
        position = {node.id: index for index, node in enumerate(self.nodes)}
        graph = networkx.DiGraph()
        graph.add_nodes_from(position)
        graph.add_edges_from(self.edges)
        order = networkx.lexicographical_topological_sort(graph, key=position.__getitem__)
        return {node: index for index, node in enumerate(order)}

    def owner(self, shared: SharedByNodes) -> int:
        """The first user of shared parameters in the order of computation."""
        return min(shared.nodes, key=self._place.__getitem__)


def crowded(times: Sequence[float], speeds: Sequence[float]) -> float:
    """A lower bound of the busiest device's time: of the longest kP + 1 nodes on P devices, one device has k + 1."""
    longest, size = sorted(times, reverse=True), len(speeds)
    return max(sum(longest[k * size - k : k * size + 1]) for k in range((len(longest) - 1) // size + 1)) / max(speeds)


_NAMES = {kind: {each.name for each in fields(kind)} for kind in (GraphNode, Graph)}


def parse_graph(content: Any) -> Graph:
    """Build a graph from the result of json.load. Raises ValueError, with one sentence, for an invalid graph."""
    if not isinstance(content, dict) or not isinstance(content.get("nodes"), list):
        raise ValueError("the file holds no graph; give an object with nodes, edges and the machine")
    unknown = sorted(set(content) - _NAMES[Graph] | {"unknown"} & set(content))
    known = {key: value for key, value in content.items() if key not in unknown}
    strays = {key for node in known["nodes"] if isinstance(node, dict) for key in set(node) - _NAMES[GraphNode]}
    known["nodes"] = [
        {key: value for key, value in node.items() if key not in strays} if isinstance(node, dict) else node
        for node in known["nodes"]
    ]
    known["unknown"] = (*unknown, *sorted(f"nodes.{key}" for key in strays))
    try:
        return TypeAdapter(Graph).validate_python(known)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            raise ValueError(f"{place} is missing; add it") from None
        raise ValueError(f"{place}: {message}, not {reprlib.repr(first['input'])}" if place else message) from None


def read_graph(path: Path) -> Graph:
    """Read a graph from a file. Raises OSError if the file cannot be opened, and ValueError if it is invalid."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON: {error}; give a graph file") from error
    try:
        return parse_graph(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


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
    quotient = stage_graph(graph, partition)
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
                f"device {device} would hold {num_bytes / GIB:.2f} GiB of at most "
                f"{graph.memory_limit(device) / GIB:.2f}; give it less, or more memory"
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
    depth = networkx.dag_longest_path_length(quotient, default_weight=1)
    return Valuation(max(stage_ms), tuple(stage_ms), tuple(compute), tuple(memory), sum(sent), depth)


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


def stage_graph(graph: Graph, partition: Partition) -> networkx.DiGraph:
    """The graph of all stages with the edges of `stage_edges`."""
    found = networkx.DiGraph(stage_edges(graph, partition))
    found.add_nodes_from(range(partition.num_stages))
    return found


def in_order(stages: networkx.DiGraph) -> dict[int, int]:
    """Stage -> its place in an order of computation, in which the lowest numbers come first."""
    return {stage: place for place, stage in enumerate(networkx.lexicographical_topological_sort(stages))}


def without_circles(units: networkx.DiGraph) -> list[int]:
    """The group of each of the units 0, 1, ..., if all units on a circle form one group.

    Groups are numbered in an order of computation, in which groups with low units come first.
    """
    condensed = networkx.condensation(units)
    first = {each: min(data["members"]) for each, data in condensed.nodes(data=True)}
    order = networkx.lexicographical_topological_sort(condensed, key=first.__getitem__)
    number = {each: index for index, each in enumerate(order)}
    return [number[condensed.graph["mapping"][unit]] for unit in range(len(units))]


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
