"""Rules of `pretrain_t5.py`: its two stacks and two lengths, and what its layers and samples do not have."""

import argparse

from megatron.trainer.arguments.flags.config import choice_of
from megatron.trainer.arguments.flags.specification import name_of
from megatron.trainer.arguments.rules.programs import LARGEST_SEED, Refusals, refuse_values

_INSTEAD = {
    "num_layers": ("encoder_num_layers", "decoder_num_layers"),
    "seq_length": ("encoder_seq_length", "decoder_seq_length"),
}
_NEEDED = ("encoder_num_layers", "encoder_seq_length", "decoder_seq_length")


def shape(args: argparse.Namespace) -> None:
    """Fill `num_layers` (of both stacks) and `seq_length` (the encoder's) of a T5, for all that asks for either."""
    if args.architecture != "t5":
        return
    for name, names in _INSTEAD.items():
        if name in args.given:
            raise ValueError(
                f"{name_of(name)} {getattr(args, name)}: a T5 has an encoder and a decoder; give "
                f"{' and '.join(map(name_of, names))}"
            )
    if missing := [name_of(name) for name in _NEEDED if getattr(args, name) is None]:
        raise ValueError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} needed")
    if args.decoder_num_layers is None:
        args.decoder_num_layers = args.encoder_num_layers
    args.num_layers = args.encoder_num_layers + args.decoder_num_layers
    args.seq_length = args.encoder_seq_length


_PADS = "a sample of T5 is padded to its two lengths; leave the flag out"
_REFUSALS: Refusals = {
    "reset_position_ids": (False, _PADS),
    "reset_attention_mask": (False, _PADS),
    "eod_mask_loss": (False, "a sample of T5 ends with its document; leave the flag out"),
    "create_attention_mask_in_dataloader": (True, "T5 needs the masks of its padding; leave the flag out"),
    "qk_layernorm": (False, "megatron.core's T5 layers have no such norm; leave the flag out"),
    "normalization": ("LayerNorm", "the norms of megatron.core's T5 layers are LayerNorms; leave the flag out"),
    "group_query_attention": (False, "megatron.core's cross-attention has no groups of queries; leave the flag out"),
    "rotary_base": (10000, "megatron.core's T5 rotates with 10000; leave the flag out"),
    "use_rope_scaling": (False, "megatron.core's T5 does not scale them; leave the flag out"),
    "freeze_training": (False, "the layers of a decoder are not counted by it; leave the flag out"),
    "elastic_pipeline": (False, "a T5 is not moved to another pipeline; leave the flag out"),
    "account_for_embedding_in_pipeline_split": (False, "write the cut with --num-layer-list, and leave the flag out"),
    "account_for_loss_in_pipeline_split": (False, "write the cut with --num-layer-list, and leave the flag out"),
}
_SHORTEST = 3
"""Tokens of the encoder: two that megatron.core leaves free, and one of text."""


def _unpriced(args: argparse.Namespace) -> None:
    """Refuse what asks for times of layers, which the planner knows of models of one stack only."""
    if args.rank_mapping == "optimized":
        raise ValueError(
            "--rank-mapping optimized weighs what ranks send by the layers of one stack; give standard or pair-adjacent"
        )
    if args.dry_run is not None and choice_of(args).residency is not None:
        raise ValueError(
            f"--dry-run {args.dry_run} has no price of a T5 whose weights live on the host; leave out "
            f"{choice_of(args).flag}"
        )
    if args.optimizer == "muon":
        raise ValueError("--optimizer muon does not know the matrices of a T5's cross-attention; use adam or sgd")


def t5(args: argparse.Namespace) -> None:
    """Check that flags fit a T5 and its samples."""
    if args.architecture != "t5":
        return
    refuse_values(args, _REFUSALS)
    if not str(args.tokenizer_type).startswith("BertWordPiece"):
        raise ValueError(
            f"--tokenizer-type {args.tokenizer_type} lacks tokens that megatron.core's samples of T5 need; give "
            "BertWordPieceCase or BertWordPieceLowerCase with --vocab-file"
        )
    _unpriced(args)
    if args.recompute_method == "uniform" and args.recompute_num_layers > 1:
        raise ValueError(
            f"--recompute-num-layers {args.recompute_num_layers} with --recompute-method uniform makes chunks of equal "
            "length, and a stage may have parts of both stacks of a T5; give 1, or use block"
        )
    encoder, decoder = args.encoder_seq_length, args.decoder_seq_length
    if encoder < _SHORTEST:
        raise ValueError(f"--encoder-seq-length {encoder} has no room for a token of text; give at least {_SHORTEST}")
    if decoder > args.max_position_embeddings:
        raise ValueError(
            f"--decoder-seq-length {decoder} is beyond --max-position-embeddings {args.max_position_embeddings}; raise "
            "the latter or shorten the targets"
        )
    if args.sequence_parallel and decoder % args.tensor_model_parallel_size:
        raise ValueError(
            f"--sequence-parallel needs --decoder-seq-length {decoder} divisible by --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size}"
        )
    if args.seed > LARGEST_SEED:
        raise ValueError(f"--seed {args.seed} is beyond what T5's sample index takes; give at most {LARGEST_SEED}")
    spans = max(1, int(args.mask_prob * (encoder - 2)))
    if args.vocab_extra_ids < spans:
        raise ValueError(
            f"--vocab-extra-ids {args.vocab_extra_ids} are fewer than the {spans} spans that --mask-prob "
            f"{args.mask_prob:g} may take out of --encoder-seq-length {encoder} tokens, each with an id of its own; "
            f"give at least {spans}"
        )
