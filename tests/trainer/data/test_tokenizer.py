"""Tokenizers, offline: each kind reads its own files, and missing or foreign ones are one sentence."""

import json
from dataclasses import replace

import pytest

from megatron.trainer.data.tokenizer import build_tokenizer, padded_vocab_size, vocab_size
from tests.trainer.arguments.command_line import arguments
from tests.trainer.arguments.t5_command_line import t5_arguments, write_tokenizer

TEXT = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"] * 20


def build(flags: str):
    return build_tokenizer(arguments(flags, without="--tokenizer-type --vocab-size"))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-level BPE trained on TEXT, as tokenizer.json and as vocab.json with merges.txt."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXT, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save_model(str(folder))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def check_round_trip(tokenizer, text="the lazy fox"):
    ids = tokenizer.tokenize(text)
    assert ids and all(0 <= number < tokenizer.vocab_size for number in ids)
    assert tokenizer.detokenize(ids).strip() == text
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert json.dumps(tokenizer.unique_identifiers)


def test_gpt2_files_and_one_json_are_the_same(bpe):
    """GPT-2's two files and the single file of the same tokenizer agree, without a network."""
    two = build(f"--tokenizer-type GPT2BPETokenizer --vocab-file {bpe}/vocab.json --merge-file {bpe}/merges.txt")
    one = build(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {bpe}/tokenizer.json")
    check_round_trip(two)
    check_round_trip(one)
    assert two.tokenize(TEXT[0]) == one.tokenize(TEXT[0]) and two.eod == one.eod == 0
    assert arguments(
        f"--vocab-file {bpe}/vocab.json --merge-file {bpe}/merges.txt", without="--tokenizer-type --vocab-size"
    ).tokenizer_type == "GPT2BPETokenizer"  # fmt: skip


def test_hugging_face_directory(bpe, tmp_path):
    """A directory that transformers wrote."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_file=str(bpe / "tokenizer.json"), eos_token="<|endoftext|>").save_pretrained(
        tmp_path
    )
    check_round_trip(build(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}"))


def test_sentencepiece(tmp_path):
    """A SentencePiece model, under each of its names."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_prefix=str(tmp_path / "model"), vocab_size=38, minloglevel=2
    )
    for kind in ("GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer"):
        check_round_trip(build(f"--tokenizer-type {kind} --tokenizer-model {tmp_path}/model.model"))


def test_tiktoken(tmp_path):
    """A tiktoken vocabulary of bytes."""
    import base64

    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(bytes([rank])).decode(), "token_str": None}
        for rank in range(256)
    ]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    tokenizer = build(
        f"--tokenizer-type TikTokenizer --tokenizer-model {tmp_path}/vocab.json --vocab-size 356 "
        "--tiktoken-num-special-tokens 100"
    )
    assert tokenizer.vocab_size == 356 and tokenizer.tokenize("ab") == [197, 198]


def test_wordpiece(tmp_path):
    """BERT's vocabulary: with and without lower case, all of its marks, and ids in the order of the lines."""
    lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "lazy", "fox", "The", "##es"]
    (tmp_path / "vocab.txt").write_text("\n".join(lines))
    lower, cased = (
        build(f"--tokenizer-type BertWordPiece{case} --vocab-file {tmp_path}/vocab.txt")
        for case in ("LowerCase", "Case")
    )
    check_round_trip(lower)
    assert lower.tokenize("The foxes dig") == [5, 7, 9, 1] and cased.tokenize("The foxes") == [8, 7, 9]
    assert (lower.pad, lower.cls, lower.sep, lower.mask) == (0, 2, 3, 4) and lower.inv_vocab[9] == "##es"
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\nfox")
    with pytest.raises(ValueError, match=r"has no \[PAD\], \[SEP\], \[MASK\]; give the vocabulary of a BERT"):
        build(f"--tokenizer-type BertWordPieceCase --vocab-file {tmp_path}/vocab.txt")
    with pytest.raises(ValueError, match=r"--vocab-file none\.txt does not exist"):
        build("--tokenizer-type BertWordPieceCase --vocab-file none.txt")


@pytest.mark.parametrize("name", ["<extra_id_{}>", "\u2581<extra_id_{}>"])
def test_the_tokenizer_of_a_t5(tmp_path, name):
    """Runs of words have its extra ids, in their order; samples begin with <pad>, which is no padding."""
    path = write_tokenizer(tmp_path, words=10, extra_ids=4, name=name)
    flags = f"--vocab-extra-ids 0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model {path}"
    tokenizer = build_tokenizer(t5_arguments(flags))
    assert tokenizer.additional_special_tokens_ids == (16, 15, 14)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.tokenize("w3 w0")) == (0, 1, -1, [6, 3])
    with pytest.raises(ValueError, match=r"has not all of <pad>, </s> and 5 extra ids .*, or a lower --mask-prob"):
        build_tokenizer(t5_arguments(f"{flags} --mask-prob 0.25"))


def test_null_and_bytes():
    """The two that need no files."""
    null = build("--tokenizer-type NullTokenizer --vocab-size 50")
    assert null.tokenize("1 2") == [1, 2] and null.eod == 50 and null.vocab_size == 51
    assert build("--tokenizer-type ByteLevelTokenizer").tokenize("ab") == [97, 98]


def test_padding_of_the_vocabulary():
    """Up to a multiple of --make-vocab-size-divisible-by x t, at least --vocab-size, with the extra ids."""
    args = arguments("--vocab-size 1000 --vocab-extra-ids 30")
    tokenizer = build_tokenizer(args)
    assert vocab_size(args, tokenizer) == 1031 and padded_vocab_size(args, tokenizer) == 1152
    args = replace(args, tensor_model_parallel_size=4)
    assert padded_vocab_size(args, tokenizer) == 1536


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--tokenizer-type GPT2BPETokenizer --vocab-file none.json --merge-file x", "--vocab-file none.json does not"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model ./none", "--tokenizer-model ./none does not exist"),
        ("--tokenizer-type SentencePieceTokenizer --tokenizer-model none.model", "none.model does not exist"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model {file}", "cannot read"),
        ("--tokenizer-type SentencePieceTokenizer --tokenizer-model {file}", "cannot read"),
        ("--tokenizer-type TikTokenizer --tokenizer-model {file}", "cannot read"),
    ],
)
def test_missing_and_foreign_files(tmp_path, flags, message):
    """What is not there, or is no tokenizer, is one sentence with the path."""
    (tmp_path / "file.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=message):
        build(flags.format(file=tmp_path / "file.json"))
