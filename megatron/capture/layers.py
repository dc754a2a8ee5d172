"""The layers of a captured model as stages of a chain, one for each, as a relay needs them (L2L).

A layer is the outermost numbered module around an operator, such as `model.layers.3` or `encoder.block.0`. Operators
between layers belong to the stage of the last layer that they need. So do the norm, the head and the loss behind the
last layer. Operators that need no layer (embeddings, also of a decoder) belong to the first stage.
"""

from __future__ import annotations

from megatron.capture.blocks import blocks_of
from megatron.capture.export import Captured
from megatron.capture.nodes import modules_of
from megatron.capture.profile import parameters_of


def stages_of_layers(captured: Captured, *, multiple_of: int = 1) -> tuple[int, ...]:
    """The stage of each block, in the order of `blocks_of`.

    `multiple_of`: a number of ranks. The neighbouring layers with the fewest parameters are joined until the number of
    stages is a multiple of it.

    Raises ValueError for a model with fewer layers than `multiple_of`, or without any.
    """
    blocks = blocks_of(captured)
    nodes = captured.nodes
    place = {nodes[number]: index for index, block in enumerate(blocks) for number in block}
    layers: dict[str, int] = {}
    raw: list[int] = []
    for block in blocks:
        inputs = [place[each] for number in block for each in nodes[number].all_input_nodes if each in place]
        least = max((raw[index] for index in inputs if index < len(raw)), default=0)
        layer = next(filter(None, (_layer_of(nodes[number]) for number in block)), None)
        raw.append(least if layer is None else max(least, layers.setdefault(layer, len(layers))))
    if len(layers) < max(2, multiple_of):
        raise ValueError(
            f"{captured.model_name} has {len(layers)} numbered layers, and a relay on {multiple_of} needs "
            f"{max(2, multiple_of)} at least; "
            + "give fewer devices, or " * (multiple_of > 2 <= len(layers))
            + "choose another --pipeline_schedule"
        )
    number_of = {stage: number for number, stage in enumerate(sorted(set(raw)))}
    stages = [number_of[stage] for stage in raw]
    while (max(stages) + 1) % multiple_of:
        sizes = _parameters(captured, blocks, stages)
        first = min(range(len(sizes) - 1), key=lambda stage: sizes[stage] + sizes[stage + 1])
        stages = [stage - (stage > first) for stage in stages]
    return tuple(stages)


def _layer_of(node) -> str | None:
    return next((path for path, _ in modules_of(node) if path.rpartition(".")[2].isdigit()), None)


def _parameters(captured: Captured, blocks, stages: list[int]) -> list[int]:
    """The number of elements of each stage's parameters."""
    names: list[set[str]] = [set() for _ in range(max(stages) + 1)]
    for stage, block in zip(stages, blocks, strict=True):
        names[stage].update(parameters_of(captured, block))
    return [sum(captured.parameters[name].numel() for name in own) for own in names]
