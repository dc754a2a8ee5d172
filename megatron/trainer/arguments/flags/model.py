"""Flags that give the shape of the network."""

from megatron.trainer.arguments.flags.specification import Group, integer, negation, number, option, switch

GROUP = Group(
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
        option("--num-query-groups", integer, 1, "Number of key/value heads with --group-query-attention."),
        option("--seq-length", integer, None, "Tokens in a training sequence."),
        option(
            "--max-position-embeddings",
            integer,
            None,
            "Longest sequence the position embedding knows; at least --seq-length.",
        ),
        option(
            "--position-embedding-type",
            str,
            "learned_absolute",
            "How positions enter the network.",
            choices=("learned_absolute", "rope", "none"),
        ),
        switch("--use-rotary-position-embeddings", "Old name of --position-embedding-type rope."),
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
        negation("--no-position-embedding", "add_position_embedding", "Old name of --position-embedding-type none."),
        option(
            "--make-vocab-size-divisible-by",
            integer,
            128,
            "Pad the vocabulary to a multiple of this times the tensor parallel size.",
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
        switch("--apply-query-key-layer-scaling", "Scale attention scores by 1 / layer number (with --fp16)."),
        switch("--attention-softmax-in-fp32", "Compute the softmax of the attention in FP32."),
        option(
            "--attention-backend",
            str,
            "auto",
            "Attention kernel. Without Transformer Engine: auto, local, unfused.",
            choices=("auto", "flash", "fused", "unfused", "local"),
        ),
        option(
            "--transformer-impl",
            str,
            None,
            "Transformer Engine's modules or plain PyTorch ones. Default: transformer_engine where it is installed and "
            "CUDA is there, else local.",
            choices=("local", "transformer_engine"),
        ),
        option("--attention-dropout", number, 0.1, "Dropout probability of attention weights."),
        option("--hidden-dropout", number, 0.1, "Dropout probability in the residual stream."),
        option("--init-method-std", number, 0.02, "Standard deviation of the normal initialisation."),
        switch("--init-method-xavier-uniform", "Xavier-uniform initialisation instead of normal."),
        switch(
            "--use-cpu-initialization",
            "Draw the full weights on the CPU, so that they do not depend on the tensor parallel size. Always on "
            "without CUDA.",
        ),
        option("--seed", integer, 1234, "Seed of weights, dropout and data order."),
        switch("--use-mcore-models", "Accepted: models always come from megatron.core."),
        switch("--use-flash-attn", "Old name of --attention-backend flash."),
    ),
)
