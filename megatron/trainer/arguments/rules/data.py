"""Rules about the input: the data of language models, and the tokenizer."""

import re

from megatron.trainer.arguments.flags.model import CLASSIFIERS
from megatron.trainer.arguments.flags.specification import Arguments
from megatron.trainer.arguments.rules.programs import refuse_values
from megatron.trainer.files.indexed_files import notes_on_weights


def data(args: Arguments) -> list[str]:
    """Check the flags of the data; return notes on prefixes with weight 0."""
    if args.dataloader_type != "single":
        raise ValueError(
            f"--dataloader-type {args.dataloader_type} is not supported; use single, the dataset shuffles already"
        )
    if args.architecture in CLASSIFIERS:
        return []
    _blends(args)
    return notes_on_weights(args)


def _blends(args: Arguments) -> None:
    per_split = [name for name in ("train_data_path", "valid_data_path", "test_data_path") if getattr(args, name)]
    sources = [name for name in ("data_path", "data_args_path", "per_split_data_args_path") if getattr(args, name)]
    sources += ["train_data_path"] if per_split else []
    flags = ["--" + name.replace("_", "-") for name in sources] + (["--mock-data"] if args.mock_data else [])
    if not flags:
        raise ValueError("no data: give --data-path, --train-data-path, --data-args-path or --mock-data")
    if len(flags) > 1:
        raise ValueError(f"{' and '.join(flags)} exclude each other; keep one")
    splits_itself = per_split or args.per_split_data_args_path
    if args.split is not None and splits_itself:
        raise ValueError("--split belongs to --data-path; data given per split is not split again")
    if args.split is None and not splits_itself:
        args.split = "969, 30, 1"
    if args.split is not None:
        split_shares(args.split)


_ALREADY = "conversations of a sequence never see each other, and have positions of their own; leave it out"
_REFUSALS_OF_CONVERSATIONS = {
    "mock_data": (False, "there are no synthetic conversations; give --data-path with JSON lines"),
    "micro_batch_size": (1, "a sequence of --sft holds all conversations that fit; give 1, and a longer --seq-length"),
    "reset_position_ids": (False, f"under --sft {_ALREADY}"),
    "reset_attention_mask": (False, f"under --sft {_ALREADY}"),
    "eod_mask_loss": (False, "under --sft the token that ends a conversation is a part of its answer; leave it out"),
    "context_parallel_size": (1, "--sft does not cut conversations into parts; leave it out, or use more tensor ranks"),
}  # fmt: skip


def conversations(args: Arguments) -> None:
    """Check that flags fit sequences of several conversations (`--sft`)."""
    if not args.sft:
        if args.tokenizer_type == "SFTTokenizer":
            raise ValueError("--tokenizer-type SFTTokenizer is that of --sft; add it, or use HuggingFaceTokenizer")
        return
    refuse_values(args, _REFUSALS_OF_CONVERSATIONS)
    if args.tokenizer_type in ("NullTokenizer", "BertWordPieceLowerCase", "BertWordPieceCase"):
        raise ValueError(
            f"--tokenizer-type {args.tokenizer_type} does not read conversations; use HuggingFaceTokenizer, or another "
            "that reads text"
        )


def split_shares(text: str) -> tuple[float, ...]:
    """The shares of training, validation and test in a value of --split.

    Raises ValueError for text that is no list of shares: megatron.core picks digits and points out of the text, so a
    sign or an exponent would change the shares.
    """
    shares = [share.strip() for share in text.strip("'\"").split(",")]  # scripts may leave quotes in the value
    if (
        len(shares) > 3
        or not all(re.fullmatch(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", share) for share in shares)
        or not any(map(float, shares))
    ):
        raise ValueError(
            f"--split {text} must be 1 to 3 shares (training, validation, test), separated by commas, each a decimal "
            "number and not all 0; for example 969,30,1"
        )
    return (*map(float, shares), *(0.0,) * (3 - len(shares)))


def text(args: Arguments) -> None:
    """Check the vocabulary size, and require a tokenizer if the program reads text."""
    rows, t = args.padded_vocab_size, args.tensor_model_parallel_size
    if "padded_vocab_size" in args.given and rows % t:
        raise ValueError(f"--padded-vocab-size {rows} is not divisible by --tensor-model-parallel-size {t}; change one")
    if args.patch_tokenizer_type is not None and args.tokenizer_type is None and args.tokenizer_model is None:
        args.tokenizer_model = args.load
    if args.architecture != "vit":
        tokenizer(args)


def tokenizer(args: Arguments) -> None:
    """Set `tokenizer_type`, and require the flags that it needs; also called by tools, which have no model."""
    if args.patch_tokenizer_type is not None and args.tokenizer_type is None:
        args.tokenizer_type = "HuggingFaceTokenizer"
    if args.tokenizer_type in ("PretrainedFromHF", "SFTTokenizer"):
        args.tokenizer_type = "HuggingFaceTokenizer"
    if args.tokenizer_type is None:
        if not (args.vocab_file and args.merge_file):
            raise ValueError("--tokenizer-type is needed (or --vocab-file and --merge-file for GPT-2's)")
        args.tokenizer_type = "GPT2BPETokenizer"
    needs = {
        "GPT2BPETokenizer": ("vocab_file", "merge_file"),
        "NullTokenizer": ("vocab_size",),
        "ByteLevelTokenizer": (),
        "BertWordPieceLowerCase": ("vocab_file",),
        "BertWordPieceCase": ("vocab_file",),
    }
    names = needs.get(args.tokenizer_type, ("tokenizer_model",))
    missing = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is None]
    if missing:
        raise ValueError(f"--tokenizer-type {args.tokenizer_type} needs {' and '.join(missing)}")


RULES = (data, conversations, text)
