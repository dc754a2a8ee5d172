"""The number of parameters of a rank, counted from the model's shape, and the bytes of each parameter.

Matrices and the biases of their outputs are split over tensor ranks. Norms, positions, BERT's heads and the biases of
matrices whose outputs are summed are whole on each tensor rank. Experts have parallel degrees of their own; the router
is whole on each rank. Tests compare the counts with the modules of megatron.core.

**Bytes.** Mixed precision with Adam takes 20 bytes a parameter (Smith et al. 2022; BPipe, section 1): 2 for the weight,
2 for the gradient, and in FP32 4 each for master, gradient and both moments. Flags change each part:

    weights        weight_bytes, for each weight version that is alive at once (2bw: 2)
    true weights   if the versions are predictions: weight_bytes again, unless the masters are the true weights
    gradients      gradient_bytes, for each buffer in use at once (2bw: 2, or 1 with the flag); weight_bytes more if
                   the buffers are sums and each backward has gradients of its own
    masters        4 for 16-bit weights; with the distributed optimizer 4 also for FP32 weights of several versions
    FP32 copies    4 if gradients are kept in 16 bits: the optimizer steps with FP32 copies, which megatron.core makes
                   in the step and frees after it. A host that steps stage by stage holds copies of the largest stage
    moments        4 each: Adam 2, SGD with momentum 1, Muon 1 of a matrix and 2 of the rest

The distributed optimizer (ZeRO-1) divides the last three parts by the number of replicas; for experts, by the number of
ranks with the same experts. With Muon replicas own whole parameters instead: FP32 weights then have no masters, and the
fullest replica has more than an even part (`owned_parameters.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.planner.memory.architecture import FP32, Architecture, ExpertDegrees
from megatron.planner.memory.muon import MuonSetting

FP8_COPY_BYTES = 2
"""Bytes of the FP8 copies of an element: one byte in the matrix and one in its transpose; Hopper's products need
both."""


def layer_parameters(shape: Architecture, tensor: int) -> int:
    """Parameters of one transformer layer without experts on one of `tensor` ranks."""
    return _layer_with_mlp(shape, tensor, shape.ffn_hidden_size)


def _layer_with_mlp(shape: Architecture, tensor: int, width: int) -> int:
    """Parameters of one layer on one rank with an MLP of `width` columns; 0: without an MLP."""
    h, projected = shape.hidden_size, shape.query_width + shape.key_width + shape.value_width
    wide = width * (2 if shape.gated else 1)
    split = shape.sinks * shape.num_attention_heads + shape.projections + shape.mlp_matrices(width)
    whole = 2 * shape.norm_vectors * h
    if shape.linear_biases:
        split += (0 if shape.latents else projected) + wide
        whole += (2 if width else 1) * h
    elif shape.qkv_bias and not shape.latents:
        split += projected
    if shape.qk_norm:
        whole += shape.norm_vectors * sum(normalized_widths(shape))
    return split // tensor + whole


def normalized_widths(shape: Architecture) -> tuple[int, ...]:
    """The lengths of the learned vectors of the norms of queries and keys, or of their latents."""
    latents = shape.latents
    if latents is None:
        return (shape.kv_channels, shape.kv_channels)
    return tuple(each for each in (latents.query_rank, latents.key_rank) if each)


def further_parameters(shape: Architecture, tensor: int) -> int:
    """Parameters of one layer of multi-token prediction on one of `tensor` ranks, without routed experts: three norms,
    the matrix that joins two vectors, and a transformer layer."""
    layer = routing_layer_parameters if shape.further_have_experts else layer_parameters
    return 3 * shape.norm_vectors * shape.hidden_size + joining_matrix(shape, tensor) + layer(shape, tensor)


def joining_matrix(shape: Architecture, tensor: int) -> int:
    """Elements of the matrix of a layer of multi-token prediction before its transformer layer, on one rank."""
    return 2 * shape.hidden_size * shape.hidden_size // tensor


def expert_parameters(shape: Architecture, degrees: ExpertDegrees) -> int:
    """Parameters of the routed experts of one layer on one rank."""
    experts = shape.experts
    wide = experts.ffn_hidden_size * (2 if shape.gated else 1)
    each = (shape.mlp_matrices(experts.ffn_hidden_size) + shape.linear_biases * wide) // degrees.tensor
    return experts.count // degrees.parallel * (each + shape.linear_biases * shape.hidden_size)


def routing_layer_parameters(shape: Architecture, tensor: int) -> int:
    """Parameters of one layer with experts on one of `tensor` ranks, without the routed experts: the router and the
    shared expert are included."""
    router = shape.experts.count * (shape.hidden_size + shape.linear_biases)
    return _layer_with_mlp(shape, tensor, shape.experts.shared_ffn_hidden_size) + router


def cross_attention_parameters(shape: Architecture, tensor: int) -> int:
    """Parameters of the cross-attention of a decoder layer and of its norm, on one of `tensor` ranks."""
    split, whole = shape.projections, shape.norm_vectors * shape.hidden_size
    if shape.linear_biases:
        split += shape.query_width + 2 * shape.key_width
        whole += shape.hidden_size
    return split // tensor + whole


def stage_matrices(
    shape: Architecture, tensor: int, layers: Sequence[int], degrees: ExpertDegrees | None = None
) -> tuple[int, ...]:
    """Elements of the linear layers of each stage on one rank, experts included, routers excluded."""
    of_layer = matrix_parameters(shape, tensor, 1)
    if shape.decoder is not None:
        crossing = zip(layers, shape.decoder.of_stages(layers), strict=True)
        return tuple(count * of_layer + own * (shape.projections // tensor) for count, own in crossing)
    if shape.experts is None and shape.further is None:
        return tuple(count * of_layer for count in layers)
    further = shape.further_of_stages(len(layers))
    joining = [count * joining_matrix(shape, tensor) for count in further]
    if shape.experts is None:
        return tuple(
            (count + more) * of_layer + matrix for count, more, matrix in zip(layers, further, joining, strict=True)
        )
    dense = shape.projections + shape.mlp_matrices(shape.experts.shared_ffn_hidden_size)
    own = degrees or ExpertDegrees(tensor=tensor)
    routed = shape.experts.count // own.parallel * (shape.mlp_matrices(shape.experts.ffn_hidden_size) // own.tensor)
    with_experts = _all_with_experts(shape, layers)
    return tuple(
        (count + more - some) * of_layer + some * (dense // tensor + routed) + matrix
        for count, more, some, matrix in zip(layers, further, with_experts, joining, strict=True)
    )


def _all_with_experts(shape: Architecture, layers: Sequence[int]) -> tuple[int, ...]:
    """The number of layers with experts of each stage, layers of multi-token prediction included."""
    further = shape.further_of_stages(len(layers))
    return tuple(
        some + more * shape.further_have_experts
        for some, more in zip(shape.layers_with_experts(layers), further, strict=True)
    )


def matrix_parameters(shape: Architecture, tensor: int, num_layers: int) -> int:
    """Elements of the linear layers of `num_layers` transformer layers without experts on one of `tensor` ranks."""
    return num_layers * (shape.layer_matrices // tensor)


def embedding_parameters(shape: Architecture, tensor: int) -> int:
    """Parameters of the embeddings of the first stage on one of `tensor` ranks."""
    rows = shape.vocabulary_size // tensor + shape.num_positions + shape.num_token_types + shape.class_token
    if shape.patch_elements:
        rows += shape.patch_elements + 1  # a linear layer with its bias
    return rows * shape.hidden_size


def head_parameters(shape: Architecture, tensor: int, *, holds_embedding: bool) -> int:
    """Parameters of the last stage after its layers: final norm, output layer and heads, on one of `tensor` ranks.

    `holds_embedding`: the last stage is the first stage too, and shares the embedding if embeddings are tied.
    """
    h, rows = shape.hidden_size, shape.output_rows // tensor
    count = shape.norm_vectors * h  # the final norm
    count += shape.num_classes * (h + 1) + shape.pooler * h * (h + 1)
    if not (shape.tied_embeddings and holds_embedding):
        count += rows * h
    if shape.masked_head:
        count += h * h + h + shape.norm_vectors * h + rows
    if shape.binary_head:
        count += h * h + h + 2 * h + 2
    if shape.decoder is not None and shape.decoder.output_bias:
        count += rows
    return count


def largest_parameter(shape: Architecture, tensor: int, *, is_first: bool, is_last: bool) -> int:
    """Elements of the largest parameter of a stage on one of `tensor` ranks."""
    wide = shape.ffn_hidden_size * (2 if shape.gated else 1)
    of_layer = max(shape.hidden_size * wide, *(rows * columns for rows, columns in shape.attention_matrices)) // tensor
    if shape.experts is not None:  # an upper bound: whole experts
        of_layer = max(of_layer, shape.hidden_size * shape.experts.ffn_hidden_size * (2 if shape.gated else 1))
    rows = [shape.output_rows // tensor, shape.num_classes, shape.pooler * shape.hidden_size] if is_last else []
    of_layer = max(of_layer, joining_matrix(shape, tensor) if shape.num_further else 0)
    if is_first:
        rows += [shape.vocabulary_size // tensor, shape.num_positions, shape.patch_elements]
    return max([of_layer, *(each * shape.hidden_size for each in rows)])


def stage_parameters(
    shape: Architecture, tensor: int, layers: Sequence[int], degrees: ExpertDegrees | None = None
) -> tuple[int, ...]:
    """Parameters of one tensor rank of each stage.

    Args:
        layers: the number of layers of each stage.
        degrees: how experts are split over ranks; None: each tensor rank has a part of every expert.
    """
    last, of_layer = len(layers) - 1, layer_parameters(shape, tensor)
    further = shape.further_of_stages(len(layers))
    of_further = further_parameters(shape, tensor) if shape.further else 0
    copy = shape.vocabulary_size // tensor * shape.hidden_size
    with_experts = shape.layers_with_experts(layers)
    routing = routing_layer_parameters(shape, tensor) - of_layer if shape.experts else 0
    experts = stage_expert_parameters(shape, layers, degrees or ExpertDegrees(tensor=tensor))
    of_decoder = _beyond_one_stack(shape, tensor, layers)
    return tuple(
        count * of_layer
        + of_decoder[stage]
        + with_experts[stage] * routing
        + experts[stage]
        + (embedding_parameters(shape, tensor) if stage == 0 else 0)
        + (head_parameters(shape, tensor, holds_embedding=last == 0) if stage == last else 0)
        + further[stage] * of_further
        + (copy if further[stage] and stage > 0 and not (shape.tied_embeddings and stage == last) else 0)
        for stage, count in enumerate(layers)
    )


def _beyond_one_stack(shape: Architecture, tensor: int, layers: Sequence[int]) -> list[int]:
    """Parameters that the stages of a T5 have beyond those of one stack: cross-attentions, the encoder's final norm,
    and the tables of relative positions."""
    if shape.decoder is None:
        return [0] * len(layers)
    of_layer = cross_attention_parameters(shape, tensor)
    counts = [own * of_layer for own in shape.decoder.of_stages(layers)]
    counts[0] += 2 * shape.decoder.distances * shape.num_attention_heads
    counts[shape.decoder.stage_behind_encoder(layers)] += shape.norm_vectors * shape.hidden_size
    return counts


def stage_expert_parameters(shape: Architecture, layers: Sequence[int], degrees: ExpertDegrees) -> tuple[int, ...]:
    """Parameters of the routed experts of each stage on one rank."""
    if shape.experts is None:
        return (0,) * len(layers)
    of_layer = expert_parameters(shape, degrees)
    return tuple(count * of_layer for count in _all_with_experts(shape, layers))


LAST_UPDATE_BYTES = 6 * 4
"""Bytes that error feedback reads and writes for an FP32 master: to copy it before the step, and to compute 2 new - old
from the copy."""
PREDICTION_CHUNK = 64 * 2**20
"""Bytes of masters that a prediction steps at a time; the last parameter may exceed the limit (provisional_step.py)."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The bytes that training keeps for each parameter.

    Attributes:
        weight_bytes, gradient_bytes: bytes of an element of a weight, and of a gradient.
        num_moments: Adam 2, SGD with momentum 1, else 0.
        moment_bytes: bytes of an element of a moment, on average.
        owned_part: if replicas own whole parameters, the fraction of the optimizer's bytes on the fullest replica;
            None: an even part.
        muon: how Muon orthogonalises matrices, which have one moment; None: the optimizer is not Muon.
        keeps_gradient_copies: FP32 copies of gradients stay from step to step; else each step makes and frees them.
        data: number of ranks with the same parameters, context parallel ranks included.
        expert_data: number of ranks with the same experts.
        sums_beside_gradients: the gradient buffers are FP32 sums; the gradients of each backward, in the type of the
            weights, are kept beside them.
        keeps_state: optimistic steps keep a copy of weights, masters and moments.
        multiplies_elsewhere: an optimistic step unscales gradients (by the inverse loss scale) in new memory.
        fp8_weights: linear layers have weights in FP8 only, and gather them in FP8 (`--fp8-param-gather`).
    """

    weight_bytes: int = 2
    gradient_bytes: int = 4
    num_moments: int = 2
    moment_bytes: float = FP32
    distributed_optimizer: bool = False
    data: int = 1
    keeps_gradient_copies: bool = False
    expert_data: int = 1
    fp8_weights: bool = False
    sums_beside_gradients: bool = False
    muon: MuonSetting | None = None
    owned_part: float | None = None
    keeps_state: bool = False
    multiplies_elsewhere: bool = False

    @property
    def owns_parameters(self) -> bool:
        """Whether replicas own whole parameters, and not shards."""
        return self.distributed_optimizer and self.muon is not None

    @property
    def _shards(self) -> bool:
        return self.distributed_optimizer and self.muon is None

    def weights(self, num_parameters: int, *, num_versions: int, predicts: bool = False) -> float:
        """Bytes of all weight versions. `predicts`: the versions are predictions, beside the true weights."""
        copies = float(num_versions)
        if predicts and self.weight_bytes == FP32 and not self._shards:  # there are no masters
            copies += self._part(num_parameters, 0)
        return num_parameters * self.weight_bytes * copies

    def fp8_copies(self, num_elements: int) -> float:
        """Bytes of the FP8 copies of linear layers' weights. With `fp8_weights` the copies replace the weights, whose
        bytes are subtracted."""
        return float(num_elements * (FP8_COPY_BYTES - self.fp8_weights * self.weight_bytes))

    def gathered(self, num_parameters: int, num_elements: int) -> float:
        """Bytes of the weights that replicas gather. `num_elements`: how many parameters are weights of linear
        layers."""
        return float(num_parameters * self.weight_bytes - self.fp8_weights * num_elements * (self.weight_bytes - 1))

    def gradients(self, num_parameters: int, *, num_buffers: int) -> float:
        """Bytes of all gradient buffers."""
        kept = self.gradient_bytes + (self.weight_bytes if self.sums_beside_gradients else 0)
        return float(num_parameters * kept * num_buffers)

    def optimizer(
        self,
        num_parameters: int,
        *,
        num_versions: int,
        matrices: int = 0,
        stepped: int | None = None,
        experts: int = 0,
        part: float | None = None,
    ) -> float:
        """Bytes of masters, FP32 copies of gradients, and moments on one rank.

        Args:
            matrices: number of the parameters that belong to matrices of layers.
            stepped: number of parameters that step at once; None: all.
            experts: number of the parameters that belong to experts; 0 if `stepped` is given.
            part: the fraction of the parameters that the rank steps; None: as the method `stepped` computes it.
        """
        keeps_masters = self.weight_bytes < FP32 or (self._shards and num_versions > 1)
        copied = num_parameters if stepped is None else stepped
        part = self._part(num_parameters, experts) if part is None else part
        kept = num_parameters * (FP32 * keeps_masters + self.moment_bytes * self.num_moments) * part
        if self.muon is not None:
            kept -= FP32 * matrices * (self.num_moments - 1) * part
        return kept + self._gradient_copies(copied, part)

    def copies_in_step(self, num_parameters: int, *, num_versions: int, experts: int = 0) -> float:
        """Bytes of FP32 copies of gradients that only the step holds, apart from forwards and backwards.

        Returns 0 with several versions: batches overlap, so that a step comes between forwards and backwards.
        """
        if self.keeps_gradient_copies or num_versions > 1:
            return 0.0
        return self._gradient_copies(num_parameters, self._part(num_parameters, experts))

    def kept_state(self, num_parameters: int) -> float:
        """Bytes of the copy that optimistic steps keep, on a rank whose optimizer is not sharded."""
        if not self.keeps_state:
            return 0.0
        return (
            num_parameters * self.weight_bytes
            + self.optimizer(num_parameters, num_versions=1)
            - (self._gradient_copies(num_parameters, 1.0))
        )

    def _gradient_copies(self, num_parameters: int, part: float) -> float:
        """Bytes of the FP32 copies of gradients for the given part of the parameters."""
        return FP32 * num_parameters * part if self.gradient_bytes < FP32 or self.multiplies_elsewhere else 0.0

    def _part(self, num_parameters: int, experts: int) -> float:
        """The fraction of its parameters that a rank steps."""
        return self.stepped(num_parameters, experts) / num_parameters if num_parameters else 1.0

    def prediction(self, num_parameters: int, *, largest: int, experts: int = 0) -> float:
        """The most bytes that a provisional step copies at once: masters, moments and gradients, all in FP32.

        `largest`: elements of the largest parameter. `experts`: number of the parameters that belong to experts.
        """
        masters = min(FP32 * self.stepped(num_parameters, experts), PREDICTION_CHUNK + FP32 * largest)
        return masters * (2 + self.num_moments)

    def last_update(self, num_parameters: int, *, experts: int = 0) -> float:
        """Bytes of the FP32 copies that a step makes of the parameters before it updates them.

        Error feedback computes the last update from the copies.
        """
        return FP32 * self.stepped(num_parameters, experts)

    def stepped(self, num_parameters: int, experts: int = 0) -> float:
        """The number of parameters that a rank steps: all, or a part with the distributed optimizer.

        `experts`: number of the parameters that belong to experts.
        """
        if not self.distributed_optimizer:
            return num_parameters
        if self.owned_part is not None:
            return num_parameters * self.owned_part
        return (num_parameters - experts) / self.data + experts / self.expert_data
