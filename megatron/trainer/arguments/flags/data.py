"""Flags of data and tokenizer."""

from dataclasses import dataclass

from megatron.trainer.arguments.flags.specification import Group, Role, negation, option, switch
from megatron.trainer.files.conversations import PROMPT_FORMATS

TOKENIZER_TYPES = (
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "PretrainedFromHF",
    "SFTTokenizer",
)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Data:
    """Where samples come from."""

    data_path: list[str] | None = option(
        None,
        "Prefix of a .bin/.idx pair, or WEIGHT PREFIX WEIGHT PREFIX ... for a blend. Of "
        "pretrain_vision_classify.py and finetune_bert.py: the data for training, for validation and for test, as "
        "many as there are.",
        nargs="*",
        metavar="PREFIX",
        roles=Role.LOCATION | Role.SOURCE | Role.ORDER,
    )
    split: str | None = option(
        None,
        "Shares of training, validation and test in --data-path. Default: 969, 30, 1.",
        roles=Role.LOCATION | Role.ORDER,
    )
    train_data_path: list[str] | None = option(
        None,
        "Like --data-path, for training only.",
        aliases=("--train-data",),
        nargs="*",
        metavar="PREFIX",
        roles=Role.LOCATION | Role.SOURCE | Role.ORDER,
    )
    valid_data_path: list[str] | None = option(
        None,
        "Like --data-path, for validation only.",
        aliases=("--valid-data",),
        nargs="*",
        metavar="PREFIX",
        roles=Role.LOCATION | Role.SOURCE,
    )
    test_data_path: list[str] | None = option(
        None,
        "Like --data-path, for test only.",
        aliases=("--test-data",),
        nargs="*",
        metavar="PREFIX",
        roles=Role.LOCATION | Role.SOURCE,
    )
    data_args_path: str | None = option(
        None,
        "File that holds the value of --data-path.",
        metavar="FILE",
        roles=Role.LOCATION | Role.SOURCE | Role.ORDER,
    )
    per_split_data_args_path: str | None = option(
        None,
        "JSON file with keys train, valid and test, each a value of --data-path.",
        metavar="FILE",
        roles=Role.LOCATION | Role.SOURCE | Role.ORDER,
    )
    data_cache_path: str | None = option(
        None, "Where sample indices are kept. Default: beside the data.", metavar="DIR"
    )
    mock_data: bool = switch("Synthetic samples, no files.", roles=Role.LOCATION | Role.SOURCE | Role.ORDER)
    num_workers: int = option(2, "Processes that load samples on each rank that needs them.")
    num_dataset_builder_threads: int = option(1, "Threads that build datasets of a blend.")
    dataloader_type: str = option(
        "single",
        "single: in order, once. cyclic: refused; samples are already shuffled by the dataset.",
        choices=("single", "cyclic", "external"),
    )
    reset_position_ids: bool = switch("Positions start at 0 after each end-of-document token.")
    reset_attention_mask: bool = switch("No attention across end-of-document tokens.")
    eod_mask_loss: bool = switch(
        "No loss on end-of-document tokens. As in Megatron-LM, the reported loss is the mean over tokens, and the "
        "trained one that over microbatches."
    )
    create_attention_mask_in_dataloader: bool = negation(
        "--no-create-attention-mask-in-dataloader", "Leave the causal mask to the attention."
    )


DATA = Group.of(Data, "data", Role.LOCATION)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Conversations:
    """Training on answers (docs/conversations.md)."""

    sft: bool = switch(
        "Data are JSON lines of conversations. Several share a sequence and do not see each other, and only answers "
        "have a loss.",
    )
    sft_tokenizer_prompt_format: str = option(
        "nemotron-h-aligned", "How a conversation is written.", choices=tuple(PROMPT_FORMATS)
    )


CONVERSATIONS = Group.of(Conversations, "conversations", Role.ORDER)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Tokenizer:
    """Text to token ids."""

    tokenizer_type: str | None = option(
        None,
        "Kind of tokenizer. Default with --vocab-file and --merge-file: GPT2BPETokenizer; of pretrain_bert.py: "
        "BertWordPieceLowerCase. PretrainedFromHF is MindSpeed-LLM's name of HuggingFaceTokenizer, and SFTTokenizer "
        "Megatron-LM's beside --sft.",
        choices=TOKENIZER_TYPES,
    )
    tokenizer_model: str | None = option(
        None, "Model file or directory of the tokenizer.", aliases=("--tokenizer-name-or-path",), metavar="PATH"
    )
    patch_tokenizer_type: str | None = option(
        None,
        "Pai-Megatron-Patch's kind of tokenizer: without --tokenizer-type a HuggingFaceTokenizer of --load.",
    )
    vocab_file: str | None = option(None, "GPT-2's vocabulary (JSON), or WordPiece's (a token a line).", metavar="FILE")
    merge_file: str | None = option(None, "GPT-2's merges.", metavar="FILE")
    vocab_size: int | None = option(
        None,
        "Vocabulary before padding: needed by NullTokenizer, a limit for TikTokenizer, "
        "otherwise the least size of the embedding.",
        roles=Role.SAVED,
    )
    vocab_extra_ids: int = option(0, "Extra ids after the vocabulary.", roles=Role.SAVED)
    tiktoken_pattern: str | None = option(None, "How TikTokenizer splits text.", choices=("v1", "v2"))
    tiktoken_num_special_tokens: int = option(1000, "Special tokens of TikTokenizer.", roles=Role.SAVED)
    tiktoken_special_tokens: list[str] | None = option(None, "Names of TikTokenizer's special tokens.", nargs="+")


TOKENIZER = Group.of(Tokenizer, "tokenizer", Role.LOCATION | Role.SAVED)
