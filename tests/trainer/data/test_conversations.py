"""Conversations share sequences: each stands once in an epoch, whole, with labels of its own."""

import itertools
from types import SimpleNamespace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.tokenizers import MegatronTokenizer
from megatron.trainer.data.conversations import Documents, PackedDocuments, build_conversations
from megatron.trainer.files.conversations import PROMPT_FORMATS, best_fit
from tests.draws import draws

FORMAT, END = PROMPT_FORMATS["nemotron-h-aligned"], 0
CHATS = [[("user", "ab"), ("assistant", "c" * size)] for size in (1, 30, 4, 60, 11)]
HEAD = len("<SPECIAL_11>User\nab\n<SPECIAL_11>Assistant\n")


def documents(length: int) -> Documents:
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "byte-level"})
    return Documents.of([CHATS[:2], CHATS[2:]], tokenizer, FORMAT, length=length)


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 30))
@draws(200)
def test_best_fit_wastes_little(lengths, capacity):
    """Each number stands once, no sequence is over-full, and no two could be one; equal input, equal output."""
    sequences = best_fit(lengths, capacity)
    assert sorted(number for each in sequences for number in each) == [*range(len(lengths))]
    filled = sorted(sum(lengths[number] for number in each) for each in sequences)
    assert all(each <= capacity for each in filled)
    assert len(filled) < 2 or filled[0] + filled[1] > capacity
    assert sequences == best_fit(lengths, capacity)


def test_a_sequence_has_whole_documents_and_padding():
    """Positions begin anew, the last token is a label only, and prompts, borders and padding have no loss."""
    found, length = documents(150), 150
    packed = PackedDocuments(found, [0, 1], length=length, end=END)
    seen = []
    for sample in map(packed.__getitem__, range(len(packed))):
        borders = sample["cu_seqlens"]
        number = int(numpy.argmax(borders == length))
        assert borders[0] == 0 and (borders[number:] == length).all() and (numpy.diff(borders[: number + 1]) > 0).all()
        for begin, end in itertools.pairwise(borders[: number + 1]):
            part = slice(begin, end)
            assert sample["position_ids"][part].tolist() == [*range(end - begin)]
            tokens, labels, mask = (sample[name][part] for name in ("tokens", "labels", "loss_mask"))
            if not mask.any():
                assert end == length and (tokens == END).all() and (labels == END).all()
                continue
            assert tokens[1:].tolist() == labels[:-1].tolist() and labels[-1] == END
            assert mask.tolist() == [0.0] * (HEAD - 1) + [1.0] * (len(mask) - HEAD + 1)
            seen.append(bytes(tokens.tolist()).decode())
    expected = ["".join(text for text, _ in FORMAT.texts(chat)) for chat in CHATS]
    assert sorted(seen) == sorted(expected)
    assert packed.num_places == sum(map(len, expected)) and packed.num_documents == len(CHATS)


def test_what_is_too_long_is_cut_and_what_has_no_answer_left_out():
    """A cut document has no end, and one whose answer begins behind the sequence is counted."""
    length = HEAD + 12
    found = documents(length)
    assert (found.num_cut, found.num_left_out) == (2, 0) and found.lines.tolist() == [0, 2, 5]
    [*lengths] = numpy.diff(found.borders)
    assert lengths[1] == lengths[3] == length + 1 and found.tokens[found.borders[2] - 1] == ord("c")
    none = documents(HEAD - 1)
    assert none.num_left_out == len(CHATS) and none.lines.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", PROMPT_FORMATS)
def test_the_end_is_learned_behind_an_answer_only(name):
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "byte-level"})
    open_end = [("user", "a"), ("assistant", "b"), ("user", "c")]
    found = Documents.of([[open_end], [open_end[:2]]], tokenizer, PROMPT_FORMATS[name], length=200)
    ends = found.borders[1:] - 1
    assert found.tokens[ends].tolist() == [END, END] and found.has_loss[ends].tolist() == [False, True]


def test_a_tokenizer_without_an_end_token_is_refused():
    args = SimpleNamespace(sft_tokenizer_prompt_format="chatml")
    with pytest.raises(ValueError, match="name its eos_token"):
        build_conversations(args, SimpleNamespace(eod=None))
