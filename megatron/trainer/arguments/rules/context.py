"""Rules of context parallelism: what ranks that share the sequences of a microbatch may train, and how."""

import argparse
from collections.abc import Callable

from megatron.planner.job.refusals import GATHER, HEADS, KNOWN_TO_ENGINE, RING

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


def _positions(args: argparse.Namespace) -> str:
    return args.rope_type if args.multi_latent_attention else args.position_embedding_type


def _channels(args: argparse.Namespace) -> int:
    """The channels of a head of which `--rotary-percent` are rotated."""
    return args.qk_pos_emb_head_dim if args.multi_latent_attention else args.kv_channels


_Row = tuple[Callable[[argparse.Namespace], bool], Callable[[argparse.Namespace], str]]
_REFUSALS: tuple[_Row, ...] = (
    (
        lambda args: args.architecture != "gpt",
        lambda args: (
            ": it is for GPTs; as in Megatron-LM, each rank has whole sequences of a BERT or T5, whose tokens see "
            "later ones, and of a classifier; leave it out"
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
        lambda args: _positions(args) == "rope" and int(_channels(args) * args.rotary_percent) == 0,
        lambda args: (
            f": --rotary-percent {args.rotary_percent:g} of {_channels(args)} channels leaves none to rotate, and "
            "megatron.core cannot cut up positions without channels; give more"
        ),
    ),
    (
        lambda args: (
            _positions(args) == "yarn"
            and args.yarn_original_max_position_embeddings % (2 * args.context_parallel_size) != 0
        ),
        lambda args: (
            f": megatron.core cuts up the --yarn-original-max-position-embeddings "
            f"{args.yarn_original_max_position_embeddings} positions, too, which are not divisible by "
            f"{2 * args.context_parallel_size}; change one of them"
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


def context_of_engine(args: argparse.Namespace) -> None:
    """Check that Transformer Engine's attention shares sequences as the flags say; they are for its layers."""
    kind = args.cp_comm_type[0]
    for what, is_asked in _OF_ENGINE.items():
        known = KNOWN_TO_ENGINE[what]
        if args.context_parallel_size > 1 and is_asked(args) and kind not in known:
            raise ValueError(
                f"--cp-comm-type {kind}: Transformer Engine's attention shares sequences with {what} by "
                f"{' or '.join(known)}; give that, or --transformer-impl local"
            )


_OF_ENGINE: dict[str, Callable[[argparse.Namespace], bool]] = {
    "windows": lambda args: args.window_size is not None,
    "sinks": lambda args: args.softmax_type != "vanilla",
    "latents": lambda args: args.multi_latent_attention,
}
"""What an attention may have -> whether the flags ask for it."""
