"""The tokenizers that `--tokenizer-type` names.

megatron.core has SentencePiece, Hugging Face, tiktoken, byte-level and null tokenizers. Its GPT-2 BPE and its WordPiece
need a network even with local files, and it cannot open a single `tokenizer.json`; here the `tokenizers` package reads
all three.
"""

import importlib.util
import json
import os
from collections import OrderedDict
from functools import cached_property

from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.pipeline.start_up.core_version import installed_core
from megatron.trainer.arguments.flags.config import TrainConfig, padded_vocabulary, runs_of_sample

_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "<|eot_id|>")
_PACKAGES = {
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "HuggingFaceTokenizer": "transformers",
    "TikTokenizer": "tiktoken",
    "GPT2BPETokenizer": "tokenizers",
    "BertWordPieceLowerCase": "tokenizers",
    "BertWordPieceCase": "tokenizers",
}
_LOCAL_FILES = {  # tokenizers with their own flags for files, instead of --tokenizer-model
    "GPT2BPETokenizer": (("--vocab-file", "vocab_file"), ("--merge-file", "merge_file")),
    "BertWordPieceLowerCase": (("--vocab-file", "vocab_file"),),
    "BertWordPieceCase": (("--vocab-file", "vocab_file"),),
}


class FastTokenizer(MegatronTokenizerBase):
    """A `tokenizers.Tokenizer` with the interface that megatron.core's datasets expect.

    Args:
        path: the tokenizer's file, which is part of the identity of sample indices.
        core: the loaded tokenizer.

    Raises ValueError if the tokenizer has no end-of-document token.
    """

    def __init__(self, path: str, core) -> None:
        super().__init__(path, {"library": "tokenizers"})
        self.core = core
        found = [token for token in _END_OF_DOCUMENT if core.token_to_id(token) is not None]
        if not found:
            raise ValueError(f"{path} has no end-of-document token; add one of {', '.join(_END_OF_DOCUMENT)}")
        self.eod_token = found[0]

    def tokenize(self, text: str) -> list[int]:
        return self.core.encode(text, add_special_tokens=False).ids

    def detokenize(self, ids: list[int]) -> str:
        return self.core.decode(list(ids), skip_special_tokens=False)

    def apply_chat_template(self, *args, **kwargs):
        raise ValueError("this tokenizer has no chat template; use a Hugging Face directory as --tokenizer-model")

    @property
    def vocab_size(self) -> int:
        return self.core.get_vocab_size(with_added_tokens=True)

    @property
    def vocab(self) -> dict[str, int]:
        return self.core.get_vocab(with_added_tokens=True)

    @cached_property  # megatron.core reads it for every token
    def inv_vocab(self) -> dict[int, str]:
        return {number: token for token, number in self.vocab.items()}

    @property
    def eod(self) -> int:
        return self.core.token_to_id(self.eod_token)

    eos = eos_id = eod

    @property
    def unique_identifiers(self) -> OrderedDict:
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        return OrderedDict(**{"class": name, "tokenizer_path": self.path})


class WordPieceTokenizer(FastTokenizer):
    """BERT's tokenizer. Its vocabulary file has one token a line; tokens that continue a word begin with `##`.

    [SEP] is also the end-of-document token. Raises ValueError if a token that BERT's samples need is missing.
    """

    def __init__(self, path: str, core) -> None:
        MegatronTokenizerBase.__init__(self, path, {"library": "tokenizers"})
        self.core = core
        numbers = {name: core.token_to_id(f"[{name}]") for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
        missing = [f"[{name}]" for name, number in numbers.items() if number is None]
        if missing:
            raise ValueError(f"{path} has no {', '.join(missing)}; give the vocabulary of a BERT, a token a line")
        self.pad, self.cls, self.sep, self.mask = (numbers[name] for name in ("PAD", "CLS", "SEP", "MASK"))
        self.eod_token = "[SEP]"


class SentinelTokenizer(WordPieceTokenizer):
    """BERT's tokenizer with the tokens of a T5: [BOS], [EOS], and an extra id for each masked span.

    Tokens that the vocabulary lacks get the ids after its last one, in this order, as in Megatron-LM.
    """

    bos = eos = -1
    additional_special_tokens_ids: tuple[int, ...] = ()

    def __init__(self, path: str, core, *, num_extra_ids: int) -> None:
        names = ["[BOS]", "[EOS]", *(f"<extra_id_{number}>" for number in range(num_extra_ids))]
        core.add_special_tokens(names)
        super().__init__(path, core)
        self.bos, self.eos, *self.additional_special_tokens_ids = map(core.token_to_id, names)


class TextToTextTokenizer(FastTokenizer):
    """The tokenizer of a Hugging Face T5, from its `tokenizer.json`.

    A decoder's input begins with <pad>, so samples are padded with -1, which is no token. Raises ValueError if a token
    that T5 samples need is missing, or if there are fewer than `num_runs` extra ids.
    """

    pad = cls = sep = -1

    def __init__(self, path: str, core, *, num_runs: int) -> None:
        super().__init__(path, core)
        names = [f"<extra_id_{number}>" for number in range(num_runs)]
        names = names if core.token_to_id(names[0]) is not None else [f"▁{name}" for name in names]  # mT5's names
        found = [core.token_to_id(name) for name in names]
        self.bos = core.token_to_id("<pad>")
        if None in (self.bos, *found) or self.eod_token != "</s>":
            raise ValueError(
                f"{path} has not all of <pad>, </s> and {num_runs} extra ids (<extra_id_0>, ...), one for each run "
                "that --mask-prob may take out of a sample; give the tokenizer.json of a T5, or a lower --mask-prob"
            )
        self.mask, self.additional_special_tokens_ids = self.eos, tuple(found)


def build_tokenizer(args: TrainConfig) -> MegatronTokenizerBase:
    """Build the tokenizer that `args` name. Raises ValueError if a package or file is missing or unreadable."""
    if (problem := problem_with_tokenizer(args)) is not None:
        raise ValueError(problem)
    try:
        return _load(args)
    except ValueError:
        raise
    except Exception as error:  # each library raises its own errors for a wrong file
        kind = args.tokenizer_type
        source = args.tokenizer_model or args.vocab_file
        raise ValueError(
            f"--tokenizer-type {kind} cannot read {source}: {str(error) or type(error).__name__}"
        ) from error


def problem_with_tokenizer(args: TrainConfig) -> str | None:
    """A sentence about the package or file that the tokenizer needs and this machine lacks; None without one."""
    kind = args.tokenizer_type
    package = _PACKAGES.get(kind)
    if package and importlib.util.find_spec(package) is None:
        return f"--tokenizer-type {kind} needs the package {package}, which is not installed"
    if kind in _LOCAL_FILES:
        files = [(flag, getattr(args, name)) for flag, name in _LOCAL_FILES[kind]]
        return next((f"{flag} {path} does not exist" for flag, path in files if not os.path.isfile(path)), None)
    return _problem_with_model(args) if package else None


def _problem_with_model(args: TrainConfig) -> str | None:
    path = args.tokenizer_model
    if os.path.exists(path):
        return None
    looks_local = os.path.sep in path or path.startswith(".") or path.endswith((".json", ".model"))
    names_hub = not looks_local or (path.count(os.path.sep) == 1 and path[0] not in "./")
    if args.tokenizer_type == "HuggingFaceTokenizer" and names_hub:  # a name, or an organisation and a name
        return None
    return f"--tokenizer-model {path} does not exist"


def _load(args: TrainConfig) -> MegatronTokenizerBase:
    kind, path = args.tokenizer_type, args.tokenizer_model
    if kind == "GPT2BPETokenizer":
        return _gpt2(args.vocab_file, args.merge_file)
    if kind.startswith("BertWordPiece"):
        core = _wordpiece(args.vocab_file, lowercase=kind == "BertWordPieceLowerCase")
        if getattr(args, "architecture", None) == "t5":  # tools that prepare data have no architecture
            return SentinelTokenizer(args.vocab_file, core, num_extra_ids=args.vocab_extra_ids)
        return WordPieceTokenizer(args.vocab_file, core)
    if kind == "NullTokenizer":
        return _null(args.vocab_size)
    if kind == "ByteLevelTokenizer":
        return MegatronTokenizer.from_pretrained(metadata_path={"library": "byte-level"})
    if kind == "TikTokenizer":
        options = {"vocab_size": args.vocab_size} if args.vocab_size else {}
        return MegatronTokenizer.from_pretrained(
            path,
            {"library": "tiktoken"},
            pattern=args.tiktoken_pattern or "v2",
            num_special_tokens=args.tiktoken_num_special_tokens,
            special_tokens=args.tiktoken_special_tokens,
            **options,
        )
    if kind == "HuggingFaceTokenizer":
        is_t5 = getattr(args, "architecture", None) == "t5"
        path = os.path.join(path, "tokenizer.json") if is_t5 and os.path.isdir(path) else path
        if is_t5 or os.path.isfile(path):
            from tokenizers import Tokenizer

            core = Tokenizer.from_file(path)
            return (
                TextToTextTokenizer(path, core, num_runs=runs_of_sample(args)) if is_t5 else FastTokenizer(path, core)
            )
        return MegatronTokenizer.from_pretrained(
            path, {"library": "huggingface"}, use_fast=True, include_special_tokens=False
        )
    return MegatronTokenizer.from_pretrained(path, {"library": "sentencepiece"}, legacy=False)


def _null(num_ids: int) -> MegatronTokenizerBase:
    """A tokenizer of whole numbers below `num_ids`; `num_ids` itself is the end-of-document token."""
    library, num_beside = installed_core().null_tokenizer
    return MegatronTokenizer.from_pretrained(metadata_path={"library": library}, vocab_size=num_ids + num_beside)


def _gpt2(vocab_file: str, merge_file: str) -> FastTokenizer:
    from tokenizers import AddedToken, ByteLevelBPETokenizer

    with open(vocab_file, encoding="utf-8") as stream:
        vocab = json.load(stream)
    tokenizer = ByteLevelBPETokenizer(vocab_file, merge_file, add_prefix_space=False)
    if "<|endoftext|>" in vocab:
        tokenizer._tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return FastTokenizer(vocab_file, tokenizer._tokenizer)


def _wordpiece(vocab_file: str, *, lowercase: bool):
    """BERT's tokenizer from the `tokenizers` package."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    core = Tokenizer(models.WordPiece.from_file(vocab_file, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    return core


def padded_vocab_size(args: TrainConfig, tokenizer: MegatronTokenizerBase) -> int:
    """The number of rows of the embedding. Raises ValueError if --padded-vocab-size is below the number of ids."""
    size = vocab_size(args, tokenizer)
    rows = padded_vocabulary(args, size)
    if rows < size:
        raise ValueError(
            f"--padded-vocab-size {rows} is less than the {size} ids of the tokenizer; give as many or more"
        )
    return rows


def vocab_size(args: TrainConfig, tokenizer: MegatronTokenizerBase) -> int:
    """The number of token ids that may occur in the data: at least `--vocab-size`, plus `--vocab-extra-ids`."""
    extra = 0 if isinstance(tokenizer, SentinelTokenizer) else args.vocab_extra_ids  # it has them
    return max(tokenizer.vocab_size, args.vocab_size or 0) + extra


def id_limit(args: TrainConfig, tokenizer: MegatronTokenizerBase) -> int:
    """The number above all ids that the tokenizer may give: that of its tokens, or more if their ids have gaps."""
    try:
        ids = tokenizer.inv_vocab
    except (AttributeError, NotImplementedError):  # a tokenizer of numbers, or of bytes, without gaps
        ids = ()
    return max(vocab_size(args, tokenizer), max(ids, default=-1) + 1)


def require_known_tokens(args: TrainConfig, tokenizer: MegatronTokenizerBase) -> None:
    """Check for `--load-hf` that the model has a row for each of the tokenizer's tokens; a missing row would be zero.

    A NullTokenizer adds its own end-of-document token, so it is not checked.

    Raises:
        ValueError: the tokenizer has more tokens than the model.
    """
    size = vocab_size(args, tokenizer)
    if size > args.vocab_size and args.tokenizer_type != "NullTokenizer":
        raise ValueError(
            f"the tokenizer has {size} tokens, and the model of --load-hf {args.load_hf} {args.vocab_size}; give the "
            "model's own: --tokenizer-type HuggingFaceTokenizer --tokenizer-model with its folder"
        )
