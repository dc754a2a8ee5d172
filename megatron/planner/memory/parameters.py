"""How many parameters a rank holds: megatron.core's modules, counted from the shape.

Matrices and what belongs to their outputs are split over tensor ranks; norms, positions, BERT's heads and the biases of
matrices whose outputs are summed stand on each of them. Tests compare with the modules themselves.
"""

from collections.abc import Sequence

from megatron.planner.memory.architecture import Architecture

FP8_COPY_BYTES = 2
"""Of an element that is multiplied in FP8: a byte as it is and a byte transposed, as Hopper's products want both."""


def layer_parameters(shape: Architecture, tensor: int) -> int:
    """Parameters of one transformer layer on one of `tensor` ranks."""
    h, projected = shape.hidden_size, shape.query_width + 2 * shape.key_width
    wide = shape.ffn_hidden_size * (2 if shape.gated else 1)
    split = shape.layer_matrices
    whole = 2 * shape.norm_vectors * h
    if shape.linear_biases:
        split += projected + wide
        whole += 2 * h
    elif shape.qkv_bias:
        split += projected
    if shape.qk_norm:
        whole += 2 * shape.norm_vectors * shape.kv_channels
    return split // tensor + whole


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
    rows = [shape.output_rows // tensor, shape.num_classes, shape.pooler * shape.hidden_size] if is_last else []
    if is_first:
        rows += [shape.vocabulary_size // tensor, shape.num_positions, shape.patch_elements]
    return max([of_layer, *(each * shape.hidden_size for each in rows)])


def stage_parameters(shape: Architecture, tensor: int, layers: Sequence[int]) -> tuple[int, ...]:
    """Parameters of one tensor rank of each stage. `layers`: how many layers each stage has."""
    last, of_layer = len(layers) - 1, layer_parameters(shape, tensor)
    return tuple(
        count * of_layer
        + (embedding_parameters(shape, tensor) if stage == 0 else 0)
        + (head_parameters(shape, tensor, holds_embedding=last == 0) if stage == last else 0)
        for stage, count in enumerate(layers)
    )
