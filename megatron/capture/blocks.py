"""The blocks of operators that must lie in one stage, the operators that every stage copies, and the tensors between
stages.

An operator is *free* if it depends on data and constants alone: masks, positions, sizes. No gradient passes through a
free operator, so each stage computes its own copy. All other operators form *blocks*, each of which lies in one stage:

- an operator that writes into memory, the operators that share this memory, and the operators that read it before the
  last write: in a later stage such a reader would see the written values, and a write into a copy would be lost;
- an operator that returns several results, and the operators that take one of these results;
- an operator that reads a size from an activation, and the operators that use the size, since only tensors are sent;
- attention, and its inputs that are read through views, up to the operators that made them: the gradients that
  attention's kernels return have layouts that a transfer would not keep, so sums over them would round differently;
- all operators on a path from a block back to itself: otherwise two stages would wait for each other.

A tensor that one later stage needs is sent to that stage. If several stages need a tensor, they pass it on: the first
receives it from the stage that makes it, and each other stage receives it from the latest holder that precedes it in
the graph of stages anyway. So no stage waits longer, and each holder adds its own share to the gradient that comes back
from the next stage. The sum is in the order in which autograd adds the uses in one process, and along a chain of stages
it is equal to the last bit. (With `relay=False` the making stage sends the tensor to all others, and adds up their
gradients.) A frozen parameter is never sent: each stage that uses it has a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx
from torch import fx

from megatron.capture.export import Captured, is_size
from megatron.capture.nodes import aliased_by, differentiable, is_getitem, reached, without_model, written_by
from megatron.capture.randomness import seeded_attention


def blocks_of(captured: Captured) -> tuple[tuple[int, ...], ...]:
    """The blocks, each as ascending numbers of operators, in an order in which they can run. Free operators are in no
    block."""
    number = {node: position for position, node in enumerate(captured.nodes)}
    free = free_nodes(captured)
    groups = networkx.utils.UnionFind(range(len(captured.nodes)))
    bound_sizes = [node for node in captured.nodes if is_size(node) and node not in free]
    sizes = [[node, *node.users] for node in bound_sizes]
    for together in (*written_groups(captured.nodes), *_inseparable(captured.nodes), *sizes):
        found = [number[node] for node in together if node in number]
        if found:
            groups.union(*found)
    members: dict[int, list[int]] = {}
    for position, node in enumerate(captured.nodes):
        if node not in free:
            members.setdefault(groups[position], []).append(position)
    uses = networkx.DiGraph()
    uses.add_nodes_from(members)
    for position, node in enumerate(captured.nodes):
        for source in node.all_input_nodes:
            if source in number and source not in free and node not in free:
                uses.add_edge(groups[number[source]], groups[position])
    joined = networkx.condensation(uses)  # groups on a circle are one block
    blocks = {
        each: tuple(sorted(position for group in data["members"] for position in members[group]))
        for each, data in joined.nodes(data=True)
    }
    # Of several blocks that can run, the block that begins first in the graph comes first.
    return tuple(map(blocks.get, networkx.lexicographical_topological_sort(joined, key=lambda each: blocks[each][0])))


def free_nodes(captured: Captured) -> frozenset[fx.Node]:
    """The operators that depend on data and constants alone.

    If one operator depends on a parameter, all operators that share written memory with it, or must stay in its stage,
    are not free either.
    """
    parameters = {node for node in captured.graph_module.graph.nodes if captured.parameter(node) is not None}
    bound = {node for node in captured.nodes if not parameters.isdisjoint(node.all_input_nodes)}
    together = [set(members) for members in (*written_groups(captured.nodes), *_inseparable(captured.nodes))]
    while True:
        before = len(bound)
        for node in captured.nodes:
            if any(source in bound for source in node.all_input_nodes):
                bound.add(node)
        for members in together:
            if not members.isdisjoint(bound):
                bound |= members
        if len(bound) == before:
            return frozenset(node for node in captured.nodes if node not in bound)


def written_groups(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """For each memory that is written: the nodes that share it, and the nodes that read it before the last write."""
    shared = networkx.utils.UnionFind(nodes)
    for node in nodes:
        shared.union(node, *_operators((*aliased_by(node), *written_by(node))))
    writes = [node for node in nodes if written_by(node)]
    position = {node: place for place, node in enumerate(nodes)}
    found = []
    for root in dict.fromkeys(shared[node] for node in writes):
        last = max(position[node] for node in writes if shared[node] == root)
        members = [node for node in nodes if shared[node] == root]
        readers = {user for node in members for user in node.users if position.get(user, len(nodes)) <= last}
        found.append([*members, *sorted(readers.difference(members), key=position.__getitem__)])
    return found


def _inseparable(nodes: Iterable[fx.Node]) -> Iterable[list[fx.Node]]:
    for node in nodes:
        if node.target is seeded_attention:  # with the makers of query, key and value, and the views that read them
            yield [node, *reached(_operators(node.args[3:6]), lambda each: _operators(aliased_by(each)))]
        if isinstance(node.meta.get("val"), (tuple, list)) or is_getitem(node):
            users = [user for user in node.users if is_getitem(user)]
            yield [node, *users]


def _operators(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node.op == "call_function"]


@dataclass(frozen=True)
class Crossings:
    """The tensors that cross from stage to stage under an assignment of operators to stages.

    Attributes:
        stage_of: operator that is not free -> its stage.
        free: the free operators.
        owner: name of a parameter -> the stage that owns it.
        routes: operator, or name of a shared parameter -> the transfers ``(from, to)`` of its value, in an order in
            which they can happen.
        differentiable: the operators through which a gradient may pass.
        copies: name of a parameter of which several stages have a copy -> these stages, ascending.
    """

    num_stages: int
    stage_of: dict[fx.Node, int]
    free: frozenset[fx.Node]
    owner: dict[str, int]
    routes: dict[fx.Node | str, tuple[tuple[int, int], ...]]
    differentiable: frozenset[fx.Node]
    copies: Mapping[str, tuple[int, ...]]

    def sent(self, source: int, target: int) -> list[fx.Node | str]:
        """The values that stage `source` sends to stage `target`: parameters first, then operators in their order."""
        return [key for key, route in self.routes.items() if (source, target) in route]


def crossings(
    captured: Captured, stage_of_node: Mapping[int, int], *, relay: bool = True, chain: bool = False
) -> Crossings:
    """Check an assignment of operators to stages, and find the tensors that cross between stages.

    Args:
        stage_of_node: number of operator -> stage; the stages of free operators are ignored.
        relay: whether stages pass on a tensor that several stages need.
        chain: a tensor passes through every stage between its maker and the last stage that needs it, and each stage
            that uses a parameter has a copy of its own. So each stage needs only the stage before it.

    Raises ValueError for an operator without a stage, a stage without operators, a block in several stages, or a stage
    that needs a later stage.
    """
    free = free_nodes(captured)
    stage_of = {}
    for number, node in enumerate(captured.nodes):
        if node in free:
            continue
        if number not in stage_of_node:
            raise ValueError(f"operator {number} ({node.name}) has no stage; give each of {captured.model_name} one")
        stage_of[node] = stage_of_node[number]
    if captured.loss not in stage_of:
        raise ValueError(f"the loss of {captured.model_name} depends on no parameter, so there is nothing to train")
    for name, node in captured.kept.items():
        if node not in stage_of:
            raise ValueError(f"{name} of {captured.model_name} depends on no parameter; leave it out of keep")
    num_stages = max(stage_of.values()) + 1
    empty = sorted(set(range(num_stages)) - set(stage_of.values()))
    if empty:
        raise ValueError(f"stage {empty[0]} of {num_stages} has no operators; number the stages without gaps")
    for block in blocks_of(captured):
        stages = {stage_of[captured.nodes[number]] for number in block}
        if len(stages) > 1:
            raise ValueError(
                f"operators {', '.join(map(str, block[:6]))}{' ...' if len(block) > 6 else ''} must lie in one stage "
                f"(they share memory that is written, or results), and lie in {sorted(stages)}; keep blocks together"
            )
    users: dict[fx.Node | str, set[int]] = {}
    owner, copies = _owners(captured, stage_of, {} if chain else users)
    for node, stage in stage_of.items():
        for user in node.users:
            if user not in stage_of:
                continue
            if stage_of[user] < stage:
                raise ValueError(
                    f"stage {stage_of[user]} needs {node.name} of stage {stage}; number stages in an order in which "
                    "they can run"
                )
            if stage_of[user] > stage:
                users.setdefault(node, set()).add(stage_of[user])
    makers = {key: owner[key] if isinstance(key, str) else stage_of[key] for key in users}
    graph = networkx.DiGraph((makers[key], target) for key, targets in users.items() for target in targets)
    after = {stage: networkx.descendants(graph, stage) for stage in graph}
    routes = {}
    for key, stages in users.items():
        if chain:
            routes[key] = tuple((stage, stage + 1) for stage in range(makers[key], max(stages)))
        else:
            routes[key] = _route(makers[key], sorted(stages), after if relay else {})
    copies = {name: stages for name, stages in copies.items() if chain or not captured.parameters[name].requires_grad}
    return Crossings(num_stages, stage_of, free, owner, routes, differentiable(captured.graph_module), copies)


def _owners(
    captured: Captured, stage_of: Mapping[fx.Node, int], users: dict[fx.Node | str, set[int]]
) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """The owner of each parameter, which is the first stage that uses it, and the stages of each shared parameter.

    The other stages that use a trained parameter are recorded in `users`.
    """
    found: dict[str, set[int]] = {}
    for node in captured.graph_module.graph.nodes:
        if captured.parameter(node) is not None:
            stages = {stage_of[user] for user in node.users if user in stage_of}
            found.setdefault(without_model(node.target), set()).update(stages)
    for name, stages in found.items():
        if len(stages) > 1 and captured.parameters[name].requires_grad:
            users[name] = stages - {min(stages)}
    shared = {name: tuple(sorted(stages)) for name, stages in found.items() if len(stages) > 1}
    return {name: min(stages) for name, stages in found.items()}, shared


def _route(maker: int, targets: list[int], after: Mapping[int, set[int]]) -> tuple[tuple[int, int], ...]:
    holders, route = [maker], []
    for target in targets:
        source = next((each for each in reversed(holders[1:]) if target in after.get(each, ())), maker)
        route.append((source, target))
        holders.append(target)
    return tuple(route)
