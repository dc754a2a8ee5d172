"""Rules of context parallelism: what ranks that share the sequences of a microbatch may train, and how."""

import argparse
from collections.abc import Callable

RING, GATHER, HEADS = "p2p", "all_gather", "a2a"
EXCHANGES = (RING, GATHER, HEADS)


def context(args: argparse.Namespace) -> None:
    """Check the flags of context parallelism. After the rules of heads, before those of schedules."""
    kinds = args.cp_comm_type
    if len({*kinds}) > 1 or kinds[0] not in EXCHANGES:
        raise ValueError(
            f"--cp-comm-type {' '.join(kinds)}: all layers exchange keys and values in one way, which is one of "
            f"{', '.join(EXCHANGES)}; give one of them"
        )
    if args.context_parallel_size == 1:
        return
    for is_asked, reason in _REFUSALS:
        if is_asked(args):
            raise ValueError(f"--context-parallel-size {args.context_parallel_size}{reason(args)}")


def _queries(args: argparse.Namespace) -> int:
    """The fewest heads of a tensor rank, of queries or of keys."""
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return min(groups, args.num_attention_heads) // args.tensor_model_parallel_size


_Row = tuple[Callable[[argparse.Namespace], bool], Callable[[argparse.Namespace], str]]
_REFUSALS: tuple[_Row, ...] = (
    (
        lambda args: args.architecture != "gpt",
        lambda args: ": the masks of a BERT or T5 and the tokens of a classifier are not cut into parts; leave it out",
    ),
    (
        lambda args: args.multi_latent_attention or args.window_size is not None or args.softmax_type != "vanilla",
        lambda args: (
            " cuts attention as it usually is, without latents, windows and sinks; leave it out, or "
            "--multi-latent-attention, --window-size and --softmax-type"
        ),
    ),
    (
        lambda args: args.mtp_num_layers,
        lambda args: (
            f": the next tokens of --mtp-num-layers {args.mtp_num_layers} lie with other ranks; leave one of them out"
        ),
    ),
    (
        lambda args: args.seq_length % (2 * args.context_parallel_size) != 0,
        lambda args: (
            f" gives each rank two parts of a sequence, and --seq-length {args.seq_length} is not divisible by "
            f"{2 * args.context_parallel_size}; change one of them"
        ),
    ),
    (
        lambda args: (
            args.sequence_parallel
            and args.seq_length // args.context_parallel_size % args.tensor_model_parallel_size != 0
        ),
        lambda args: (
            f" leaves {args.seq_length // args.context_parallel_size} tokens, which --sequence-parallel cannot share "
            f"out to {args.tensor_model_parallel_size} tensor ranks; change --seq-length, or leave out one of the two"
        ),
    ),
    (
        lambda args: args.cp_comm_type[0] == HEADS and _queries(args) % args.context_parallel_size != 0,
        lambda args: (
            f" does not divide the {_queries(args)} heads of keys of a tensor rank, which --cp-comm-type a2a shares "
            "out; use all_gather"
        ),
    ),
    (
        lambda args: args.position_embedding_type == "rope" and int(args.kv_channels * args.rotary_percent) == 0,
        lambda args: (
            f": --rotary-percent {args.rotary_percent:g} of {args.kv_channels} channels leaves none to rotate, and "
            "megatron.core cannot cut up positions without channels; use --position-embedding-type none"
        ),
    ),
    (
        lambda args: args.rank_mapping == "optimized",
        lambda args: ": --rank-mapping optimized does not know what these ranks send; use standard",
    ),
    (
        lambda args: args.freeze_training or args.elastic_pipeline,
        lambda args: (
            ": --freeze-training and --elastic-pipeline change replicas that have whole sequences; leave them out"
        ),
    ),
)
"""(whether the flags ask for it, the reason and the remedy behind the flag's name)."""
