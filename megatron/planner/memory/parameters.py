"""How many parameters a rank holds, counted from the shape, and what each of them costs.

Matrices and what belongs to their outputs are split over tensor ranks; norms, positions, BERT's heads and the biases of
matrices whose outputs are summed stand on each of them. Experts lie on ranks by degrees of their own, and their router
stands on each. Tests compare with the modules themselves.

**Bytes.** Mixed precision with Adam takes 20 bytes a parameter (Smith et al. 2022; BPipe, section 1): 2 for the weight,
2 for the gradient, and in FP32 4 each for master, gradient and both moments. Here by part, since each changes with a
flag:

    weights        weight_bytes, for each weight version that is alive at once (2bw: 2)
    true weights   where the versions are predictions: weight_bytes again, unless the masters are the true weights
    gradients      gradient_bytes, for each buffer in use at once (2bw: 2, or 1 with the flag); weight_bytes more where
                   they are sums beside a backward's own
    masters        4 for 16-bit weights; with the distributed optimizer 4 also for FP32 weights of several versions
    FP32 copies    4 where gradients are kept in 16 bits: the optimizer steps with FP32 ones, which megatron.core makes
                   in the step and leaves behind it. Where a host steps stage by stage, of the largest
    moments        4 each: Adam 2, SGD with momentum 1

The distributed optimizer (ZeRO-1) divides the last three by the number of replicas: those of experts by theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.planner.memory.architecture import Architecture, ExpertDegrees

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


_FP32 = 4
PREDICTION_CHUNK = 64 * 2**20
"""Bytes of the masters from which a prediction steps at a time: as many as reach them first (provisional_step.py)."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """What is kept for each parameter.

    Attributes:
        num_moments: Adam 2, SGD 1 with momentum, else 0.
        keeps_gradient_copies: FP32 copies of gradients stay from step to step; else the step makes them.
        data: ranks with the same parameters, context parallel ones among them.
        expert_data: ranks with the same experts.
        sums_beside_gradients: gradients are FP32 sums of what a backward keeps in the type of weights.
        fp8_weights: linears have weights in FP8 alone, which are gathered so (`--fp8-param-gather`).
    """

    weight_bytes: int = 2
    gradient_bytes: int = 4
    num_moments: int = 2
    distributed_optimizer: bool = False
    data: int = 1
    keeps_gradient_copies: bool = False
    expert_data: int = 1
    fp8_weights: bool = False
    sums_beside_gradients: bool = False

    def weights(self, num_parameters: int, *, num_versions: int, predicts: bool = False) -> float:
        """The bytes of all weight versions. `predicts`: they are predictions."""
        steps_weights = self.weight_bytes == _FP32 and not self.distributed_optimizer  # there are no masters
        return float(num_parameters * self.weight_bytes * (num_versions + (predicts and steps_weights)))

    def fp8_copies(self, num_elements: int) -> float:
        """Bytes that linears' weights take in FP8, less what they do not take in 16 bits where they are FP8 alone."""
        return float(num_elements * (FP8_COPY_BYTES - self.fp8_weights * self.weight_bytes))

    def gathered(self, num_parameters: int, num_elements: int) -> float:
        """Bytes of the weights that replicas gather, `num_elements` of which are of linears."""
        return float(num_parameters * self.weight_bytes - self.fp8_weights * num_elements * (self.weight_bytes - 1))

    def gradients(self, num_parameters: int, *, num_buffers: int) -> float:
        """The bytes of all gradient buffers."""
        kept = self.gradient_bytes + (self.weight_bytes if self.sums_beside_gradients else 0)
        return float(num_parameters * kept * num_buffers)

    def optimizer(
        self, num_parameters: int, *, num_versions: int, stepped: int | None = None, experts: int = 0
    ) -> float:
        """Masters, FP32 copies of gradients, and moments.

        Args:
            stepped: how many parameters step at once; None: all.
            experts: how many of the parameters are of experts; where `stepped` is given, none.
        """
        keeps_masters = self.weight_bytes < _FP32 or (self.distributed_optimizer and num_versions > 1)
        copied = num_parameters if stepped is None else stepped
        part = self._part(num_parameters, experts)
        kept = _FP32 * num_parameters * (keeps_masters + self.num_moments) * part
        return kept + self._gradient_copies(copied, part)

    def copies_in_step(self, num_parameters: int, *, num_versions: int, experts: int = 0) -> float:
        """The bytes of these that are held in the step alone: none where batches overlap, whose steps come between
        forwards and backwards."""
        if self.keeps_gradient_copies or num_versions > 1:
            return 0.0
        return self._gradient_copies(num_parameters, self._part(num_parameters, experts))

    def _gradient_copies(self, num_parameters: int, part: float) -> float:
        """Bytes of the FP32 copies with which the optimizer steps a part of these."""
        return _FP32 * num_parameters * part if self.gradient_bytes < _FP32 else 0.0

    def _part(self, num_parameters: int, experts: int) -> float:
        """Which part of the parameters a rank steps."""
        return self.stepped(num_parameters, experts) / num_parameters if num_parameters else 1.0

    def prediction(self, num_parameters: int, *, largest: int, experts: int = 0) -> float:
        """The most that a provisional step copies at once: masters, moments and gradients, all in FP32.

        `largest`: elements of the largest parameter. `experts`: how many parameters are of experts.
        """
        masters = min(_FP32 * self.stepped(num_parameters, experts), PREDICTION_CHUNK + _FP32 * largest)
        return masters * (2 + self.num_moments)

    def stepped(self, num_parameters: int, experts: int = 0) -> float:
        """How many of the parameters a rank steps, of which some are of experts: of those that are split its part."""
        if not self.distributed_optimizer:
            return num_parameters
        return (num_parameters - experts) / self.data + experts / self.expert_data
