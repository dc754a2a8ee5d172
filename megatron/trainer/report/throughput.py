"""How much arithmetic a training step of a model needs, for TFLOP/s. No torch in here."""

import argparse


def flops_per_sample(args: argparse.Namespace) -> float:
    """Floating-point operations of forward and backward of one sequence, recomputation not counted.

    A multiplication by a weight matrix of n elements costs 2n per token forward and 4n backward. Attention adds two
    products of [s, s] per head and layer; the causal half is not subtracted (as Megatron-LM counts it; Korthikanti et
    al. 2022, appendix A). A BERT's dense layer before its output layer, a twelfth of a transformer layer, is
    left out; so is what a model that tells classes computes of a single token.
    """
    query_width = args.kv_channels * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    projections = args.hidden_size * (2 * query_width + 2 * args.kv_channels * groups)
    mlp = args.hidden_size * args.ffn_hidden_size * (3 if args.swiglu or args.quick_geglu else 2)
    ends = args.hidden_size * args.padded_vocab_size
    if args.architecture == "vit":
        ends = args.hidden_size * args.patch_dim**2 * args.num_channels
    elif args.architecture == "bert-classify":
        ends = 0
    weights = args.num_layers * (projections + mlp) + ends
    attention = args.num_layers * 2 * args.seq_length * query_width
    return 6.0 * args.seq_length * (weights + attention)


def flops_of_output_layer(args: argparse.Namespace) -> float:
    """The output layer's part of these."""
    return 6.0 * args.seq_length * args.hidden_size * args.padded_vocab_size
