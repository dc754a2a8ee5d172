"""Flags of the network's shape, and flags of single programs: a BERT, a T5, and classifiers of texts or images."""

from dataclasses import dataclass

from megatron.trainer.arguments.flags.specification import Group, Role, negation, option, switch


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Model:
    """The shape of the network."""

    num_layers: int = option(None, "Number of transformer layers, over all pipeline stages.")
    hybrid_layer_pattern: str | None = option(
        None,
        "Build the GPT as megatron.core's HybridModel, from core 0.18 on: `*-`, attention and MLP, for each layer, in "
        "the place of --num-layers; `|` divides stages.",
    )
    hidden_size: int = option(None, "Width of the residual stream.")
    ffn_hidden_size: int = option(
        None,
        "Width of the MLP's hidden layer. Default: 4 x hidden size; with --swiglu 8/3 x hidden size, down to a "
        "multiple of 64.",
    )
    num_attention_heads: int = option(None, "Number of attention heads.")
    kv_channels: int = option(None, "Width of one attention head. Default: hidden size / attention heads.")
    group_query_attention: bool = switch("Share keys and values between groups of heads (see --num-query-groups).")
    num_query_groups: int = option(
        1,
        "Number of key/value heads with --group-query-attention; it divides the tensor parallel size, or the other "
        "way round.",
    )
    seq_length: int = option(None, "Tokens in a training sequence.", roles=Role.SAVED | Role.ORDER)
    max_position_embeddings: int = option(
        None, "Longest sequence the position embedding knows; at least --seq-length.", roles=Role.SAVED
    )
    position_embedding_type: str = option(
        "learned_absolute",
        "How positions enter the network.",
        choices=("learned_absolute", "rope", "yarn", "relative", "none"),
    )
    use_rotary_position_embeddings: bool = switch("Old name of --position-embedding-type rope.", roles=Role.NONE)
    rotary_base: int = option(10000, "Base period of rotary position embeddings.")
    rotary_percent: float = option(1.0, "Share of a head's channels that are rotated.")
    rotary_interleaved: bool = switch("Rotate neighbouring channels instead of the two halves.")
    rotary_seq_len_interpolation_factor: int | None = option(
        None, "Divide positions by this factor for longer sequences."
    )
    use_rope_scaling: bool = switch("Scale rotary frequencies as Llama 3.1 does.")
    rope_scaling_factor: float = option(8.0, "Factor of --use-rope-scaling.")
    add_position_embedding: bool = negation(
        "--no-position-embedding", "Old name of --position-embedding-type none.", roles=Role.NONE
    )
    make_vocab_size_divisible_by: int = option(
        128, "Pad the vocabulary to a multiple of this times the tensor parallel size.", roles=Role.SAVED
    )
    disable_bf16_reduced_precision_matmul: bool = switch(
        "Sum the parts of a product in FP32 with --bf16, on GPUs.", roles=Role.NONE
    )
    padded_vocab_size: int | None = option(
        None,
        "Rows of the embedding, in the place of the padded vocabulary's; a multiple of the tensor parallel size.",
        roles=Role.NONE,
    )
    normalization: str = option("LayerNorm", "Kind of normalization.", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = option(1e-5, "Epsilon of the normalization.", aliases=("--layernorm-epsilon",))
    apply_layernorm_1p: bool = switch(
        "Store normalization weights minus one, so that weight decay pulls them to 1. Needs Transformer Engine."
    )
    apply_residual_connection_post_layernorm: bool = switch("Take the residual after the normalization.")
    residual_from_norm: bool = switch(
        "The residual of a layer is the output of its norm, as in the published BERT, and not the norm's input."
    )
    swiglu: bool = switch("Gated SiLU in the MLP instead of GELU.")
    squared_relu: bool = switch("Squared ReLU in the MLP instead of GELU.")
    quick_geglu: bool = switch("Gated quick GELU in the MLP instead of GELU.")
    untie_embeddings_and_output_weights: bool = switch("Give the output layer weights of its own.")
    add_bias_linear: bool = negation("--disable-bias-linear", "No biases in the linear layers.")
    add_qkv_bias: bool = switch("Bias in the query, key and value projection only.")
    qk_layernorm: bool = switch("Normalize queries and keys.")
    apply_query_key_layer_scaling: bool = switch(
        "Scale attention scores by 1 / layer number before the softmax, and back in it, so that they fit FP16.",
        roles=Role.SAVED,
    )
    attention_softmax_in_fp32: bool = switch("Compute the softmax of the attention in FP32.", roles=Role.NONE)
    attention_backend: str = option(
        "auto",
        "Attention kernel. Without Transformer Engine: auto, local, unfused.",
        choices=("auto", "flash", "fused", "unfused", "local"),
        roles=Role.NONE,
    )
    transformer_impl: str = option(
        None,
        "Transformer Engine's modules or plain PyTorch ones. Default: transformer_engine where it is installed and "
        "CUDA is there, else local.",
        choices=("local", "transformer_engine"),
        roles=Role.NONE,
    )
    attention_dropout: float = option(0.1, "Dropout probability of attention weights.", roles=Role.SAVED)
    hidden_dropout: float = option(0.1, "Dropout probability in the residual stream.", roles=Role.SAVED)
    init_method_std: float = option(0.02, "Standard deviation of the normal initialisation.", roles=Role.NONE)
    init_method_xavier_uniform: bool = switch("Xavier-uniform initialisation instead of normal.", roles=Role.NONE)
    use_cpu_initialization: bool = switch(
        "Draw the full weights on the CPU, so that they do not depend on the tensor parallel size. Always on "
        "without CUDA.",
        roles=Role.NONE,
    )
    seed: int = option(1234, "Seed of weights, dropout and data order.", roles=Role.ORDER)
    use_mcore_models: bool = switch("Accepted: models always come from megatron.core.", roles=Role.NONE)
    use_flash_attn: bool = switch("Old name of --attention-backend flash.", roles=Role.NONE)


MODEL = Group.of(Model, "model", Role.SHAPE)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class MultiToken:
    """Multi-token prediction: layers behind the others, each of which predicts one more of the tokens to come
    (docs/multi_token_prediction.md)."""

    mtp_num_layers: int | None = option(None, "Layers that predict further tokens. Default, and 0: none.")
    mtp_loss_scaling_factor: float = option(
        0.1, "Factor of the mean of their losses beside that of the next token.", roles=Role.SAVED
    )


MULTI_TOKEN = Group.of(MultiToken, "multi-token prediction", Role.SHAPE)


# --- BERTs ------------------------------------------------------------------------------------------------------------

NUM_TOKEN_TYPES = 2
"""The first and the second segment of a sample."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Bert:
    """What `pretrain_bert.py` learns to predict. The other programs refuse these flags, but for --bert-no-binary-head,
    which `finetune_bert.py` needs for a BERT that was trained with it, and the shares, which `pretrain_t5.py` has,
    too."""

    mask_prob: float = option(0.15, "Share of a sample's tokens that are to be predicted.", roles=Role.ORDER)
    short_seq_prob: float = option(
        0.1, "Share of samples that are cut to a random length; rounded to 1 / a whole number.", roles=Role.ORDER
    )
    bert_binary_head: bool = negation(
        "--bert-no-binary-head",
        "Predict masked tokens only: one segment a sample, no token types, and no head that says whether two "
        "segments were swapped.",
        roles=Role.SHAPE,
    )


BERT = Group.of(Bert, "bert")


# --- classifiers ------------------------------------------------------------------------------------------------------

CLASSIFIERS = ("vit", "bert-classify")
"""The architectures that are classifiers."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Classification:
    """What `pretrain_vision_classify.py` and `finetune_bert.py` learn, and for how long. The other programs refuse
    these flags."""

    num_classes: int | None = option(
        None,
        "Number of classes. Default: of pretrain_vision_classify.py 1000, of finetune_bert.py those of the "
        "training data.",
        roles=Role.SHAPE,
    )
    epochs: int | None = option(
        None,
        "Length of the run in passes over the training data, in place of --train-iters or --train-samples. One "
        "epoch follows the other in the same batch; only the last batch of the run is filled up, with samples of "
        "the epoch that would follow.",
    )


CLASSIFICATION = Group.of(Classification, "classification")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Vision:
    """The images of `pretrain_vision_classify.py`, and how they become a sequence. The other programs refuse these
    flags."""

    img_h: int = option(224, "Height of an image, in pixels.")
    img_w: int = option(224, "Width of an image, in pixels.")
    num_channels: int = option(3, "Numbers of a pixel.")
    patch_dim: int = option(16, "Height and width of a patch, which becomes a token, in pixels.")
    vision_class_token: bool = negation(
        "--disable-vision-class-token",
        "Tell the class from the mean over all patches, and not from a token of its own.",
    )


VISION = Group.of(Vision, "vision", Role.SHAPE)


# --- attention other than the usual -----------------------------------------------------------------------------------


def window_of(text: str) -> tuple[int, int]:
    """Parse the value of `--window-size`: `127,0` or `(127, 0)`. Raises ValueError."""
    try:
        left, right = (int(word) for word in text.strip().strip("()").split(","))
    except ValueError:
        raise ValueError(f"--window-size {text} is not two whole numbers; write for example 127,0") from None
    return left, right


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Attention:
    """Attention with latents (MLA), sliding windows, softmax sinks, YaRN's rotary positions, and the clamped gates of
    GPT-OSS."""

    multi_latent_attention: bool = switch("Make queries, keys and values from latents of a low rank (MLA).")
    q_lora_rank: int | None = option(
        None, "Rank of the latent of queries. Default: queries are a projection of the residual stream."
    )
    kv_lora_rank: int = option(32, "Rank of the latent of keys and values.")
    qk_head_dim: int = option(128, "Channels of a head's queries and keys that are not rotated.")
    qk_pos_emb_head_dim: int = option(64, "Further channels of a head's queries and keys, which are rotated.")
    v_head_dim: int = option(128, "Channels of a head's values.")
    rope_type: str | None = option(
        None,
        "Rotary positions of --multi-latent-attention. Default: yarn. Without it: --position-embedding-type.",
        choices=("rope", "yarn"),
    )
    rotary_scaling_factor: float = option(
        1.0, "YaRN's factor: how far sequences are longer than the original ones.",
        aliases=("--yarn-rotary-scaling-factor",),
    )  # fmt: skip
    mscale: float = option(
        1.0, "YaRN's factor of the attention's temperature, in the rotation.", aliases=("--yarn-mscale",)
    )
    mscale_all_dim: float = option(
        0.0,
        "What divides --mscale in the rotation; with --multi-latent-attention it also scales all scores.",
        aliases=("--yarn-mscale-all-dim",),
    )
    yarn_original_max_position_embeddings: int = option(
        4096, "Longest sequence before YaRN.", aliases=("--original-max-position-embeddings",)
    )
    yarn_beta_fast: float = option(
        32.0, "Rotations in the original sequence above which YaRN leaves a channel alone.", aliases=("--beta-fast",)
    )
    yarn_beta_slow: float = option(
        1.0, "Rotations in the original sequence below which YaRN slows a channel.", aliases=("--beta-slow",)
    )
    yarn_correction_range_round_to_int: bool = negation(
        "--no-yarn-correction-range-round-to-int", "Do not round the channels between which YaRN changes over."
    )
    softmax_type: str = option(
        "vanilla",
        "off-by-one: add 1 to the denominator of the softmax. learnable: add the exponential of a weight of each head.",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    window_size: str | tuple[int, int] | None = option(
        None, "L,0: a token attends to itself and the L tokens before it. Default: to all before it.", metavar="L,R"
    )
    window_attn_skip_freq: str | int | list[int] | None = option(
        None,
        "The layers without --window-size: every n-th, or a list of 1 for a window and 0 for none, as ([1]*3+[0])*2. "
        "Default: no layer.",
    )
    glu_linear_offset: float = option(0.0, "Added to the linear half of a gated MLP before the product.")
    activation_func_clamp_value: float | None = option(
        None, "Clamp the halves of a gated MLP: both from above, the linear one from below, too."
    )


ATTENTION = Group.of(Attention, "attention", Role.SHAPE)
OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
OF_YARN = (
    "rotary_scaling_factor", "mscale", "mscale_all_dim", "yarn_original_max_position_embeddings", "yarn_beta_fast",
    "yarn_beta_slow", "yarn_correction_range_round_to_int",
)  # fmt: skip


# --- T5 ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, init=False, repr=False, eq=False)
class EncoderDecoder:
    """The two stacks of `pretrain_t5.py`, in place of --num-layers and --seq-length, and what Hugging Face's T5s have.
    The other programs refuse these flags."""

    encoder_num_layers: int | None = option(None, "Number of layers of the encoder.", roles=Role.SHAPE)
    decoder_num_layers: int | None = option(
        None, "Number of layers of the decoder. Default: as many as the encoder has.", roles=Role.SHAPE
    )
    encoder_seq_length: int | None = option(
        None, "Tokens that the encoder reads in a sample.", roles=Role.SAVED | Role.ORDER
    )
    decoder_seq_length: int | None = option(
        None, "Tokens that the decoder reads in a sample.", roles=Role.SAVED | Role.ORDER
    )
    relative_attention_num_buckets: int = option(
        32, "Classes of distances that --position-embedding-type relative tells apart.", roles=Role.SHAPE
    )
    relative_attention_max_distance: int = option(
        128, "Tokens from which on all distances are of one class.", roles=Role.SHAPE
    )
    gated_gelu: bool = switch("Gated GELU, by its tanh formula, in the MLP instead of GELU.", roles=Role.SHAPE)
    relu: bool = switch("ReLU in the MLP instead of GELU.", roles=Role.SHAPE)
    scaled_tied_head: bool = switch(
        "The output layer, which is tied to the embedding, has no bias, and its input is divided by the root of the "
        "hidden size, as in the first T5.",
        roles=Role.SHAPE,
    )
    attention_scale: float | None = option(
        None, "Factor of attention scores. Default: 1 / root of the width of a head.", roles=Role.SHAPE
    )


T5 = Group.of(EncoderDecoder, "encoder and decoder")
