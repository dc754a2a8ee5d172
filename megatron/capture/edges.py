"""Which tensors go from which stage to which, given the stage of each operator.

A tensor that one later stage needs goes there. Where several need it, it is passed on: the first gets it from its
maker, and each of the others from the latest that has it and comes before it anyway. So the graph of stages waits no
longer, and each holder adds its own share to the gradient that comes back from the next: the sum is in the order in
which autograd adds up the uses in one process, and along a chain of stages equal to the last bit. Otherwise the maker
would add up sums. (`relay=False` has the maker send to all.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx
import torch
from torch import fx

from megatron.capture.blocks import blocks_of, free_nodes
from megatron.capture.differentiable import differentiable
from megatron.capture.export import Captured
from megatron.capture.paths import attribute, without_model


@dataclass(frozen=True)
class Crossings:
    """`stage_of`: operator (not free) -> its stage. `free`: the others. `owner`: parameter's name -> stage.
    `routes`: what crosses -> its transfers ``(from, to)``, in an order in which they can happen; keys are operators, or
    names of parameters. `differentiable`: the operators through which a gradient may pass.
    """

    num_stages: int
    stage_of: dict[fx.Node, int]
    free: frozenset[fx.Node]
    owner: dict[str, int]
    routes: dict[fx.Node | str, tuple[tuple[int, int], ...]]
    differentiable: frozenset[fx.Node]

    def sent(self, source: int, target: int) -> list[fx.Node | str]:
        """What goes from one stage to the other: parameters first, then in the order of the operators."""
        return [key for key, route in self.routes.items() if (source, target) in route]


def crossings(captured: Captured, stage_of_node: Mapping[int, int], *, relay: bool = True) -> Crossings:
    """Check an assignment and say what crosses.

    `stage_of_node`: number of operator -> stage; those of free operators are not looked at. Raises ValueError for an
    operator without a stage, a stage without operators, a block that is torn, or a stage that needs a later one.
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
    owner = _owners(captured, stage_of, users)
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
    routes = {key: _route(makers[key], sorted(users[key]), after if relay else {}) for key in users}
    return Crossings(num_stages, stage_of, free, owner, routes, differentiable(captured.graph_module))


def _owners(
    captured: Captured, stage_of: Mapping[fx.Node, int], users: dict[fx.Node | str, set[int]]
) -> dict[str, int]:
    """The first stage that uses a parameter owns it; the others are put down as its users."""
    found: dict[str, set[int]] = {}
    for node in captured.graph_module.graph.nodes:
        if node.op == "get_attr" and isinstance(attribute(captured.graph_module, node.target), torch.nn.Parameter):
            stages = {stage_of[user] for user in node.users if user in stage_of}
            found.setdefault(without_model(node.target), set()).update(stages)
    for name, stages in found.items():
        if len(stages) > 1:
            users[name] = stages - {min(stages)}
    return {name: min(stages) for name, stages in found.items()}


def _route(maker: int, targets: list[int], after: Mapping[int, set[int]]) -> tuple[tuple[int, int], ...]:
    holders, route = [maker], []
    for target in targets:
        source = next((each for each in reversed(holders[1:]) if target in after.get(each, ())), maker)
        route.append((source, target))
        holders.append(target)
    return tuple(route)
