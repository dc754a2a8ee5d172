"""The stages of a cut model as a pipeline: edges between them, and the schedule that runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import sympy
from torch import fx

from megatron.capture.edges import Crossings
from megatron.capture.export import Captured
from megatron.finetuning.partition_file import PartitionFile
from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.program.weight_policies import Ahead, WeightPolicy
from megatron.pipeline.schedules import Schedule

_ASYNCHRONOUS = "ftpipe"


def edges_of(captured: Captured, crossing: Crossings) -> tuple[Edge, ...]:
    """One for each pair of stages between which something crosses, ascending.

    Raises ValueError for stages that make no pipeline.
    """
    with_gradient: dict[tuple[int, int], bool] = {}
    for key, route in crossing.routes.items():
        has_gradient = _has_gradient(captured, crossing, key)
        for pair in route:
            with_gradient[pair] = with_gradient.get(pair, False) or has_gradient
    edges = tuple(Edge(*pair, gradient) for pair, gradient in sorted(with_gradient.items()))
    StageGraph.of(crossing.num_stages, edges)
    return edges


class EdgeBytes(NamedTuple):
    """What crosses one way: `activations` with each microbatch, `parameters`, shared ones, once for each value that
    their owner's forwards use.
    """

    activations: int = 0
    parameters: int = 0

    def a_microbatch(self, num_microbatches: int, weights: WeightPolicy) -> float:
        """Mean bytes, where a batch has `num_microbatches`; at most, where each forward may have a step of its own."""
        num_values = num_microbatches if weights.ahead is Ahead.PROVISIONAL_STEP else 1
        return self.activations + self.parameters * num_values / num_microbatches


def bytes_of_edges(
    captured: Captured, crossing: Crossings, sizes: Mapping[sympy.Symbol, int]
) -> dict[tuple[int, int], EdgeBytes]:
    """By (source, target)."""
    found: dict[tuple[int, int], EdgeBytes] = {}
    for key, route in crossing.routes.items():
        for pair in route:
            activations, parameters = found.get(pair, EdgeBytes())
            if isinstance(key, str):
                parameters += captured.parameters[key].nbytes
            else:
                activations += _num_bytes(key, sizes)
            found[pair] = EdgeBytes(activations, parameters)
    return found


def schedule_of(
    name: str,
    edges: Sequence[Edge],
    partition: PartitionFile,
    *,
    recompute: bool,
    norm_decides: bool = False,
    predict: bool = False,
    provisional: bool = False,
) -> Schedule:
    """The schedule of that name over these stages.

    `norm_decides`: gradients are clipped by their norm. `predict`: ftpipe's forwards use predicted weights;
    `provisional`: those of provisional steps. ftpipe always recomputes: its backwards use newer weights than its
    forwards.

    Raises ValueError for stages that the schedule cannot run, such as 2bw's where they are no chain.
    """
    rank_of_stage, num_stages = partition.rank_of_stage, len(partition.rank_of_stage)
    graph = StageGraph.of(num_stages, edges)
    chain = graph.is_chain
    common = {"num_stages": num_stages, "edges": () if chain else tuple(edges), "rank_of_stage": rank_of_stage}
    if name == _ASYNCHRONOUS:
        assert not (predict and provisional), "the command line excludes it"
        weights = "stale-predicted" if predict else "stale-provisional" if provisional else "stale"
        return Schedule(order="async", weights=weights, recompute=True, work=partition.work(graph), **common)
    if name in ("2bw", "pipedream"):
        if not chain:
            skips = " ".join(str(edge) for edge in edges if edge.target != edge.source + 1)
            raise ValueError(
                f"{name} runs stages that are a chain, and these have the edges {skips}; partition with "
                "--max-stages-per-device 1 --methods sequential, or choose ftpipe, flush or gpipe"
            )
        if len(set(rank_of_stage)) < num_stages:
            raise ValueError(
                f"{name} runs one stage on each device, and the partition has {num_stages} on "
                f"{len(set(rank_of_stage))}; partition with --max-stages-per-device 1, or choose ftpipe, flush or gpipe"
            )
    return Schedule.preset(name, recompute=recompute, norm_decides=norm_decides, **common)


def _has_gradient(captured: Captured, crossing: Crossings, key: fx.Node | str) -> bool:
    return captured.parameters[key].requires_grad if isinstance(key, str) else key in crossing.differentiable


def _num_bytes(node: fx.Node, sizes: Mapping[sympy.Symbol, int]) -> int:
    value = node.meta["val"]
    count = 1
    for size in value.shape:
        count *= size if isinstance(size, int) else int(size.node.expr.subs(sizes))
    return count * value.dtype.itemsize
