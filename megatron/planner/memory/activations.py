"""Bytes that one microbatch saves between its forward and its backward on one GPU.

The count follows Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models", section 4),
where a layer saves s b h (34 + 5 a s / h) bytes in 16 bits, and BPipe's equations 4 to 6 (appendix B). Each tensor is
counted separately, so that the count also holds for other widths, grouped queries, gated MLPs, FP32 and no dropout. The
paper's count for a layer, in bytes per token, with e bytes an element:

    both norms          their inputs                                   2 e h        shared where sequences are split
    attention           input of the projection                        e h          shared where sequences are split
                        queries, keys, values                          3 e h        split
                        scores: softmax, dropout's mask and result     (2e+1) a s   split
                        input of the output projection                 e h          split
                        dropout's mask                                 h            shared where sequences are split
    MLP                 input                                          e h          shared where sequences are split
                        input of the activation, its result            8 e h        split
                        dropout's mask                                 h            shared where sequences are split

"split" is divided by t; "shared" is divided by t with sequence parallelism only. Flash attention saves no scores. With
grouped queries unfused attention repeats keys and values for every head; otherwise keys and values are kept as views of
the projection's result, and the queries of several groups are a copy.

With context parallelism a rank has a part of the tokens, and so a part of all tensors. Unfused attention that gathers
keys and values keeps the keys and values of whole sequences. A layer with experts has the tensors of its routed experts
(below) instead of the tensors of the MLP. A layer that is recomputed as a whole keeps only its input: e h, shared as
above. (Equation 6 of BPipe does not divide the input by t; the published feasibility of BPipe's configurations agrees
with dividing.)

If linear layers multiply in FP8, their inputs are kept in one byte an element, and flash attention also keeps its
result in 16 bits.

Masks take a byte an element, as CUDA kernels save them. On a CPU a mask takes as much as an activation; with that size
the counts equal the bytes that megatron.core's layers save there, as a test checks.

The table below has the bytes that routed experts of a layer keep for each token that a rank routes. A rank routes the
tokens of its part of a sequence; without sequence parallelism that is the whole sequence. Under balanced load a rank
receives as many copies of tokens as it sends, times the number of ranks with parts of the same experts (etp), since
each of these ranks gets all tokens of its experts. With k copies of a token, experts f wide, and e bytes an element:

    permuted copies, the experts' input                    k etp e h
    input of the activation, its result                    k 2 e f, gated k 3 e f: etp ranks have 1 / etp of etp tokens
    router: a probability and a bit for each expert        5 E
    indices and probabilities of the copies                24 topk

In FP8 the inputs of both matrices take one byte an element: h etp for the first and f for the second. An activation
without a fused kernel that applies the router's weight also keeps its result before the weighting: k 3 e f in all. A
gated one then also keeps its two halves and the result of its gate: k 6 e f. megatron.core has such fused kernels for
gated MLPs only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.planner.memory.architecture import FP32, Architecture, ExpertDegrees
from megatron.planner.memory.recompute import (
    CORE_ATTENTION,
    EVERY_OTHER_PRODUCT,
    EXPERTS,
    LATENTS_UP,
    MLP,
    NORM,
    NOTHING,
    Recompute,
)

_ROUTER, _INDEX = 4 + 1, 2 * 8 + 2 * 4


def routed(
    shape: Architecture,
    degrees: ExpertDegrees,
    *,
    element_bytes: int,
    input_bytes: int,
    fused_gate: bool,
    further_gates: int = 0,
) -> float:
    """Bytes per token that routed experts keep from the forward to the backward.

    `input_bytes`: bytes of an element of a saved input of a linear layer.
    """
    experts = shape.experts
    columns = (2 if fused_gate else 5 + further_gates) if shape.gated else 2
    inputs = degrees.tensor * shape.hidden_size + experts.ffn_hidden_size
    kept = input_bytes * inputs + element_bytes * columns * experts.ffn_hidden_size
    return experts.copies * kept + _ROUTER * experts.count + _INDEX * experts.topk


def routed_gradients(shape: Architecture, degrees: ExpertDegrees, *, element_bytes: int) -> float:
    """Bytes per token that routed experts keep between the halves of a split backward: inputs of the experts' matrices,
    and gradients of their outputs."""
    experts, gate = shape.experts, 2 if shape.gated else 1
    width = 2 * degrees.tensor * shape.hidden_size + (1 + gate) * experts.ffn_hidden_size
    return experts.copies * element_bytes * width


def exchanged_copies(shape: Architecture, degrees: ExpertDegrees, *, element_bytes: int) -> float:
    """Bytes per token of the sent and the received copies, while copies move between ranks or are sorted by expert."""
    return shape.experts.copies * element_bytes * shape.hidden_size * (1 + degrees.tensor)


@dataclass(frozen=True, kw_only=True)
class ActivationSetting:
    """The settings that decide which activations are saved, and in how many bytes.

    Attributes:
        tensor: tensor parallel size (t).
        micro_batch_size: sequences in a microbatch.
        element_bytes: bytes of an element of an activation: 2 or 4.
        residual_bytes: bytes of an element of the residual stream, which stages send to each other.
        sequence_parallel: activations that are not split by heads or columns are split along the sequence.
        saves_scores: the attention keeps its scores (unfused); flash attention does not.
        softmax_in_fp32: if scores are kept, the softmax is kept in FP32, and without dropout also in 16 bits.
        mask_bytes: bytes of an element of a dropout mask.
        fused_gate: a gated MLP keeps the input of its gate once, as fused kernels do; else it also keeps both factors
            of its result, since megatron.core adds an offset to one of them.
        further_gates: tensors as wide as the hidden layer that an unfused gate keeps besides: the sigmoid of quick
            GELU, and the clamped halves.
        recompute: the part of the forward that a backward recomputes.
        fuses_loss: the loss keeps only the softmax of the logits; else also the gradients of the softmax and of the
            logits in FP32.
        fp8: linear layers multiply in FP8.
        unquantized: with `fp8`, how many layers at the beginning and at the end of the model do not.
        context: context parallel size (cp): the number of ranks that share a sequence.
        gathers_keys: context parallel ranks gather keys and values of whole sequences; else they pass keys and values
            around a ring.
        experts: how experts are split over ranks; None: each tensor rank has a part of every expert.
        defers_gathered: the gathered inputs of column-parallel layers are kept for W, as in Transformer Engine; else W
            gathers them again.
    """

    tensor: int = 1
    micro_batch_size: int
    element_bytes: int = 2
    residual_bytes: int = 2
    sequence_parallel: bool = False
    saves_scores: bool = True
    softmax_in_fp32: bool = False
    mask_bytes: int = 1
    fused_gate: bool = True
    further_gates: int = 0
    recompute: Recompute = NOTHING
    fuses_loss: bool = True
    fp8: bool = False
    unquantized: tuple[int, int] = (0, 0)
    context: int = 1
    gathers_keys: bool = False
    experts: ExpertDegrees | None = None
    defers_gathered: bool = False

    @property
    def expert_degrees(self) -> ExpertDegrees:
        return self.experts or ExpertDegrees(tensor=self.tensor)

    @property
    def input_bytes(self) -> int:
        """Bytes of an element of a saved input of a linear layer."""
        return 1 if self.fp8 else self.element_bytes


class Activations:
    """Bytes of the activations of one microbatch on one GPU, by part of the model."""

    def __init__(self, shape: Architecture, setting: ActivationSetting) -> None:
        self.shape, self.setting = shape, setting
        self.tokens = shape.sequence_length // setting.context * setting.micro_batch_size
        self._shared = setting.tensor if setting.sequence_parallel else 1

    # --- a stage

    def by_stage(self, layers: Sequence[float]) -> tuple[list[float], list[float], list[float]]:
        """`saved`, `workspace` and `deferred` of each stage. `layers`: the number of layers of each stage."""
        with_experts, further = self.shape.layers_with_experts(layers), self.shape.further_of_stages(len(layers))
        saved, workspace, deferred = (
            by_stage(count, layers, with_experts, further) for count in (self.saved, self.workspace, self.deferred)
        )
        return saved, workspace, deferred

    def saved(
        self, num_layers: float, *, is_first: bool, is_last: bool, with_experts: float = 0, further: int = 0
    ) -> float:
        """Bytes that a stage keeps of a microbatch from its forward to its backward.

        `with_experts`: the number of its layers that have experts. `further`: the number of its layers of multi-token
        prediction, which do not count as layers.
        """
        if self.setting.recompute.whole_stage:
            return 0.0 if is_first else self.boundary
        total = self._saved_layers(num_layers, with_experts)
        if is_first:
            total += self._embedding_mask + self._patches
        if is_last:
            total += self._heads
        if further and self.setting.recompute.method == "uniform":  # "block" recomputes none of these layers
            return total + further * (2 * self.boundary + self._embedding_mask)
        return total + further * (self._joined + self._further_layer(self.setting.recompute.modules))

    def workspace(
        self, num_layers: float, *, is_first: bool, is_last: bool, with_experts: float = 0, further: int = 0
    ) -> float:
        """Bytes that a backward holds beside saved activations.

        They are the activations recomputed at once, without their saved input, and the larger of two parts: the
        gradient of the logits, or the tensors that ranks with shared sequences or experts exchange.
        """
        recompute, full = self.setting.recompute, self._largest_layer(frozenset(), num_layers, with_experts)
        if recompute.whole_stage:
            total = num_layers * full + is_first * (self._embedding_mask + self._patches) + is_last * self._heads
            total += further * (self._joined + self._further_layer(frozenset()))
        elif recompute.method == "uniform":
            total = max(0.0, min(recompute.num_layers, num_layers) * full - self.boundary)
            if further:
                total = max(total, self._joined + self._further_layer(frozenset()) - 2 * self.boundary)
        elif recompute.method == "block":
            total = (full - self.boundary) * (num_layers > 0)
        else:
            kept = self._largest_layer(recompute.modules, num_layers, with_experts)
            total = (full - kept) * (num_layers > 0)
        handed = max((num_layers > 0) * self._keys_of_others, self._copies if with_experts else 0.0)
        return total + max(is_last * self.logits_gradient, handed)

    def deferred(
        self, num_layers: float, *, is_first: bool, is_last: bool, with_experts: float = 0, further: int = 0
    ) -> float:
        """Bytes that a stage keeps of a microbatch between the halves of a split backward, for gradients of weights:
        inputs of linear layers and of the output layer, and gradients of their outputs."""
        shape, setting = self.shape, self.setting
        h, e, gate = shape.hidden_size, setting.element_bytes, 2 if shape.gated else 1
        shared = 2 * h * (self._shared if setting.defers_gathered else 1)  # inputs of column-parallel layers
        gathered = 2 * h  # gradients of outputs of row-parallel layers
        split = (1 + gate) * shape.ffn_hidden_size + shape.result_width
        split += sum(rows for rows, _ in shape.attention_matrices[:-1])
        if shape.latents:
            shared += shape.latents.query_rank + shape.latents.key_rank
        layer = setting.input_bytes * (shared / self._shared + gathered + split / setting.tensor)
        head = (1 + shape.num_further) * e * (h / self._shared + shape.output_rows / setting.tensor)
        joining = e * (2 * h / self._shared + h / setting.tensor)
        if further:
            num_layers, with_experts = num_layers + further, with_experts + further * shape.further_have_experts
        return self.tokens * (
            further * joining
            + num_layers * layer
            + (with_experts and with_experts * self._deferred_to_experts)
            + is_last * head
        )

    @property
    def _deferred_to_experts(self) -> float:
        """Bytes per token that a layer with experts keeps for its W beyond a layer without experts; may be negative."""
        shape, setting = self.shape, self.setting
        width = shape.experts.shared_ffn_hidden_size
        gathered = -shape.hidden_size * (width == 0)
        split = (width - shape.ffn_hidden_size) * (3 if shape.gated else 2)
        return setting.input_bytes * (gathered + split / setting.tensor) + self._per_token(routed_gradients)

    # --- parts

    @property
    def boundary(self) -> float:
        """Bytes of the residual stream of a microbatch between two layers or two stages."""
        return self.setting.residual_bytes * self.shape.hidden_size * self.tokens / self._shared

    @property
    def head(self) -> float:
        """Bytes that the final norm, the output layer and the loss save: their inputs, and the softmax of the logits in
        FP32. A classifier of one token is not counted."""
        h, e = self.shape.hidden_size, self.setting.element_bytes
        dense = 3 * e * h if self.shape.masked_head else 0  # BERT's dense layer, its GELU and norm
        width = (self.setting.residual_bytes * h + e * h + dense) / self._shared
        return self.tokens * (width + FP32 * self.shape.output_rows / self.setting.tensor)

    @property
    def _heads(self) -> float:
        """Bytes of `head` for the next token, and again for each layer of multi-token prediction, which has a final
        norm of its own."""
        return (1 + self.shape.num_further) * self.head

    @property
    def _joined(self) -> float:
        """Bytes that a layer of multi-token prediction saves before its transformer layer: the inputs of both norms,
        the two vectors that it joins, and the mask of its embedding."""
        h, setting = self.shape.hidden_size, self.setting
        width = 2 * (setting.residual_bytes + setting.input_bytes) * h
        return self.tokens * width / self._shared + self._embedding_mask

    def _further_layer(self, recomputed: frozenset[str]) -> float:
        """Bytes of the transformer layer of one layer of multi-token prediction."""
        return self._layers(recomputed, 1, int(self.shape.further_have_experts))

    @property
    def logits_gradient(self) -> float:
        """Bytes of the 16-bit logits before the loss, or of their gradient after it.

        An FP32 gradient takes no bytes, since it overwrites the softmax. Without a fused loss the gradients of the
        softmax and of the logits are two more tensors.
        """
        e = self.setting.element_bytes
        if not self.setting.fuses_loss:
            return self.tokens * 2 * FP32 * self.shape.output_rows / self.setting.tensor
        return self.tokens * e * self.shape.output_rows / self.setting.tensor if e < FP32 else 0.0

    @property
    def _embedding_mask(self) -> float:
        return self.shape.hidden_dropout * self._mask * self.tokens / self._shared

    @property
    def _patches(self) -> float:
        """Bytes of the input of the layer that embeds patches; every tensor rank has the whole input."""
        return self.setting.element_bytes * self.shape.patch_elements * self.tokens

    @property
    def _keys_of_others(self) -> float:
        """Bytes that Transformer Engine holds for the keys and values of other context parallel ranks.

        In a ring, the larger of two parts counts: the keys, values and results of all steps in a forward, or the keys,
        values and gradients of two steps in a backward. Gathered, the keys and values of whole sequences count, with
        their gradients.
        """
        setting, keys = self.setting, self.shape.key_width + self.shape.value_width
        if setting.context == 1:
            return 0.0
        ring = max(setting.context * (keys + self.shape.result_width), 2 * 2 * keys)
        width = 2 * keys * setting.context if setting.gathers_keys else ring
        return setting.element_bytes * width * self.tokens / setting.tensor

    def _saved_layers(self, num_layers: float, with_experts: float) -> float:
        recompute = self.setting.recompute
        if recompute.method == "uniform":
            return -(-num_layers // recompute.num_layers) * self.boundary
        if recompute.method == "block":
            inputs_only = min(recompute.num_layers, num_layers)
            kept = self._layers(frozenset(), num_layers, with_experts)
            return inputs_only * self.boundary + (num_layers - inputs_only) * (kept / num_layers if num_layers else 0.0)
        return self._layers(recompute.modules, num_layers, with_experts)

    def _layers(self, recomputed: frozenset[str], num_layers: float, with_experts: float) -> float:
        """Bytes of `num_layers` layers that recompute the given modules, `with_experts` of which have experts."""
        whole = num_layers * self._layer(recomputed)
        return whole + with_experts * self._more_with_experts(recomputed) if with_experts else whole

    def _largest_layer(self, recomputed: frozenset[str], num_layers: float, with_experts: float) -> float:
        """Bytes that a layer saves when it recomputes the given modules, for the layer that saves most without
        recomputation."""
        of_all = self._layer(recomputed)
        if not with_experts or (num_layers > with_experts and self._more_with_experts(frozenset()) < 0):
            return of_all
        return of_all + self._more_with_experts(recomputed)

    def _more_with_experts(self, recomputed: frozenset[str]) -> float:
        """Bytes of a layer with experts, less those of a layer without experts; may be negative."""
        shape, setting = self.shape, self.setting
        width = -(MLP not in recomputed) * shape.ffn_hidden_size
        width += (EXPERTS not in recomputed) * shape.experts.shared_ffn_hidden_size
        split = (setting.element_bytes * self._gates + setting.input_bytes) * width / setting.tensor
        kept = 0.0
        if EXPERTS not in recomputed:
            kept = self._per_token(
                routed, fused_gate=setting.fused_gate, input_bytes=setting.input_bytes,
                further_gates=setting.further_gates,
            )  # fmt: skip
        return self.tokens * (kept + split)

    @property
    def _gates(self) -> int:
        """Tensors as wide as the hidden layer that an activation keeps besides its result."""
        if self.shape.gated:
            return 2 if self.setting.fused_gate else 4 + self.setting.further_gates
        return int(not self.shape.relu or self.setting.fp8)  # a ReLU keeps its result, of which FP8 keeps a copy

    @property
    def _copies(self) -> float:
        return self.tokens * self._per_token(exchanged_copies)

    def _per_token(self, count: Callable[..., float], **options: bool) -> float:
        """Bytes of routed experts per token of the microbatch, by one of the functions at the top of this file."""
        setting = self.setting
        return count(self.shape, setting.expert_degrees, element_bytes=setting.element_bytes, **options) / self._shared

    def _layer(self, recomputed: frozenset[str]) -> float:
        """Bytes of a layer without experts that recomputes the given modules."""
        if EVERY_OTHER_PRODUCT in recomputed:
            return self._every_other_product
        shape, setting = self.shape, self.setting
        h, e = shape.hidden_size, setting.element_bytes
        shared = 2 * setting.residual_bytes * h + shape.hidden_dropout * 2 * self._mask
        if NORM not in recomputed:
            shared += 2 * setting.input_bytes * h
        keeps_scores = setting.saves_scores and CORE_ATTENTION not in recomputed
        all_of_it = self._attention_width(keeps_scores=keeps_scores)
        split = e * (shape.result_width + self._exchanged * keeps_scores if LATENTS_UP in recomputed else all_of_it)
        whole = 0.0
        if shape.latents:
            parts, whole = self._latents(recomputed=LATENTS_UP in recomputed)
            shared += parts
        if setting.fp8:  # the output projection keeps an FP8 copy of its input beside the result of flash attention
            keeps_result = not setting.saves_scores and CORE_ATTENTION not in recomputed
            split += (setting.input_bytes - e * (not keeps_result)) * shape.result_width
        if shape.qk_norm and not shape.latents:
            split += e * self._normed_width(keeps_scores=keeps_scores)
        if keeps_scores:
            split += self._score_bytes * shape.num_attention_heads * shape.sequence_length
        if MLP not in recomputed:
            split += (e * self._gates + setting.input_bytes) * shape.ffn_hidden_size
        return self.tokens * (shared / self._shared + whole + split / setting.tensor)

    def _latents(self, *, recomputed: bool) -> tuple[float, float]:
        """Bytes per token that latents keep: those that sequence parallelism divides, and those that each rank has
        whole.

        The up projections keep their inputs, and norms keep theirs. Latents are gathered over tensor ranks. A rank
        keeps the whole latents of queries; its own part is a view of them. The rotations of queries and of keys each
        keep a cosine and a sine for each position. If up projections are recomputed (`recomputed`), the whole latents
        of keys are kept instead.
        """
        latents, shape, is_view = self.shape.latents, self.shape, self._shared == 1
        keys = latents.key_rank + is_view * latents.rotated  # split along the sequence they are copied
        shared = keys + shape.qk_norm * (latents.query_rank + latents.key_rank)
        whole = float(latents.query_rank)
        if recomputed:
            whole += (latents.key_rank + latents.rotated) * (not is_view)
        else:
            whole += 4 * latents.rotated / self.setting.micro_batch_size
        return self.setting.element_bytes * shared, self.setting.element_bytes * whole

    @property
    def _every_other_product(self) -> float:
        """Bytes of a layer that keeps its input, the attention's result, and every other result of its matrix products:
        the first, the third and so on, in the order q, k, v, projection, (gate,) up, down."""
        shape, setting = self.shape, self.setting
        h, e = shape.hidden_size, setting.element_bytes
        split = 2 * shape.query_width + shape.key_width + shape.ffn_hidden_size
        whole = h * shape.gated  # a gated MLP has one more product, so that the last one is kept
        return self.tokens * ((setting.residual_bytes * h + e * whole) / self._shared + e * split / setting.tensor)

    def _attention_width(self, *, keeps_scores: bool) -> int:
        """Elements per token of queries, keys, values and the attention's result."""
        q, k = self.shape.query_width, self.shape.key_width
        parts = self.setting.context if keeps_scores and self.setting.gathers_keys else 1  # of keys and values
        if self.shape.latents:
            return q + parts * (k + self.shape.value_width) + self.shape.result_width
        if keeps_scores:
            return 2 * q + parts * 2 * q
        if q == k:
            return 4 * q
        if self.shape.num_query_groups < self.setting.tensor:  # views of tensors gathered from all tensor ranks
            return q + self.setting.tensor * (q + 2 * k)
        copies_queries = self.shape.num_query_groups > self.setting.tensor
        return (2 + copies_queries) * q + 2 * k

    def _normed_width(self, *, keeps_scores: bool) -> int:
        """Elements per token that norms of queries and keys keep besides `_attention_width`."""
        q, k = self.shape.query_width, self.shape.key_width
        if keeps_scores and q != k:  # repeated for all heads, so that only norms keep what the projection made
            return self._attention_width(keeps_scores=False) - q
        return q + k * max(self.setting.tensor // self.shape.num_query_groups, 1)  # each rank has a group or more

    @property
    def _exchanged(self) -> int:
        """Elements per token of the exchanged queries, keys and values that unfused attention keeps if the up
        projections of latents are recomputed; 0 without context parallelism, whose ranks exchange them."""
        keys = self.shape.key_width + self.shape.value_width
        if self.setting.context == 1:
            return 0
        return self.setting.context * keys if self.setting.gathers_keys else self.shape.query_width + keys

    @property
    def _mask(self) -> int:
        """Bytes of a dropout mask over the residual stream, per token."""
        return self.setting.mask_bytes * self.shape.hidden_size

    @property
    def _score_bytes(self) -> int:
        """Bytes that are saved for one attention score."""
        setting, e = self.setting, self.setting.element_bytes
        is_wider = setting.softmax_in_fp32 and e < FP32
        dropped = setting.mask_bytes + e if self.shape.attention_dropout else is_wider * e
        return (FP32 if is_wider else e) + dropped


def by_stage(
    count: Callable[..., float],
    layers: Sequence[float],
    with_experts: Sequence[float] | None = None,
    further: Sequence[int] | None = None,
) -> list[float]:
    """Bytes of each stage, computed by `count`, a method of `Activations` such as `saved`.

    Args:
        layers: the number of layers of each stage.
        with_experts, further: each stage's number of layers with experts, and of multi-token prediction; None: 0.
    """
    others, more = with_experts or (0,) * len(layers), further or (0,) * len(layers)
    kinds = [
        (each, other, stage == 0, stage == len(layers) - 1, its_more)
        for stage, (each, other, its_more) in enumerate(zip(layers, others, more, strict=True))
    ]
    by_kind = {
        kind: count(kind[0], with_experts=kind[1], is_first=kind[2], is_last=kind[3], further=kind[4])
        for kind in set(kinds)
    }
    return [by_kind[kind] for kind in kinds]
