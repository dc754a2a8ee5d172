"""Flags of data and tokenizer."""

from megatron.trainer.arguments.flags.specification import Group, Role, integer, negation, option, switch

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
)

DATA = Group(
    "data",
    "Where samples come from.",
    (
        option(
            "--data-path",
            str,
            None,
            "Prefix of a .bin/.idx pair, or WEIGHT PREFIX WEIGHT PREFIX ... for a blend. Of "
            "pretrain_vision_classify.py and finetune_bert.py: the data for training, for validation and for test, as "
            "many as there are.",
            nargs="*",
            metavar="PREFIX",
            roles=Role.LOCATION | Role.SOURCE | Role.ORDER,
        ),
        option(
            "--split",
            str,
            None,
            "Shares of training, validation and test in --data-path. Default: 969, 30, 1.",
            roles=Role.LOCATION | Role.ORDER,
        ),
        option(
            "--train-data-path",
            str,
            None,
            "Like --data-path, for training only.",
            aliases=("--train-data",),
            nargs="*",
            metavar="PREFIX",
            roles=Role.LOCATION | Role.SOURCE | Role.ORDER,
        ),
        option(
            "--valid-data-path",
            str,
            None,
            "Like --data-path, for validation only.",
            aliases=("--valid-data",),
            nargs="*",
            metavar="PREFIX",
            roles=Role.LOCATION | Role.SOURCE,
        ),
        option(
            "--test-data-path",
            str,
            None,
            "Like --data-path, for test only.",
            aliases=("--test-data",),
            nargs="*",
            metavar="PREFIX",
            roles=Role.LOCATION | Role.SOURCE,
        ),
        option(
            "--data-args-path",
            str,
            None,
            "File that holds the value of --data-path.",
            metavar="FILE",
            roles=Role.LOCATION | Role.SOURCE | Role.ORDER,
        ),
        option(
            "--per-split-data-args-path",
            str,
            None,
            "JSON file with keys train, valid and test, each a value of --data-path.",
            metavar="FILE",
            roles=Role.LOCATION | Role.SOURCE | Role.ORDER,
        ),
        option(
            "--data-cache-path", str, None, "Where sample indices are kept. Default: beside the data.", metavar="DIR"
        ),
        switch("--mock-data", "Synthetic samples, no files.", roles=Role.LOCATION | Role.SOURCE | Role.ORDER),
        option("--num-workers", integer, 2, "Processes that load samples on each rank that needs them."),
        option("--num-dataset-builder-threads", integer, 1, "Threads that build datasets of a blend."),
        option(
            "--dataloader-type",
            str,
            "single",
            "single: in order, once. cyclic: refused; samples are already shuffled by the dataset.",
            choices=("single", "cyclic", "external"),
        ),
        switch("--reset-position-ids", "Positions start at 0 after each end-of-document token."),
        switch("--reset-attention-mask", "No attention across end-of-document tokens."),
        switch(
            "--eod-mask-loss",
            "No loss on end-of-document tokens. As in Megatron-LM, the reported loss is the mean over tokens, and the "
            "trained one that over microbatches.",
        ),
        negation(
            "--no-create-attention-mask-in-dataloader",
            "create_attention_mask_in_dataloader",
            "Leave the causal mask to the attention.",
        ),
    ),
    Role.LOCATION,
)

TOKENIZER = Group(
    "tokenizer",
    "Text to token ids.",
    (
        option(
            "--tokenizer-type",
            str,
            None,
            "Kind of tokenizer. Default with --vocab-file and --merge-file: GPT2BPETokenizer; of pretrain_bert.py: "
            "BertWordPieceLowerCase.",
            choices=TOKENIZER_TYPES,
        ),
        option("--tokenizer-model", str, None, "Model file or directory of the tokenizer.", metavar="PATH"),
        option(
            "--vocab-file", str, None, "GPT-2's vocabulary (JSON), or WordPiece's (a token a line).", metavar="FILE"
        ),
        option("--merge-file", str, None, "GPT-2's merges.", metavar="FILE"),
        option(
            "--vocab-size",
            integer,
            None,
            "Vocabulary before padding: needed by NullTokenizer, a limit for TikTokenizer, "
            "otherwise the least size of the embedding.",
            roles=Role.SAVED,
        ),
        option("--vocab-extra-ids", integer, 0, "Extra ids after the vocabulary.", roles=Role.SAVED),
        option("--tiktoken-pattern", str, None, "How TikTokenizer splits text.", choices=("v1", "v2")),
        option("--tiktoken-num-special-tokens", integer, 1000, "Special tokens of TikTokenizer.", roles=Role.SAVED),
        option("--tiktoken-special-tokens", str, None, "Names of TikTokenizer's special tokens.", nargs="+"),
    ),
    Role.LOCATION | Role.SAVED,
)
