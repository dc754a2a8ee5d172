"""Which tensors travel between the stages: found by running the first microbatch.

Each stage computes it once more, in turn, without a graph and without leaving a trace in its buffers or the random
state, and hands on what it makes. So any module may be a stage, also one whose shapes depend on values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.pipeline.library.batches import MicrobatchData
from megatron.pipeline.library.ranks import Ranks
from megatron.pipeline.library.stages import StageModule, spare_buffers
from megatron.pipeline.program.edges import StageGraph
from megatron.pipeline.program.instruction import Tensor as Travelling
from megatron.pipeline.runtime.activations.kept import RandomState
from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.stages.module.losses import Loss
from megatron.pipeline.runtime.transport.edge_tensors import EdgeTensors

Specs = dict[tuple[int, int], tuple[TensorSpec, ...]]
"""(from, to) -> the tensors that a stage hands to another in each microbatch."""


@dataclass(frozen=True)
class Found:
    """What a microbatch is like. `count`: what its loss counts, where that is a sum; None: it is a mean."""

    specs: Specs
    count: float | None


def find_specs(
    modules: Mapping[int, StageModule],
    schedule: Any,
    ranks: Ranks,
    group: Any,
    *,
    data: MicrobatchData | None,
    evaluates: bool,
    device: torch.device,
) -> Found:
    """The tensors of all edges, and the loss's kind. Collective over the pipeline.

    Args:
        modules: of this rank's stages; they show the newest weights.
        group: of the pipeline's ranks; None for a single one.
        data: the first microbatch, where this rank has the first or the last stage.
        evaluates: find those of an evaluation.

    Raises:
        ValueError: on all ranks: a stage that cannot compute the microbatch.
    """
    graph: StageGraph = schedule.graph
    made: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # what goes to a stage of this rank
    specs: Specs = {}
    count: float | None = None
    for index, place in enumerate(schedule.rank_of_stage):
        targets = graph.takers(Travelling.ACTIVATION, index)
        outputs: dict[int, tuple[Tensor, ...]] = {}
        found: Any = None
        if index in modules:
            inputs = {source: made.pop((source, index)) for source in graph.makers(Travelling.ACTIVATION, index)}
            try:
                outputs, loss = _run(modules[index], data, inputs, evaluates=evaluates, device=device)
                found = {target: tuple(map(_spec, tensors)) for target, tensors in outputs.items()}
                if isinstance(loss, tuple):
                    count = float(loss[1])
            except Exception as error:
                if group is None:
                    raise
                found, cause = f"stage {index} cannot compute a microbatch: {type(error).__name__}: {error}", error
        found, count = _broadcast((found, count), ranks.pipeline[place], group)
        if isinstance(found, str):
            raise ValueError(found) from (cause if index in modules else None)
        specs.update({(index, target): each for target, each in found.items()})
        for target in targets:
            taker = schedule.rank_of_stage[target]
            if taker == place and index in modules:
                made[index, target] = outputs[target]
            elif place == ranks.rank:
                _send(outputs[target], ranks.pipeline[taker], group)
            elif taker == ranks.rank:
                made[index, target] = _receive(ranks.pipeline[place], group, device)
    return Found(specs, count)


def edges_of(specs: Specs, stages: Iterable[int]) -> dict[int, dict[int, EdgeTensors]]:
    """Of some stages, the other stage -> what travels between them."""
    edges = {pair: EdgeTensors(each) for pair, each in specs.items()}
    return {
        stage: {(set(pair) - {stage}).pop(): each for pair, each in edges.items() if stage in pair} for stage in stages
    }


def _run(
    module: StageModule,
    data: MicrobatchData | None,
    inputs: Mapping[int, tuple[Tensor, ...]],
    *,
    evaluates: bool,
    device: torch.device,
) -> tuple[dict[int, tuple[Tensor, ...]], Loss | None]:
    random_state, was_training = RandomState.capture(device), module.training
    if evaluates:
        module.eval()
    try:
        with spare_buffers(module), torch.no_grad():
            return module(data, inputs)
    finally:
        if evaluates:
            module.train(was_training)
        random_state.restore(device)


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def _broadcast(value: Any, source: int, group: Any) -> Any:
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source, group=group)
    return box[0]


def _send(tensors: tuple[Tensor, ...], to: int, group: Any) -> None:
    dist.send_object_list([tuple(each.cpu().clone() for each in tensors)], to, group=group)


def _receive(source: int, group: Any, device: torch.device) -> tuple[Tensor, ...]:
    box: list[Any] = [None]
    dist.recv_object_list(box, source, group=group)
    return tuple(each.to(device) for each in box[0])
