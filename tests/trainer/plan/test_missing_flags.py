"""What every run would miss is known before the first, and all of it."""

import pytest

from megatron.trainer.plan.missing_flags import missing_flags

SHAPE = ["--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "2", "--seq-length", "8"]
WHOLE = [*SHAPE, "--max-position-embeddings", "8", "--lr", "1e-3", "--mock-data", "--tokenizer-type", "NullTokenizer",
         "--vocab-size", "10"]  # fmt: skip


def told(argv, architecture="gpt"):
    return missing_flags(argv, architecture=architecture, iterations=10)


def test_nothing_is_missing():
    assert told(WHOLE) == []


def test_all_that_is_missing_is_told_at_once():
    assert told(SHAPE) == [
        "--max-position-embeddings is needed",
        "--lr is needed",
        "no data: give --data-path, --train-data-path, --data-args-path or --mock-data",
        "--tokenizer-type is needed (or --vocab-file and --merge-file for GPT-2's)",
    ]


@pytest.mark.parametrize("flag", ["--num-layers", "--lr", "--mock-data", "--max-position-embeddings", "--vocab-size"])
def test_each_flag_is_missed(flag):
    at = WHOLE.index(flag)
    width = 1 if flag == "--mock-data" else 2
    (sentence,) = told([*WHOLE[:at], *WHOLE[at + width :]])
    assert flag in sentence


def test_files_of_a_tokenizer_are_told_together():
    without = [word for word in WHOLE if word not in ("--vocab-size", "10", "NullTokenizer", "--tokenizer-type")]
    assert told([*without, "--tokenizer-type", "GPT2BPETokenizer"]) == [
        "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file"
    ]
    assert told(without, "bert") == ["--tokenizer-type BertWordPieceLowerCase needs --vocab-file"]
