"""Flags that give the shape of the network, and flags of single programs: BERTs, and models that classify texts or
images."""

from megatron.trainer.arguments.flags.specification import Group, Role, integer, negation, number, option, switch

MODEL = Group(
    "model",
    "The shape of the network.",
    (
        option("--num-layers", integer, None, "Number of transformer layers, over all pipeline stages."),
        option("--hidden-size", integer, None, "Width of the residual stream."),
        option(
            "--ffn-hidden-size",
            integer,
            None,
            "Width of the MLP's hidden layer. Default: 4 x hidden size; with --swiglu 8/3 x hidden size, down to a "
            "multiple of 64.",
        ),
        option("--num-attention-heads", integer, None, "Number of attention heads."),
        option("--kv-channels", integer, None, "Width of one attention head. Default: hidden size / attention heads."),
        switch("--group-query-attention", "Share keys and values between groups of heads (see --num-query-groups)."),
        option(
            "--num-query-groups",
            integer,
            1,
            "Number of key/value heads with --group-query-attention; it divides the tensor parallel size, or the other "
            "way round.",
        ),
        option("--seq-length", integer, None, "Tokens in a training sequence.", roles=Role.SAVED | Role.ORDER),
        option(
            "--max-position-embeddings",
            integer,
            None,
            "Longest sequence the position embedding knows; at least --seq-length.",
            roles=Role.SAVED,
        ),
        option(
            "--position-embedding-type",
            str,
            "learned_absolute",
            "How positions enter the network.",
            choices=("learned_absolute", "rope", "none"),
        ),
        switch("--use-rotary-position-embeddings", "Old name of --position-embedding-type rope.", roles=Role.NONE),
        option("--rotary-base", integer, 10000, "Base period of rotary position embeddings."),
        option("--rotary-percent", number, 1.0, "Share of a head's channels that are rotated."),
        switch("--rotary-interleaved", "Rotate neighbouring channels instead of the two halves."),
        option(
            "--rotary-seq-len-interpolation-factor",
            integer,
            None,
            "Divide positions by this factor for longer sequences.",
        ),
        switch("--use-rope-scaling", "Scale rotary frequencies as Llama 3.1 does."),
        option("--rope-scaling-factor", number, 8.0, "Factor of --use-rope-scaling."),
        negation(
            "--no-position-embedding",
            "add_position_embedding",
            "Old name of --position-embedding-type none.",
            roles=Role.NONE,
        ),
        option(
            "--make-vocab-size-divisible-by",
            integer,
            128,
            "Pad the vocabulary to a multiple of this times the tensor parallel size.",
            roles=Role.SAVED,
        ),
        option("--normalization", str, "LayerNorm", "Kind of normalization.", choices=("LayerNorm", "RMSNorm")),
        option("--norm-epsilon", number, 1e-5, "Epsilon of the normalization.", aliases=("--layernorm-epsilon",)),
        switch(
            "--apply-layernorm-1p",
            "Store normalization weights minus one, so that weight decay pulls them to 1. Needs Transformer Engine.",
        ),
        switch("--apply-residual-connection-post-layernorm", "Take the residual after the normalization."),
        switch("--swiglu", "Gated SiLU in the MLP instead of GELU."),
        switch("--squared-relu", "Squared ReLU in the MLP instead of GELU."),
        switch("--quick-geglu", "Gated quick GELU in the MLP instead of GELU."),
        switch("--untie-embeddings-and-output-weights", "Give the output layer weights of its own."),
        negation("--disable-bias-linear", "add_bias_linear", "No biases in the linear layers."),
        switch("--add-qkv-bias", "Bias in the query, key and value projection only."),
        switch("--qk-layernorm", "Normalize queries and keys."),
        switch(
            "--apply-query-key-layer-scaling",
            "Scale attention scores by 1 / layer number before the softmax, and back in it, so that they fit FP16.",
            roles=Role.SAVED,
        ),
        switch("--attention-softmax-in-fp32", "Compute the softmax of the attention in FP32.", roles=Role.NONE),
        option(
            "--attention-backend",
            str,
            "auto",
            "Attention kernel. Without Transformer Engine: auto, local, unfused.",
            choices=("auto", "flash", "fused", "unfused", "local"),
            roles=Role.NONE,
        ),
        option(
            "--transformer-impl",
            str,
            None,
            "Transformer Engine's modules or plain PyTorch ones. Default: transformer_engine where it is installed and "
            "CUDA is there, else local.",
            choices=("local", "transformer_engine"),
            roles=Role.NONE,
        ),
        option("--attention-dropout", number, 0.1, "Dropout probability of attention weights.", roles=Role.SAVED),
        option("--hidden-dropout", number, 0.1, "Dropout probability in the residual stream.", roles=Role.SAVED),
        option("--init-method-std", number, 0.02, "Standard deviation of the normal initialisation.", roles=Role.NONE),
        switch("--init-method-xavier-uniform", "Xavier-uniform initialisation instead of normal.", roles=Role.NONE),
        switch(
            "--use-cpu-initialization",
            "Draw the full weights on the CPU, so that they do not depend on the tensor parallel size. Always on "
            "without CUDA.",
            roles=Role.NONE,
        ),
        option("--seed", integer, 1234, "Seed of weights, dropout and data order.", roles=Role.ORDER),
        switch("--use-mcore-models", "Accepted: models always come from megatron.core.", roles=Role.NONE),
        switch("--use-flash-attn", "Old name of --attention-backend flash.", roles=Role.NONE),
    ),
    Role.SHAPE,
)


# --- BERTs ------------------------------------------------------------------------------------------------------------

NUM_TOKEN_TYPES = 2
"""First and second segment of a sample."""

BERT = Group(
    "bert",
    "What `pretrain_bert.py` learns to predict. The other programs refuse these flags, but for --bert-no-binary-head, "
    "which `finetune_bert.py` needs for a BERT that was trained with it.",
    (
        option("--mask-prob", number, 0.15, "Share of a sample's tokens that are to be predicted.", roles=Role.ORDER),
        option(
            "--short-seq-prob",
            number,
            0.1,
            "Share of samples that are cut to a random length; rounded to 1 / a whole number.",
            roles=Role.ORDER,
        ),
        negation(
            "--bert-no-binary-head",
            "bert_binary_head",
            "Predict masked tokens only: one segment a sample, no token types, and no head that says whether two "
            "segments were swapped.",
            roles=Role.SHAPE,
        ),
    ),
)


# --- models that tell classes -----------------------------------------------------------------------------------------

CLASSIFIERS = ("vit", "bert-classify")
"""Architectures that tell classes."""

CLASSIFICATION = Group(
    "classification",
    "What `pretrain_vision_classify.py` and `finetune_bert.py` learn, and for how long. The other programs refuse "
    "these flags.",
    (
        option(
            "--num-classes",
            integer,
            None,
            "Number of classes. Default: of pretrain_vision_classify.py 1000, of finetune_bert.py those of the "
            "training data.",
            roles=Role.SHAPE,
        ),
        option(
            "--epochs",
            integer,
            None,
            "Length of the run in passes over the training data, in place of --train-iters or --train-samples. One "
            "epoch follows the other in the same batch; only the last batch of the run is filled up, with samples of "
            "the epoch that would follow.",
        ),
    ),
)

VISION = Group(
    "vision",
    "The images of `pretrain_vision_classify.py`, and how they become a sequence. The other programs refuse these "
    "flags.",
    (
        option("--img-h", integer, 224, "Height of an image, in pixels."),
        option("--img-w", integer, 224, "Width of an image, in pixels."),
        option("--num-channels", integer, 3, "Numbers of a pixel."),
        option("--patch-dim", integer, 16, "Height and width of a patch, which becomes a token, in pixels."),
        negation(
            "--disable-vision-class-token",
            "vision_class_token",
            "Tell the class from the mean over all patches, and not from a token of its own.",
        ),
    ),
    Role.SHAPE,
)
