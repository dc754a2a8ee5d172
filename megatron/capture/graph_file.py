"""The conversion of a profile to the JSON form of the partitioner, and of a partition to stages of operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from megatron.capture.blocks import blocks_of, free_nodes
from megatron.capture.export import Captured, signature
from megatron.capture.nodes import modules_of
from megatron.capture.profile import BlockCost, parameters_of


def graph_file(
    captured: Captured,
    costs: Sequence[BlockCost],
    *,
    num_devices: int,
    bandwidth_gigabytes_per_second: float,
    memory_limit_bytes: float,
    weight_bytes_per_parameter: float,
    name: str = "",
    microbatches_per_version: int = 1,
) -> dict[str, object]:
    """The graph with the costs of its blocks, ready for `json.dumps`.

    The nodes are the batch's tensors (`input`), then the blocks; ids number both in this order. `fwd_ms` and `bwd_ms`
    are times with recompute, so the backward includes a second forward; `fwd_plain_ms` and `bwd_plain_ms` are times
    without recompute. `params` are the trained parameters, plus the number of parameters that take as many bytes of
    weights as the frozen ones have.
    `mem_bytes` equals `mem_plain_bytes`: a recompute saves for one microbatch all that a forward saves; without
    recompute, the same amount is held for each microbatch in flight. A shared parameter is sent once for each version
    of the weights, so its `out_bytes` are its bytes over `microbatches_per_version`. A frozen one is never sent, since
    each device reads it. `signature` identifies the graph.
    """

    def count(name: str) -> int:
        parameter = captured.parameters[name]
        return parameter.numel() if parameter.requires_grad else -int(-parameter.nbytes // weight_bytes_per_parameter)

    def out_bytes(shared: torch.nn.Parameter) -> float:
        return shared.nbytes / microbatches_per_version if shared.requires_grad else 0

    blocks = blocks_of(captured)
    first = len(captured.inputs)
    block_of = {captured.nodes[number]: first + place for place, block in enumerate(blocks) for number in block}
    users = _users(captured, blocks, first)
    special = _repeated(captured)
    data = [
        {"id": place, "scope": f"{captured.model_name}/Input[{tensor}]", "block": "", "fwd_ms": 0.0, "bwd_ms": 0.0,
         "params": 0, "mem_bytes": 0, "out_bytes": 0, "input": True}
        for place, tensor in enumerate(captured.inputs)
    ]  # fmt: skip
    nodes = []
    for place, (block, cost) in enumerate(zip(blocks, costs, strict=True)):
        own = [each for each in parameters_of(captured, block) if len(users[each]) == 1]
        modules = modules_of(captured.nodes[block[0]])
        lies_in = special in (kind for path, kind in modules if _is_numbered(path))
        path = modules[-1][0].replace(".", "/") if modules else "loss"  # of the innermost module
        scope = (captured.model_name, path, captured.nodes[block[0]].name)
        nodes.append({
            "id": first + place, "scope": "/".join(filter(None, scope)), "block": special if lies_in else "",
            "fwd_ms": cost.forward_ms, "bwd_ms": cost.recorded_forward_ms + cost.backward_ms,
            "fwd_plain_ms": cost.recorded_forward_ms, "bwd_plain_ms": cost.backward_ms,
            "params": sum(map(count, own)), "mem_bytes": cost.saved_bytes, "mem_plain_bytes": cost.saved_bytes,
            "out_bytes": cost.out_bytes,
        })  # fmt: skip
    return {
        "name": name or captured.model_name,
        "num_devices": num_devices,
        "bandwidth_gigabytes_per_second": bandwidth_gigabytes_per_second,
        "memory_limit_bytes": memory_limit_bytes,
        "weight_bytes_per_parameter": weight_bytes_per_parameter,
        "special_block": special,
        "signature": signature(captured),
        "nodes": data + nodes,
        "edges": _edges(captured, block_of),
        "shared_parameters": [
            {"nodes": those, "params": count(each), "out_bytes": out_bytes(captured.parameters[each])}
            for each, those in users.items()
            if len(those) > 1
        ],
    }


def stage_of_operators(captured: Captured, stage_of_node: Mapping[str | int, int]) -> dict[int, int]:
    """The stage of each operator, as `cut` takes it, from the stage of each node of `graph_file`.

    `stage_of_node`: node id, as a number or as text as in JSON -> stage. Raises ValueError for a node without a stage.
    """
    stage_of = {int(node): stage for node, stage in stage_of_node.items()}
    first, found = len(captured.inputs), {}
    for place, block in enumerate(blocks_of(captured)):
        if first + place not in stage_of:
            raise ValueError(f"node {first + place} of {captured.model_name} has no stage; make the partition again")
        found |= dict.fromkeys(block, stage_of[first + place])
    return found


def _users(captured: Captured, blocks, first: int) -> dict[str, list[int]]:
    users: dict[str, list[int]] = {name: [] for name in captured.parameters}
    for place, block in enumerate(blocks):
        for name in parameters_of(captured, block):
            users[name].append(first + place)
    return users


def _edges(captured: Captured, block_of: Mapping) -> list[list[int]]:
    """The edges from block to block, and from each tensor of the batch to the blocks that it reaches through free
    operators."""
    place = {name: number for number, name in enumerate(captured.inputs)}
    free = free_nodes(captured)
    data = {}
    found = {}
    for node in captured.graph_module.graph.nodes:
        if node.op == "placeholder":
            data[node] = {place[node.target]} if node.target in place else set()
        elif node in free:
            data[node] = set().union(*(data.get(source, set()) for source in node.all_input_nodes))
        elif node in block_of:
            for source in node.all_input_nodes:
                ends = [block_of[source]] if source in block_of else sorted(data.get(source, ()))
                found |= {(end, block_of[node]): None for end in ends if end != block_of[node]}
    return [list(edge) for edge in sorted(found)]


def _is_numbered(path: str) -> bool:
    """Whether a module is one of a list of layers."""
    return path.rpartition(".")[2].isdigit()


def _repeated(captured: Captured) -> str:
    """The class of the outermost repeated layers; empty if no layers repeat."""
    outermost = Counter()
    for node in captured.nodes:
        kinds = {(path, kind) for path, kind in modules_of(node)[:-1] if _is_numbered(path)}
        outermost.update(kind for path, kind in kinds if sum(part.isdigit() for part in path.split(".")) == 1)
    return outermost.most_common(1)[0][0] if outermost else ""
