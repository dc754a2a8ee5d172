"""The memory of a GPU whose weights are split over replicas.

    shards           masters and moments in FP32, gradients as they are reduced, and what software keeps of the weights
                     in the type of products; of each the part of one replica
    gathered         embedding, norm and head, and two layers: the one that is computed and the one that comes, which
                     lies there twice where weights are copied out of a buffer; with stage 2 all weights, a layer
                     twice likewise, and their copies in FP8
    gradients        of embedding and head, and of two layers: one that is computed, in the type of products, and one
                     that is reduced
    activations      of one microbatch, as without a pipeline

Where each matrix is gathered by itself, its size takes a layer's place, and as many live as DeepSpeed lets live.
"""

from megatron.planner.job.configuration import Configuration
from megatron.planner.job.sharding import ShardingRuntime
from megatron.planner.job.software import Software
from megatron.planner.memory.activations import Activations
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.memory import MemoryParts, RankMemory
from megatron.planner.memory.parameters import (
    largest_parameter,
    layer_parameters,
    matrix_parameters,
    stage_parameters,
)

_FP32 = 4
_MOMENTS = 2
_MOST_LIVE = 1_000_000_000
_REDUCED_TOGETHER = 500_000_000
"""DeepSpeed's `stage3_max_live_parameters` and `reduce_bucket_size`, by default; a larger parameter is alone."""


def sharded_memory(shape: Architecture, software: Software, configuration: Configuration) -> tuple[RankMemory, ...]:
    """The memory of a GPU; all GPUs need the same."""
    sharding, runtime = configuration.sharding, software.sharding
    assert sharding is not None
    setting = software.activation_setting(configuration)
    activations, tensor, layers = Activations(shape, setting), configuration.tensor, shape.num_layers
    (total,) = stage_parameters(shape, tensor, (layers,))
    of_layer = layer_parameters(shape, tensor)
    root, own, ends = total - layers * of_layer, total / sharding.shards, {"is_first": True, "is_last": True}
    element, gradient = software.element_bytes, software.gradient_bytes
    copies = _FP32 if gradient < _FP32 else 0  # the optimizer steps with FP32 ones
    matrices = matrix_parameters(shape, tensor, layers) if software.fp8 else 0
    state = software.training_state(configuration)
    kept = state.gathered(total, matrices) / sharding.shards if runtime.keeps_shards and element < _FP32 else 0.0
    stays = sharding.stage == 2
    casts = state.fp8_copies(matrices) if stays else 0.0
    gathered = _gathered(shape, tensor, root, of_layer, runtime, stays=stays)
    saved = activations.saved(layers, **ends)
    parts = MemoryParts(
        weights=kept + element * gathered + casts,
        gradients=gradient * own + _unsharded(shape, tensor, root, of_layer, runtime, element, gradient),
        optimizer=_FP32 * (1 + _MOMENTS) * own,
        step=copies * own,
        activations=saved,
        workspace=activations.workspace(layers, **ends),
        transfers=0.0,
    )
    return (
        RankMemory(
            rank=0, stages=(0,), layers=(layers,), num_parameters=total, saved_microbatches=1,
            bytes_per_microbatch=saved, parts=parts,
        ),
    )  # fmt: skip


def _gathered(
    shape: Architecture, tensor: int, root: int, of_layer: int, runtime: ShardingRuntime, *, stays: bool
) -> float:
    """The number of parameters that are gathered at once: all, if they stay gathered. If they are copied out of a
    buffer, one unit counts twice."""
    total, unit = root + shape.num_layers * of_layer, of_layer
    live = root + min(2, shape.num_layers) * of_layer
    if runtime.by_matrix:
        unit = largest_parameter(shape, tensor, is_first=True, is_last=True)
        live = min(total, max(unit, _MOST_LIVE))
    return (total if stays else live) + runtime.copies * unit


def _unsharded(
    shape: Architecture, tensor: int, root: int, of_layer: int, runtime: ShardingRuntime, element: int, gradient: int
) -> float:
    """Bytes of gradients that are not scattered yet, and of a gradient that is copied to be scattered."""
    if runtime.by_matrix:
        largest = largest_parameter(shape, tensor, is_first=True, is_last=True)
        reduced = min(root + shape.num_layers * of_layer, max(largest, _REDUCED_TOGETHER))
        return gradient * (reduced + runtime.copies * largest)
    return element * root + (element + gradient) * of_layer
