"""Which operators must lie in one stage, and which lie in every stage that needs them.

An operator is *free* if it depends on data and constants alone: masks, positions, sizes. No gradient passes through it,
so each stage computes it for itself. All others form *blocks*, each of which lies in one stage:

- what writes into memory, all that shares this memory, and all that reads it before the last write: a stage that came
  later would read what was written, and a copy of it would never be written;
- an operator that returns several results, and those who take one;
- a size that is asked of an activation, and those who use it, since only tensors travel;
- attention and what it reads through views, up to the operators that made it: the gradients that attention's kernels
  return are laid out in ways of their own, which a transfer would not keep, and sums over them round differently then;
- all that lies on a path from a block back to itself, else two stages would wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx
import torch
from torch import fx

from megatron.capture.aliases import aliased_by, is_getitem, written_by
from megatron.capture.export import Captured
from megatron.capture.paths import attribute
from megatron.capture.randomness import seeded_attention
from megatron.capture.symbols import is_size


def blocks_of(captured: Captured) -> tuple[tuple[int, ...], ...]:
    """The blocks, as ascending numbers of operators, in an order in which they can run. Free operators are in none."""
    number = {node: position for position, node in enumerate(captured.nodes)}
    free = free_nodes(captured)
    groups = networkx.utils.UnionFind(range(len(captured.nodes)))
    bound_sizes = [node for node in captured.nodes if is_size(node) and node not in free]
    sizes = [[node, *node.users] for node in bound_sizes]
    for members in (*written_groups(captured.nodes), *_inseparable(captured.nodes), *sizes):
        found = [number[node] for node in members if node in number]
        if found:
            groups.union(*found)
    uses = networkx.DiGraph()
    uses.add_nodes_from(groups[position] for position, node in enumerate(captured.nodes) if node not in free)
    for position, node in enumerate(captured.nodes):
        for source in node.all_input_nodes:
            if source in number and source not in free and node not in free:
                uses.add_edge(groups[number[source]], groups[position])
    for circle in networkx.strongly_connected_components(uses):
        groups.union(*circle)
    members: dict[int, list[int]] = {}
    for position, node in enumerate(captured.nodes):
        if node not in free:
            members.setdefault(groups[position], []).append(position)
    return _in_order(captured.nodes, number, [tuple(each) for each in members.values()])


def free_nodes(captured: Captured) -> frozenset[fx.Node]:
    """The operators that depend on data and constants alone. A write makes all that shares its memory depend on what
    is written, and so does a place among those who must stay together.
    """
    bound = {node for node in captured.nodes if any(_is_parameter(captured, each) for each in node.all_input_nodes)}
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


def _is_parameter(captured: Captured, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(attribute(captured.graph_module, node.target), torch.nn.Parameter)


def written_groups(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """For each memory that is written: all that shares it, and all that reads it before the last write."""
    shared = networkx.utils.UnionFind(nodes)
    for node in nodes:
        sources = [each for each in (*aliased_by(node), *written_by(node)) if each.op == "call_function"]
        if sources:
            shared.union(node, *sources)
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
        if node.target is seeded_attention:
            yield [node, *_read_through_views(node)]
        if isinstance(node.meta.get("val"), (tuple, list)) or is_getitem(node):
            users = [user for user in node.users if is_getitem(user)]
            yield [node, *users]


def _read_through_views(node: fx.Node) -> Iterable[fx.Node]:
    """What makes the query, the key and the value, and the views through which they are read."""
    wanted = [each for each in node.args[3:6] if each.op == "call_function"]
    for each in wanted:
        yield each
        wanted += [source for source in aliased_by(each) if source.op == "call_function"]


def _in_order(nodes, number, blocks: list[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Blocks sorted so that each comes after those it needs; among those that can run, the earliest in the graph."""
    block_of = {position: block for block in blocks for position in block}
    uses = networkx.DiGraph()
    uses.add_nodes_from(blocks)
    for block in blocks:
        for position in block:
            for source in nodes[position].all_input_nodes:
                other = block_of.get(number.get(source))
                if other is not None and other != block:
                    uses.add_edge(other, block)
    return tuple(networkx.lexicographical_topological_sort(uses, key=lambda block: block[0]))
