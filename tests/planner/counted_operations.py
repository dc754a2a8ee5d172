"""The floating-point operations of a run, counted from its flags without the planner, to hold the planner against."""

from megatron.trainer.arguments.flags.config import TrainConfig, is_gated
from megatron.trainer.arguments.flags.experts import has_experts
from megatron.trainer.arguments.rules.attention import latents_of, windows_of


def counted_operations(args: TrainConfig) -> float:
    """The floating-point operations of the forward and the backward of one sequence, without recomputation.

    A multiplication by a weight matrix of n elements costs 2n per token forward and 4n backward. Attention adds two
    products of [s, s] per head and layer; the causal half is not subtracted (as in Megatron-LM; Korthikanti et al.
    2022, appendix A), and a window counts twice what it leaves. Of experts those count that compute a token. A BERT's
    dense layer before its output layer, a twelfth of a transformer layer, is left out; so are the operations of a
    classifier on a single token.
    """
    if args.architecture == "t5":
        return _flops_of_t5(args)
    heads, latents, windows = args.num_attention_heads, latents_of(args), windows_of(args)
    width = 2 * args.kv_channels * heads  # of queries and results
    groups = args.num_query_groups if args.group_query_attention else heads
    projections = args.hidden_size * (width + 2 * args.kv_channels * groups)
    if latents is not None:
        width = heads * (latents.head + latents.rotated + latents.value)
        matrices = (*latents.matrices(args.hidden_size, heads), (args.hidden_size, heads * latents.value))
        projections = sum(rows * columns for rows, columns in matrices)
    of_column = args.hidden_size * (3 if is_gated(args) else 2)
    mlp = mlp_of_last = args.ffn_hidden_size * of_column
    if args.num_experts is not None:
        pattern = has_experts(args.moe_layer_freq, args.num_layers)
        columns = args.moe_router_topk * args.moe_ffn_hidden_size + (args.moe_shared_expert_intermediate_size or 0)
        chosen = columns * of_column + args.hidden_size * args.num_experts
        mlp_of_last = chosen if pattern[-1] else mlp
        mlp += sum(pattern) / args.num_layers * (chosen - mlp)
    ends = args.hidden_size * args.padded_vocab_size
    if args.architecture == "vit":
        ends = args.hidden_size * args.patch_dim**2 * args.num_channels
    elif args.architecture == "bert-classify":
        ends = 0
    weights = args.num_layers * (projections + mlp) + ends
    attended = windows.attended(args.seq_length) if windows else 1.0
    attention = args.num_layers * args.seq_length * width * attended
    if args.mtp_num_layers is not None:
        # Each has a layer like the last one, a matrix that joins two vectors, and logits of its own.
        each = projections + mlp_of_last + 2 * args.hidden_size**2 + ends + args.seq_length * width
        weights += args.mtp_num_layers * each
    return 6.0 * args.seq_length * (weights + attention)


def _flops_of_t5(args: TrainConfig) -> float:
    """Encoder, decoder and output layer each count their own tokens. Of a cross-attention, keys and values are made of
    the encoder's tokens."""
    s, r, h, q = args.seq_length, args.decoder_seq_length, args.hidden_size, args.kv_channels * args.num_attention_heads
    layer = 4 * h * q + h * args.ffn_hidden_size * (3 if is_gated(args) else 2)
    encoder = s * (layer + 2 * s * q)
    decoder = r * (layer + 2 * r * q) + r * (2 * h * q + 2 * s * q) + s * 2 * h * q
    layers = args.encoder_num_layers * encoder + args.decoder_num_layers * decoder
    return 6.0 * (layers + r * h * args.padded_vocab_size)
