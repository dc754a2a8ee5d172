"""How many parameters a rank holds: megatron.core's modules, counted from the shape.

Matrices and what belongs to their outputs are split over tensor ranks; norms, positions, BERT's heads and the biases of
matrices whose outputs are summed stand on each of them. Experts lie on ranks by degrees of their own, and their router
stands on each. Tests compare with the modules themselves.
"""

from collections.abc import Sequence

from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.experts import ExpertDegrees

FP8_COPY_BYTES = 2
"""Of an element that is multiplied in FP8: a byte as it is and a byte transposed, as Hopper's products want both."""


def layer_parameters(shape: Architecture, tensor: int) -> int:
    """Parameters of one transformer layer without experts on one of `tensor` ranks."""
    return _layer_with_mlp(shape, tensor, shape.ffn_hidden_size)


def _layer_with_mlp(shape: Architecture, tensor: int, width: int) -> int:
    """The same with an MLP of so many columns; 0: without one."""
    h, projected = shape.hidden_size, shape.query_width + 2 * shape.key_width
    wide = width * (2 if shape.gated else 1)
    split = shape.projections + shape.mlp_matrices(width)
    whole = 2 * shape.norm_vectors * h
    if shape.linear_biases:
        split += projected + wide
        whole += (2 if width else 1) * h
    elif shape.qkv_bias:
        split += projected
    if shape.qk_norm:
        whole += 2 * shape.norm_vectors * shape.kv_channels
    return split // tensor + whole


def expert_parameters(shape: Architecture, degrees: ExpertDegrees) -> int:
    """Parameters of the routed experts of one layer on one rank."""
    experts = shape.experts
    wide = experts.ffn_hidden_size * (2 if shape.gated else 1)
    each = (shape.mlp_matrices(experts.ffn_hidden_size) + shape.linear_biases * wide) // degrees.tensor
    return experts.count // degrees.parallel * (each + shape.linear_biases * shape.hidden_size)


def routing_layer_parameters(shape: Architecture, tensor: int) -> int:
    """Parameters of one layer with experts on one of `tensor` ranks, but for the routed experts: with the router, and
    with the shared expert."""
    router = shape.experts.count * (shape.hidden_size + shape.linear_biases)
    return _layer_with_mlp(shape, tensor, shape.experts.shared_ffn_hidden_size) + router


def stage_matrices(
    shape: Architecture, tensor: int, layers: Sequence[int], degrees: ExpertDegrees | None = None
) -> tuple[int, ...]:
    """Elements of the linears of each stage's layers on one rank, those of its experts among them, without routers."""
    of_layer = matrix_parameters(shape, tensor, 1)
    if shape.experts is None:
        return tuple(count * of_layer for count in layers)
    dense = shape.projections + shape.mlp_matrices(shape.experts.shared_ffn_hidden_size)
    own = degrees or ExpertDegrees(tensor=tensor)
    routed = shape.experts.count // own.parallel * (shape.mlp_matrices(shape.experts.ffn_hidden_size) // own.tensor)
    return tuple(
        (count - some) * of_layer + some * (dense // tensor + routed)
        for count, some in zip(layers, shape.layers_with_experts(layers), strict=True)
    )


def matrix_parameters(shape: Architecture, tensor: int, num_layers: int) -> int:
    """Elements of the linears of so many layers on one of `tensor` ranks."""
    return num_layers * (shape.layer_matrices // tensor)


def embedding_parameters(shape: Architecture, tensor: int) -> int:
    """What the first stage holds before its layers."""
    rows = shape.vocabulary_size // tensor + shape.num_positions + shape.num_token_types + shape.class_token
    if shape.patch_elements:
        rows += shape.patch_elements + 1  # a linear layer with its bias
    return rows * shape.hidden_size


def head_parameters(shape: Architecture, tensor: int, *, holds_embedding: bool) -> int:
    """What the last stage holds after its layers. `holds_embedding`: it is the first stage too."""
    h, rows = shape.hidden_size, shape.output_rows // tensor
    count = shape.norm_vectors * h  # the final norm
    count += shape.num_classes * (h + 1) + shape.pooler * h * (h + 1)
    if not (shape.tied_embeddings and holds_embedding):
        count += rows * h
    if shape.masked_head:
        count += h * h + h + shape.norm_vectors * h + rows
    if shape.binary_head:
        count += h * h + h + 2 * h + 2
    return count


def largest_parameter(shape: Architecture, tensor: int, *, is_first: bool, is_last: bool) -> int:
    """Elements of the largest parameter that one of `tensor` ranks has of a stage."""
    wide = shape.ffn_hidden_size * (2 if shape.gated else 1)
    projected = max(shape.query_width + 2 * shape.key_width, wide)
    of_layer = shape.hidden_size * projected // tensor
    if shape.experts is not None:  # whole ones, at most
        of_layer = max(of_layer, shape.hidden_size * shape.experts.ffn_hidden_size * (2 if shape.gated else 1))
    rows = [shape.output_rows // tensor, shape.num_classes, shape.pooler * shape.hidden_size] if is_last else []
    if is_first:
        rows += [shape.vocabulary_size // tensor, shape.num_positions, shape.patch_elements]
    return max([of_layer, *(each * shape.hidden_size for each in rows)])


def stage_parameters(
    shape: Architecture, tensor: int, layers: Sequence[int], degrees: ExpertDegrees | None = None
) -> tuple[int, ...]:
    """Parameters of one tensor rank of each stage.

    Args:
        layers: how many layers each stage has.
        degrees: how experts lie on ranks; None: all on each, split as the rest.
    """
    last, of_layer = len(layers) - 1, layer_parameters(shape, tensor)
    with_experts = shape.layers_with_experts(layers)
    routing = routing_layer_parameters(shape, tensor) - of_layer if shape.experts else 0
    experts = stage_expert_parameters(shape, layers, degrees or ExpertDegrees(tensor=tensor))
    return tuple(
        count * of_layer
        + with_experts[stage] * routing
        + experts[stage]
        + (embedding_parameters(shape, tensor) if stage == 0 else 0)
        + (head_parameters(shape, tensor, holds_embedding=last == 0) if stage == last else 0)
        for stage, count in enumerate(layers)
    )


def stage_expert_parameters(shape: Architecture, layers: Sequence[int], degrees: ExpertDegrees) -> tuple[int, ...]:
    """Of these, the parameters of routed experts, whose replicas are others."""
    if shape.experts is None:
        return (0,) * len(layers)
    of_layer = expert_parameters(shape, degrees)
    return tuple(count * of_layer for count in shape.layers_with_experts(layers))
