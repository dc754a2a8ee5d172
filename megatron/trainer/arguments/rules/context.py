"""Rules of context parallelism: which models may be trained with it, and how its ranks exchange keys and values."""

from collections.abc import Callable, Iterator

from megatron.planner.job.refusals import GATHER, HEADS, KNOWN_TO_ENGINE, RING
from megatron.trainer.arguments.flags.specification import Arguments

EXCHANGES = (RING, GATHER, HEADS)


def context(args: Arguments) -> None:
    """Check the flags of context parallelism. Runs after the rules of heads and before the rules of schedules."""
    kinds = args.cp_comm_type
    if len({*kinds}) > 1 or kinds[0] not in EXCHANGES:
        raise ValueError(
            f"--cp-comm-type {' '.join(kinds)}: all layers exchange keys and values in one way, which is one of "
            f"{', '.join(EXCHANGES)}; give one of them"
        )
    if args.context_parallel_size == 1:
        return
    for is_asked, reason in _refusals(args, args.context_parallel_size):
        if is_asked:
            raise ValueError(f"--context-parallel-size {args.context_parallel_size}{reason}")


def _queries(args: Arguments) -> int:
    """The fewest heads of queries or of keys on a tensor rank."""
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return min(groups, args.num_attention_heads) // args.tensor_model_parallel_size


def _positions(args: Arguments) -> str:
    return args.rope_type if args.multi_latent_attention else args.position_embedding_type


def _channels(args: Arguments) -> int:
    """The channels of a head that may be rotated; `--rotary-percent` of them are."""
    return args.qk_pos_emb_head_dim if args.multi_latent_attention else args.kv_channels


def _refusals(args: Arguments, size: int) -> Iterator[tuple[bool, str]]:
    """Yield (whether the flags ask for it, the text after the flag's name: reason and remedy) for each refusal."""
    tokens, queries, channels = args.seq_length // size, _queries(args), _channels(args)
    longest = args.yarn_original_max_position_embeddings
    yield (
        args.architecture != "gpt",
        ": it is for GPTs alone, as in Megatron-LM; a BERT, T5 or classifier needs whole sequences on each rank; "
        "leave it out",
    )
    yield (
        args.seq_length % (2 * size) != 0,
        f" gives each rank two parts of a sequence, and --seq-length {args.seq_length} is not divisible by "
        f"{2 * size}; change one of them",
    )
    yield (
        args.sequence_parallel and tokens % args.tensor_model_parallel_size != 0,
        f" leaves {tokens} tokens, which --sequence-parallel cannot share out to {args.tensor_model_parallel_size} "
        "tensor ranks; change --seq-length, or leave out one of the two",
    )
    yield (
        args.cp_comm_type[0] == HEADS and queries % size != 0,
        f" does not divide the {queries} heads of keys of a tensor rank, which --cp-comm-type a2a shares out; use "
        "all_gather",
    )
    yield (
        _positions(args) == "rope" and int(channels * args.rotary_percent) == 0,
        f": --rotary-percent {args.rotary_percent:g} of {channels} channels leaves none to rotate, and megatron.core "
        "cannot cut up positions without channels; give more",
    )
    yield (
        _positions(args) == "yarn" and longest % (2 * size) != 0,
        f": megatron.core cuts up the --yarn-original-max-position-embeddings {longest} positions, too, which are not "
        f"divisible by {2 * size}; change one of them",
    )
    yield (
        args.rank_mapping == "optimized",
        ": --rank-mapping optimized does not know what these ranks send; use standard",
    )
    yield (
        args.freeze_training or args.elastic_pipeline,
        ": --freeze-training and --elastic-pipeline change replicas that have whole sequences; leave them out",
    )


def context_of_engine(args: Arguments) -> None:
    """Check that Transformer Engine's attention, which must be in use, supports `--cp-comm-type` with these flags."""
    kind = args.cp_comm_type[0]
    for what, is_asked in _OF_ENGINE.items():
        known = KNOWN_TO_ENGINE[what]
        if args.context_parallel_size > 1 and is_asked(args) and kind not in known:
            raise ValueError(
                f"--cp-comm-type {kind}: Transformer Engine's attention shares sequences with {what} by "
                f"{' or '.join(known)}; give that, or --transformer-impl local"
            )


_OF_ENGINE: dict[str, Callable[[Arguments], bool]] = {
    "windows": lambda args: args.window_size is not None,
    "sinks": lambda args: args.softmax_type != "vanilla",
    "latents": lambda args: args.multi_latent_attention,
}
"""Feature of attention -> whether the flags ask for it."""
