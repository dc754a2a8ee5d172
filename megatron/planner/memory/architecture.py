"""The architecture of a transformer. Sizes are in elements, before parallelism splits any tensor.

Layers may have experts, as in megatron.core. A router sends each token to `topk` of the experts of the layer, which are
MLPs. A layer with experts has no other MLP, except a shared expert, if there is one, that computes every token.
Balanced load is assumed: each expert of a layer gets the same number of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import comb

FP32 = 4
"""Bytes of an element in FP32."""


@dataclass(frozen=True, kw_only=True)
class ExpertDegrees:
    """How the experts of a layer are split over ranks.

    Attributes:
        parallel: expert parallel size (ep): the number of ranks with different experts.
        tensor: expert tensor parallel size (etp): the number of ranks that hold a part of each expert.
    """

    parallel: int = 1
    tensor: int = 1


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a model's layers.

    Attributes:
        count: number of experts of a layer with experts.
        topk: number of experts that compute a token.
        ffn_hidden_size: width of each expert.
        shared_ffn_hidden_size: width of the shared expert, which computes all tokens; 0: no shared expert.
        layers: the layers with experts, as in Megatron's `--moe-layer-freq`: every n-th layer from the first on, or a
            1 or 0 for each layer.
        capacity_factor: capacity of each expert, as a multiple of its balanced load: smaller loads are padded to it,
            tokens beyond it are dropped; None: each expert gets the balanced load.

    Raises:
        ValueError: a number is below 1, `topk` exceeds `count`, or `layers` is not a valid pattern.
    """

    count: int
    topk: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    layers: int | tuple[int, ...] = 1
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("count", "topk", "ffn_hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of experts is {getattr(self, name)}, which is below 1; give 1 or more")
        if self.topk > self.count:
            raise ValueError(f"a token goes to {self.topk} of {self.count} experts; lower topk, or give more experts")
        if self.shared_ffn_hidden_size < 0:
            raise ValueError(
                f"the shared expert is {self.shared_ffn_hidden_size} columns wide; give 0 for none, or more"
            )
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(f"the capacity factor is {self.capacity_factor}; give a number above 0, or leave it out")
        if isinstance(self.layers, int) and self.layers < 1:
            raise ValueError(f"every {self.layers}th layer has experts; give 1 or more")
        if not isinstance(self.layers, int) and set(self.layers) - {0, 1}:
            raise ValueError(f"the pattern of layers with experts is {self.layers}; give 1 or 0 for each layer")

    @property
    def copies(self) -> float:
        """The mean number of experts that compute a token."""
        return self.topk * (1.0 if self.capacity_factor is None else self.capacity_factor)

    def reached(self, groups: int) -> float:
        """The mean number of groups in which a token has an expert, if the experts are split into `groups` equal groups
        and a token's experts are chosen at random."""
        return groups * (1 - comb(self.count - self.count // groups, self.topk) / comb(self.count, self.topk))

    def check_layers(self, num_layers: int) -> None:
        """Raise ValueError if the pattern does not have `num_layers` entries."""
        if not isinstance(self.layers, int) and len(self.layers) != num_layers:
            raise ValueError(
                f"the pattern of layers with experts has {len(self.layers)} entries, and the model {num_layers} "
                "layers; give one for each"
            )

    def of_stages(self, layers: Sequence[float]) -> tuple[float, ...]:
        """The number of layers with experts of each stage, fractions of layers included.

        `layers`: the number of layers of each stage.
        """
        return _of_stages(self, tuple(layers))

    def _first(self, num_layers: float) -> float:
        """The number of layers with experts among the first `num_layers` layers."""
        whole = int(num_layers)
        if isinstance(self.layers, int):
            return -(-whole // self.layers) + (num_layers - whole) * (whole % self.layers == 0)
        rest = num_layers - whole
        return sum(self.layers[:whole]) + (rest * self.layers[whole] if rest else 0)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The decoder of a T5: the model's last layers, which also attend to the output of the encoder's layers.

    Attributes:
        first: number of layers of the encoder, which come first.
        sequence_length: tokens of a sequence of the decoder, beside those of the encoder.
        distances: number of buckets of relative positions. The encoder and the decoder each have a table with a bias
            for each bucket and head, on the first stage; 0: there are no tables.
        output_bias: the logits have a bias.
    """

    first: int
    sequence_length: int
    distances: int = 0
    output_bias: bool = False

    def distance_rows(self, num_heads: int, hidden_size: int) -> int:
        """The number of vectors of the hidden size that hold both tables; stages send these vectors on."""
        return -(-2 * self.distances * num_heads // hidden_size)

    def of_stages(self, layers: Sequence[float]) -> tuple[float, ...]:
        """The number of decoder layers of each stage. `layers`: the number of layers of each stage."""
        ends = accumulate(layers)
        return tuple(min(count, max(0, end - self.first)) for count, end in zip(layers, ends, strict=True))

    def stage_behind_encoder(self, layers: Sequence[float]) -> int:
        """The stage with the last layer of the encoder."""
        return next(stage for stage, end in enumerate(accumulate(layers)) if end >= self.first)


@dataclass(frozen=True, kw_only=True)
class FurtherLayers:
    """Layers of multi-token prediction.

    Each one joins the output of the layer before with the embedding of a later token by a matrix, applies a transformer
    layer like the model's last layer, and has a loss of its own.

    Attributes:
        count: number of these layers.
        stage: the stage that has them, counted from the end: -1 is the last. It has a copy of the embedding.
    """

    count: int
    stage: int = -1


@lru_cache(maxsize=256)
def _of_stages(experts: Experts, layers: tuple[float, ...]) -> tuple[float, ...]:
    first = [experts._first(num_layers) for num_layers in accumulate(layers, initial=0)]
    return tuple(end - begin for begin, end in pairwise(first))


@dataclass(frozen=True, kw_only=True)
class Latents:
    """Latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1): queries, keys and values are made of latents.

    Attributes:
        query_rank: width of the latent of queries; 0: queries are a projection of the residual stream.
        key_rank: width of the latent of keys and values.
        head: channels of a head's queries and keys without rotary embedding.
        rotated: channels of a head's queries and keys with rotary embedding; all heads share these channels of the
            keys.
        value: channels of a head's values.
    """

    query_rank: int
    key_rank: int
    head: int
    rotated: int
    value: int

    def matrices(self, hidden: int, heads: int) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of each matrix in front of the attention."""
        queries, queries_of = heads * (self.head + self.rotated), self.query_rank or hidden
        down = ((self.query_rank, hidden),) if self.query_rank else ()
        return (
            *down, (queries, queries_of), (self.key_rank + self.rotated, hidden),
            (heads * (self.head + self.value), self.key_rank),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Sliding windows: in some layers a token attends only to itself and the `before` tokens before it.

    Attributes:
        before: number of earlier tokens in a window.
        share: the fraction of the layers that have a window.
    """

    before: int
    share: float = 1.0

    def attended(self, length: int) -> float:
        """The fraction of a causal mask's scores that windows leave for `length` tokens, as a mean over the layers."""
        width = min(self.before + 1, length)
        inside = (width * length - width * (width - 1) / 2) / (length * (length + 1) / 2)
        return 1 - self.share * (1 - inside)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The architecture of a GPT, BERT or T5 of megatron.core, or of a classifier (ViT or BERT) with the same layers.

    Attributes:
        num_layers, hidden_size, ffn_hidden_size, num_attention_heads, kv_channels, sequence_length: Megatron's flags.
        num_query_groups: number of key and value heads; equal to the attention heads without grouped queries.
        vocabulary_size: rows of the embedding, padding included.
        num_positions: rows of a learned position embedding; 0: no such embedding.
        num_token_types: rows of BERT's token type embedding; 0: no such embedding.
        tied_embeddings: the output layer is the embedding; with several stages the last one holds a copy.
        gated: the MLP's first matrix is twice as wide (SwiGLU and the like).
        relu: the MLP's activation is ReLU, which saves only its result.
        linear_biases, qkv_bias: biases of all linear layers, or of the query, key and value projection only.
        norm_vectors: learned vectors of a normalization: 2 for LayerNorm, 1 for RMSNorm.
        qk_norm: queries and keys are normalized.
        patch_elements: elements of an image patch, which is embedded in place of a token; 0: inputs are tokens.
        class_token: an image has a class token besides its patches.
        num_classes: number of classes of a classifier, which has no output layer; 0: a language model.
        pooler: a dense layer comes before the classifier.
        masked_head, binary_head: BERT's heads: dense layer, norm and output bias; pooler and next-sentence classifier.
        hidden_dropout, attention_dropout: whether dropout keeps masks of the residual stream and of the scores.
        experts: the experts of layers that have experts in place of an MLP; None: no layer has experts.
        decoder: the decoder of a T5, where `sequence_length` is that of the encoder; None: the model is one stack.
        latents: latent attention; None: queries, keys and values are projections of the residual stream.
        sinks: each head has a learned sink.
        windows: sliding windows of some layers; None: no layer has any.
        further: the layers of multi-token prediction; None: there are none.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    sequence_length: int
    vocabulary_size: int
    num_positions: int = 0
    num_token_types: int = 0
    tied_embeddings: bool = True
    gated: bool = False
    relu: bool = False
    linear_biases: bool = True
    qkv_bias: bool = False
    norm_vectors: int = 2
    qk_norm: bool = False
    patch_elements: int = 0
    class_token: bool = False
    num_classes: int = 0
    pooler: bool = False
    masked_head: bool = False
    binary_head: bool = False
    hidden_dropout: bool = True
    attention_dropout: bool = True
    experts: Experts | None = None
    decoder: Decoder | None = None
    latents: Latents | None = None
    sinks: bool = False
    windows: Windows | None = None
    further: FurtherLayers | None = None

    def __post_init__(self) -> None:
        if self.experts is not None:
            self.experts.check_layers(self.num_layers)

    @property
    def shares_embedding(self) -> bool:
        """Whether, with several stages, the first stage and another one have copies of the same embedding."""
        return self.tied_embeddings or self.further is not None

    @property
    def num_further(self) -> int:
        """The number of layers of multi-token prediction."""
        return 0 if self.further is None else self.further.count

    @property
    def further_have_experts(self) -> bool:
        """Whether the layers of multi-token prediction have experts, as the model's last layer has."""
        return self.experts is not None and self.experts.of_stages((self.num_layers - 1, 1))[1] > 0

    def tied_stages(self, num_stages: int) -> tuple[int, int]:
        """The two stages that share an embedding if `shares_embedding`."""
        stage = -1 if self.further is None else self.further.stage
        return 0, max(0, num_stages + stage)

    def further_of_stages(self, num_stages: int) -> tuple[int, ...]:
        """The number of layers of multi-token prediction of each stage."""
        found = [0] * num_stages
        if self.further is not None:
            found[max(self.further.stage, -num_stages)] = self.further.count
        return tuple(found)

    @classmethod
    def gpt3(
        cls, *, num_layers: int, hidden_size: int, num_attention_heads: int, sequence_length: int, vocabulary_size: int
    ) -> "Architecture":
        """The architecture of a GPT-3 from the five sizes that papers give."""
        return cls(
            num_layers=num_layers, hidden_size=hidden_size, ffn_hidden_size=4 * hidden_size,
            num_attention_heads=num_attention_heads, num_query_groups=num_attention_heads,
            kv_channels=hidden_size // num_attention_heads, sequence_length=sequence_length,
            vocabulary_size=vocabulary_size, num_positions=sequence_length,
        )  # fmt: skip

    @property
    def is_causal(self) -> bool:
        """Whether tokens attend only to earlier tokens."""
        return not (self.masked_head or self.binary_head or self.pooler or self.patch_elements)

    @property
    def output_rows(self) -> int:
        """Rows of the output layer: the vocabulary size, or 0 for a classifier."""
        return 0 if self.num_classes else self.vocabulary_size

    @property
    def query_width(self) -> int:
        """Width of all queries."""
        latents = self.latents
        return self.num_attention_heads * (latents.head + latents.rotated if latents else self.kv_channels)

    @property
    def key_width(self) -> int:
        """Width of all keys."""
        return self.query_width if self.latents else self.num_query_groups * self.kv_channels

    @property
    def value_width(self) -> int:
        """Width of all values."""
        return self.result_width if self.latents else self.key_width

    @property
    def result_width(self) -> int:
        """Width of the attention's result."""
        return self.num_attention_heads * (self.latents.value if self.latents else self.kv_channels)

    @property
    def attention_matrices(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of each matrix of a layer's attention: those in front of it, and the output projection."""
        h, joined = self.hidden_size, self.query_width + self.key_width + self.value_width
        front = self.latents.matrices(h, self.num_attention_heads) if self.latents else ((joined, h),)
        return (*front, (h, self.result_width))

    @property
    def projections(self) -> int:
        """Elements of the matrices of a layer's attention."""
        return sum(rows * columns for rows, columns in self.attention_matrices)

    @property
    def score_products(self) -> float:
        """Multiplications of a token with the keys and the values of a sequence, on average over the layers.

        All scores count, as in the papers, not only the half that a causal mask leaves. A window counts as twice the
        scores that it leaves.
        """
        attended = self.windows.attended(self.sequence_length) if self.windows else 1.0
        return (self.query_width + self.result_width) * self.sequence_length * attended

    def mlp_matrices(self, width: int) -> int:
        """Elements of the matrices of an MLP, or of an expert, of `width` columns."""
        return self.hidden_size * width * (3 if self.gated else 2)

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of a layer without experts: of its projections and of the feed-forward layer."""
        return self.projections + self.mlp_matrices(self.ffn_hidden_size)

    @property
    def active_matrices(self) -> float:
        """Elements of the matrices that multiply a token in a layer with experts: projections, router, `topk` experts
        and the shared expert."""
        experts = self.experts
        routed = experts.topk * self.mlp_matrices(experts.ffn_hidden_size) + self.hidden_size * experts.count
        return self.projections + routed + self.mlp_matrices(experts.shared_ffn_hidden_size)

    def layers_with_experts(self, layers: Sequence[float]) -> tuple[float, ...]:
        """The number of layers with experts of each stage. `layers`: the number of layers of each stage."""
        return (0,) * len(layers) if self.experts is None else self.experts.of_stages(layers)

    def undivided(self, tensor: int) -> str | None:
        """The first dimension that does not divide over `tensor` ranks, such as `12 attention heads`; None if all do.
        Several ranks may share a query group."""
        for count, what in (
            (self.num_attention_heads, "attention heads"),
            (self.num_query_groups * (tensor % self.num_query_groups > 0), "query groups"),
            (self.ffn_hidden_size, "columns of the feed-forward layer"),
            (self.experts.shared_ffn_hidden_size if self.experts else 0, "columns of the shared expert"),
        ):
            if count % tensor:
                return f"{count} {what}"
        return None

    def operations(self, num_sequences: int) -> float:
        """Floating-point operations of a forward and a backward of `num_sequences`, without recomputation.

        For a GPT-3 this is the count of Korthikanti et al. 2022, appendix A: 72 B L s h^2 (1 + s / 6h + V / 12 h L).
        Here each matrix is counted separately, so that the count also holds for other widths. All attention scores
        count, as in the papers, not only the half that a causal mask leaves. Only the `topk` experts of a token count.
        """
        h = self.hidden_size
        ends = h * (self.output_rows + self.patch_elements) + (h * h if self.masked_head else 0)
        if self.decoder is not None:
            ends *= self.decoder.sequence_length / self.sequence_length
        layers = self.num_layers * self._products_of_layer
        if self.further is not None:
            matrices = self.active_matrices if self.further_have_experts else self.layer_matrices
            scores = (self.query_width + self.result_width) * self.sequence_length
            each = matrices + scores + 2 * h * h + h * self.output_rows
            layers += self.further.count * each
        return 6.0 * num_sequences * self.sequence_length * (layers + ends)

    def forward_operations(self, num_layers: float, num_sequences: int) -> float:
        """Floating-point operations of a forward of `num_layers` layers, without embedding and output layer: for a
        GPT-3, 24 b s h^2 + 4 b s^2 h a layer."""
        return 2.0 * num_sequences * self.sequence_length * num_layers * self._products_of_layer

    @property
    def _products_of_layer(self) -> float:
        """Multiplications of a token in the matrix products of a layer's forward, as a mean over the layers.

        For a T5: multiplications per token of the encoder.
        """
        if self.decoder is not None:
            return self._products_of_t5 / self.num_layers / self.sequence_length
        matrices = self.layer_matrices
        if self.experts is not None:
            (count,) = self.layers_with_experts((self.num_layers,))
            matrices += count / self.num_layers * (self.active_matrices - matrices)
        return matrices + self.score_products

    @property
    def _products_of_t5(self) -> float:
        """Multiplications of a sample in the matrix products of a forward of all layers.

        Cross-attention makes keys and values from the encoder's tokens, queries and its output from the decoder's.
        """
        q, s, r = self.query_width, self.sequence_length, self.decoder.sequence_length
        encoder = s * (self.layer_matrices + 2 * q * s)
        of_keys = 2 * self.hidden_size * self.key_width
        crossing = r * (self.projections - of_keys + 2 * q * s) + s * of_keys
        decoder = r * (self.layer_matrices + 2 * q * r) + crossing
        return self.decoder.first * encoder + (self.num_layers - self.decoder.first) * decoder
