"""Rules of single programs: which flags belong to which program, and the needs of a BERT, a T5 and a classifier.

`args.architecture` is "gpt", "bert", "t5", "vit" or "bert-classify". A flag that only another architecture has is
refused by name.
"""

from collections.abc import Mapping

from megatron.trainer.arguments.flags import experts, model
from megatron.trainer.arguments.flags import files as file_flags
from megatron.trainer.arguments.flags.config import choice_of, runs_of_sample
from megatron.trainer.arguments.flags.model import CLASSIFIERS
from megatron.trainer.arguments.flags.parser import FLAGS, shown
from megatron.trainer.arguments.flags.specification import Arguments, name_of
from megatron.trainer.files import text_files

# --- which program a flag belongs to ----------------------------------------------------------------------------------

Refusals = Mapping[str, tuple[object, str]]
"""Destination -> (the value that asks for nothing, the reason why any other value is refused)."""

_OWNERS = (
    (model.ATTENTION, ("gpt",), "pretrain_gpt.py"),
    (experts.EXPERTS, ("gpt",), "pretrain_gpt.py"),
    (model.MULTI_TOKEN, ("gpt",), "pretrain_gpt.py"),
    (file_flags.CONVERSATIONS, ("gpt",), "pretrain_gpt.py"),
    (model.BERT, ("bert",), "pretrain_bert.py"),
    (model.T5, ("t5",), "pretrain_t5.py"),
    (model.CLASSIFICATION, model.CLASSIFIERS, "pretrain_vision_classify.py and finetune_bert.py"),
    (model.VISION, ("vit",), "pretrain_vision_classify.py"),
)
_SHARED = {"bert_binary_head": ("bert", "bert-classify"), "mask_prob": ("bert", "t5"), "short_seq_prob": ("bert", "t5")}
ONLY_OF = {
    each.dest: _SHARED.get(each.dest, architectures) for group, architectures, _ in _OWNERS for each in group.flags
}
"""Destination -> the architectures to which the flag belongs, for flags that do not belong to all."""


def owners(args: Arguments) -> None:
    """Check that flags belong to the architecture of the program."""
    for group, _, programs in _OWNERS:
        for each in group.flags:
            if each.dest in args.given and args.architecture not in ONLY_OF[each.dest]:
                raise ValueError(f"{each.name} belongs to {programs}; leave it out")


def refuse_values(args: Arguments, refusals: Refusals) -> None:
    """Raise ValueError for the first flag whose value asks for a feature that the program lacks."""
    named = {each.dest: each for each in FLAGS}
    for name, (neutral, reason) in refusals.items():
        value = getattr(args, name)
        if value != neutral:
            raise ValueError(f"{shown(named[name], value)}: {reason}")


# --- BERTs ------------------------------------------------------------------------------------------------------------

SHORTEST_SEQUENCE = 5
"""Tokens: [CLS], two [SEP], and two of text, the fewest that megatron.core's samples have."""
LARGEST_SEED = 2**31 - 1  # the limit of megatron.core's sample index

_LAYER_REFUSALS: Refusals = {
    "qk_layernorm": (False, "megatron.core's BERT layer has no such norm; leave the flag out"),
    "normalization": ("LayerNorm", "the head of megatron.core's BERT has a LayerNorm; leave the flag out"),
    "rotary_base": (10000, "megatron.core's BERT rotates with 10000; leave the flag out"),
    "use_rope_scaling": (False, "megatron.core's BERT does not scale them; leave the flag out"),
}
_REFUSALS_OF_BERT: Refusals = {
    "mock_data": (False, "megatron.core has no synthetic samples of BERT; give --data-path"),
    "reset_position_ids": (False, "a sample of BERT ends with its document; leave the flag out"),
    "reset_attention_mask": (False, "a sample of BERT ends with its document; leave the flag out"),
    "eod_mask_loss": (False, "only masked tokens have a loss; leave the flag out"),
    "create_attention_mask_in_dataloader": (True, "BERT needs the masks of its padding; leave the flag out"),
    **_LAYER_REFUSALS,
}


def bert(args: Arguments) -> None:
    """Check that flags fit a BERT and its samples."""
    if args.architecture != "bert":
        return
    refuse_values(args, _REFUSALS_OF_BERT)
    if args.seq_length < SHORTEST_SEQUENCE:
        raise ValueError(
            f"--seq-length {args.seq_length} has no room for [CLS], two [SEP] and two tokens of text; give at least "
            f"{SHORTEST_SEQUENCE}"
        )
    if args.seed > LARGEST_SEED:
        raise ValueError(f"--seed {args.seed} is beyond what BERT's sample index takes; give at most {LARGEST_SEED}")


# --- `pretrain_vision_classify.py` and `finetune_bert.py`: shape of a sample, data, and when to evaluate --------------

MEGATRONS_NUM_CLASSES = 1000
SHORTEST_TEXT = 3
"""Tokens: [CLS], one of text, and [SEP]."""
_SPLITS = ("train", "valid", "test")

_REFUSALS_OF_CLASSIFIERS: Refusals = {
    "mock_data": (False, "there are no synthetic samples with classes; give --data-path"),
    "data_args_path": (None, "data are named by --data-path TRAIN VALID, or by --train-data-path; use these"),
    "per_split_data_args_path": (None, "data are named by --data-path TRAIN VALID, or by --train-data-path; use these"),
    "data_cache_path": (None, "no sample indices are kept; leave the flag out"),
    "split": (None, "training and validation have files of their own; leave the flag out"),
    "reset_position_ids": (False, "a sample is one sequence; leave the flag out"),
    "reset_attention_mask": (False, "a sample is one sequence; leave the flag out"),
    "eod_mask_loss": (False, "a sample has one loss; leave the flag out"),
    "calculate_per_token_loss": (False, "a sample has one loss, whatever its tokens; leave the flag out"),
    "create_attention_mask_in_dataloader": (True, "attention is not causal; leave the flag out"),
    "fp16_lm_cross_entropy": (False, "the loss of classes is taken in FP32; leave the flag out"),
    "cross_entropy_loss_fusion": (False, "the loss of classes is taken in FP32; leave the flag out"),
}
_REFUSALS_OF_VIT: Refusals = {
    "position_embedding_type": ("learned_absolute", "the positions of patches are learned; leave the flag out")
}


def image_shape(args: Arguments) -> list[str]:
    """Set a ViT's `seq_length`, `max_position_embeddings` and `num_classes`; return notes on flags without effect."""
    if args.architecture != "vit":
        return []
    if args.num_classes is None:
        args.num_classes = MEGATRONS_NUM_CLASSES
    length = 1  # a placeholder if the sizes are invalid, which `ranges` refuses
    if min(args.img_h, args.img_w, args.patch_dim) > 0:
        for name in ("img_h", "img_w"):
            if getattr(args, name) % args.patch_dim:
                raise ValueError(
                    f"{name_of(name)} {getattr(args, name)} is not divisible by --patch-dim {args.patch_dim}; choose "
                    "another, or prepare the images in another size"
                )
        length = (args.img_h // args.patch_dim) * (args.img_w // args.patch_dim) + args.vision_class_token
    notes = []
    for name in ("seq_length", "max_position_embeddings"):
        if name in args.given and getattr(args, name) != length:
            notes.append(f"{name_of(name)} {getattr(args, name)} has no effect: an image makes {length} tokens")
        setattr(args, name, length)
    return notes


def classifier(args: Arguments) -> None:
    """Check that flags fit a classifier. Its model has no output layer, so its weights are set to untied."""
    if args.architecture not in CLASSIFIERS:
        return
    refuse_values(args, _REFUSALS_OF_CLASSIFIERS)
    if args.architecture == "vit":
        refuse_values(args, _REFUSALS_OF_VIT)
        for each in file_flags.TOKENIZER.flags:
            if each.dest in args.given:
                raise ValueError(f"{each.name}: images have no tokenizer; leave the flag out")
    else:
        refuse_values(args, _LAYER_REFUSALS)
        if args.seq_length < SHORTEST_TEXT:
            raise ValueError(
                f"--seq-length {args.seq_length} has no room for [CLS], a token of text and [SEP]; give at least "
                f"{SHORTEST_TEXT}"
            )
    args.untie_embeddings_and_output_weights = True


def data_paths(args: Arguments) -> dict[str, list[str]]:
    """Purpose ("train", "valid", "test") -> its files and folders, if any."""
    if args.data_path:
        named = [[path] for path in args.data_path]
        return dict(zip(_SPLITS, named + [[]] * (len(_SPLITS) - len(named)), strict=True))
    return {name: list(getattr(args, f"{name}_data_path") or ()) for name in _SPLITS}


def sources(args: Arguments) -> None:
    """Check that the data are named once. Fills `class_names` and `num_classes` from a text classifier's data."""
    if args.architecture not in CLASSIFIERS:
        return
    per_split = [name_of(f"{name}_data_path") for name in _SPLITS if getattr(args, f"{name}_data_path")]
    if args.data_path and per_split:
        raise ValueError(f"--data-path and {per_split[0]} exclude each other; keep one")
    if args.data_path and len(args.data_path) > len(_SPLITS):
        raise ValueError(
            f"--data-path {' '.join(args.data_path)} names {len(args.data_path)} places, but takes those for training, "
            "validation and test; for several of one kind use --train-data-path"
        )
    if not data_paths(args)["train"]:
        raise ValueError("no data: give --data-path TRAIN VALID, or --train-data-path and --valid-data-path")
    args.class_names = None
    if args.architecture == "bert-classify":
        _classes_of_texts(args)


def _classes_of_texts(args: Arguments) -> None:
    paths = data_paths(args)["train"]
    if args.dry_run is not None and args.num_classes is not None and text_files.missing(paths):
        return
    args.class_names = text_files.class_names(paths)
    found = len(args.class_names)
    if args.num_classes is not None and args.num_classes < found:
        raise ValueError(
            f"--num-classes {args.num_classes} is less than the {found} classes of {' '.join(paths)}: "
            f"{', '.join(args.class_names[:8])}; give at least {found}, or leave the flag out"
        )
    args.num_classes = args.num_classes or found
    if args.num_classes < 2:
        raise ValueError(f"{' '.join(paths)} has one class, {args.class_names[0]}, so there is nothing to tell apart")


def num_samples(args: Arguments, split: str) -> int:
    """The samples in the files of "train", "valid" or "test". Raises ValueError if they cannot be read or have none."""
    paths = data_paths(args)[split]
    found = _files(args).count(paths) if paths else 0
    if paths and not found:
        raise ValueError(f"{' '.join(paths)} has no samples; give files that hold samples with their labels")
    return found


def evaluations(args: Arguments) -> None:
    """Set when a classifier is evaluated, and on how many batches.

    Without --eval-iters, an evaluation reads all samples once. With --epochs, an evaluation follows each epoch, unless
    --eval-interval is given.
    """
    if args.architecture not in CLASSIFIERS:
        return
    if "eval_iters" not in args.given:
        paths = data_paths(args)
        there = [name for name in ("valid", "test") if not (args.dry_run and text_files.missing(paths[name]))]
        largest = max((num_samples(args, name) for name in there), default=0)
        args.eval_iters = -(-largest // args.global_batch_size)
    if "eval_interval" not in args.given and args.epochs is not None:
        args.eval_interval = -(-num_samples(args, "train") // args.global_batch_size)


def _files(args: Arguments):
    """The module that reads the samples."""
    if args.architecture != "vit":
        return text_files
    from megatron.trainer.files import image_files

    return image_files


# --- T5 ---------------------------------------------------------------------------------------------------------------


_INSTEAD = {
    "num_layers": ("encoder_num_layers", "decoder_num_layers"),
    "seq_length": ("encoder_seq_length", "decoder_seq_length"),
}
_NEEDED_OF_T5 = ("encoder_num_layers", "encoder_seq_length", "decoder_seq_length")


def t5_shape(args: Arguments) -> None:
    """Set a T5's `num_layers` (of both stacks) and `seq_length` (the encoder's) for code that reads these flags."""
    if args.architecture != "t5":
        return
    for name, names in _INSTEAD.items():
        if name in args.given:
            raise ValueError(
                f"{name_of(name)} {getattr(args, name)}: a T5 has an encoder and a decoder; give "
                f"{' and '.join(map(name_of, names))}"
            )
    if missing := [name_of(name) for name in _NEEDED_OF_T5 if getattr(args, name) is None]:
        raise ValueError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} needed")
    if args.decoder_num_layers is None:
        args.decoder_num_layers = args.encoder_num_layers
    args.num_layers = args.encoder_num_layers + args.decoder_num_layers
    args.seq_length = args.encoder_seq_length
    if args.position_embedding_type == "relative" and args.max_position_embeddings is None:  # no length limit
        args.max_position_embeddings = max(args.encoder_seq_length, args.decoder_seq_length)


_PADS = "a sample of T5 is padded to its two lengths; leave the flag out"
_REFUSALS_OF_T5: Refusals = {
    "reset_position_ids": (False, _PADS),
    "reset_attention_mask": (False, _PADS),
    "eod_mask_loss": (False, "a sample of T5 ends with its document; leave the flag out"),
    "create_attention_mask_in_dataloader": (True, "T5 needs the masks of its padding; leave the flag out"),
    "qk_layernorm": (False, "megatron.core's T5 layers have no such norm; leave the flag out"),
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


def _unpriced_t5(args: Arguments) -> None:
    """Refuse flags that need the planner's layer times or matrices, which the planner has for one stack only."""
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


def t5(args: Arguments) -> None:
    """Check that flags fit a T5 and its samples."""
    if args.architecture != "t5":
        return
    refuse_values(args, _REFUSALS_OF_T5)
    has_extra_ids = args.tokenizer_type == "HuggingFaceTokenizer"
    if not has_extra_ids and not str(args.tokenizer_type).startswith("BertWordPiece"):
        raise ValueError(
            f"--tokenizer-type {args.tokenizer_type} lacks tokens that megatron.core's samples of T5 need; give "
            "BertWordPieceCase or BertWordPieceLowerCase with --vocab-file, or HuggingFaceTokenizer with the "
            "tokenizer.json of a T5"
        )
    if has_extra_ids and args.vocab_extra_ids:
        raise ValueError(
            f"--vocab-extra-ids {args.vocab_extra_ids}: the tokenizer of a T5 has extra ids of its own; leave it out"
        )
    if args.scaled_tied_head and args.untie_embeddings_and_output_weights:
        raise ValueError("--scaled-tied-head and --untie-embeddings-and-output-weights exclude each other; keep one")
    _unpriced_t5(args)
    if args.recompute_method == "uniform" and args.recompute_num_layers > 1:
        raise ValueError(
            f"--recompute-num-layers {args.recompute_num_layers} with --recompute-method uniform makes chunks of equal "
            "length, and a stage may have parts of both stacks of a T5; give 1, or use block"
        )
    classes, furthest = args.relative_attention_num_buckets, args.relative_attention_max_distance
    if args.position_embedding_type == "relative" and furthest <= classes // 2:
        raise ValueError(
            f"--relative-attention-max-distance {furthest}: half of the {classes} classes (--relative-attention-num-"
            f"buckets) are of one distance each; give more than {classes // 2}"
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
    spans = runs_of_sample(args)
    if args.vocab_extra_ids < spans and not has_extra_ids:
        raise ValueError(
            f"--vocab-extra-ids {args.vocab_extra_ids} are fewer than the {spans} spans that --mask-prob "
            f"{args.mask_prob:g} may take out of --encoder-seq-length {encoder} tokens, each with an id of its own; "
            f"give at least {spans}"
        )


FIRST = (image_shape,)
RULES = (owners, bert, classifier, sources)
LAST = (evaluations,)
