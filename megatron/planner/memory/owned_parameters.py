"""The part of the optimizer's state on the fullest replica if replicas own whole parameters (Muon).

The parameters of a rank are listed by size and dealt out by the rule of a run (`owners_of`). Models with experts are
not listed: an even part is assumed for them.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from megatron.pipeline.placement.mapping import owners_of
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.parameters import TrainingState, normalized_widths


def fullest_part(
    state: TrainingState, shape: Architecture, tensor: int, layers: Sequence[int], stages: Sequence[int]
) -> float:
    """The bytes of masters and moments on the fullest replica over those of all replicas, on one of `tensor` ranks.

    Args:
        layers: the number of layers of each stage.
        stages: the stages of the rank.
    """
    if shape.experts is not None:
        return 1 / state.data
    further = shape.further_of_stages(len(layers))
    parts = tuple((layers[stage], stage == 0, stage == len(layers) - 1, further[stage]) for stage in stages)
    return _fullest_part(state, shape, tensor, parts)


@lru_cache(maxsize=4096)
def _fullest_part(
    state: TrainingState, shape: Architecture, tensor: int, stages: tuple[tuple[int, bool, bool, int], ...]
) -> float:
    """`fullest_part` for a model without experts.

    `stages`: for each stage the number of layers, whether it is the first, whether it is the last, and the number of
    its layers of multi-token prediction.
    """
    sizes: list[float] = []
    pinned = []
    for num_layers, is_first, is_last, further in stages:
        of_stage = parameters(shape, tensor, num_layers, is_first=is_first, is_last=is_last, further=further)
        for kind, count in of_stage:
            if kind == _EMBEDDING and shape.shares_embedding:
                pinned.append(len(sizes))
            sizes.append(state.optimizer(count, num_versions=1, matrices=count if kind == _MATRIX else 0, part=1.0))
    held = [0.0] * state.data
    for size, owner in zip(sizes, owners_of(sizes, state.data, pinned=pinned), strict=True):
        held[owner] += size
    return max(held) / sum(held) if sizes else 1 / state.data


_MATRIX, _EMBEDDING, _OUTPUT, _OTHER = "matrix", "embedding", "output", "other"


def parameters(
    shape: Architecture, tensor: int, num_layers: int, *, is_first: bool, is_last: bool, further: int = 0
) -> Iterator[tuple[str, int]]:
    """(kind, elements on one of `tensor` ranks) of each parameter of a stage without experts, whose `further` last
    layers are those of multi-token prediction."""
    h, wide = shape.hidden_size, shape.ffn_hidden_size * (2 if shape.gated else 1)
    projected = shape.query_width + shape.key_width + shape.value_width
    norm = [(_OTHER, shape.hidden_size)] * shape.norm_vectors
    for _ in range(further):
        yield from norm * 3
        yield _MATRIX, 2 * h * h // tensor
    for _ in range(num_layers + further):
        yield from ((_MATRIX, rows * columns // tensor) for rows, columns in shape.attention_matrices)
        yield from ((_MATRIX, h * width // tensor) for width in (wide, shape.ffn_hidden_size))
        yield from [(_OTHER, shape.num_attention_heads // tensor)] * shape.sinks
        yield from norm * 2
        if shape.linear_biases:
            yield from [(_OTHER, projected // tensor)] * (shape.latents is None)
            yield from ((_OTHER, size) for size in (h, wide // tensor, h))
        elif shape.qkv_bias and shape.latents is None:
            yield _OTHER, projected // tensor
        if shape.qk_norm:
            yield from ((_OTHER, width) for width in normalized_widths(shape) for _ in range(shape.norm_vectors))
    others = []
    copies = further > 0 and not (shape.tied_embeddings and is_last)
    if (is_first or copies) and shape.vocabulary_size:
        yield _EMBEDDING, shape.vocabulary_size // tensor * h
    if is_first:
        others += [shape.num_positions * h, shape.num_token_types * h, shape.class_token * h]
        others += [shape.patch_elements * h, h if shape.patch_elements else 0]
    if is_last:
        yield from norm
        if shape.output_rows and not (shape.tied_embeddings and is_first):
            yield _EMBEDDING if shape.tied_embeddings else _OUTPUT, shape.output_rows // tensor * h
        others += [shape.num_classes * h, shape.num_classes] + [h * h, h] * shape.pooler
        if shape.masked_head:
            others += [h * h, h, shape.output_rows // tensor]
            yield from norm
        others += [h * h, h, 2 * h, 2] * shape.binary_head
    yield from ((_OTHER, each) for each in others if each)
