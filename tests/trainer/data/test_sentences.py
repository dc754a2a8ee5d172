"""Sentences, by rules that every machine has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.trainer.files.text_files import split_sentences


@pytest.mark.parametrize(
    "text, sentences",
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("It is 3.5 m long. really. 4 of them.", ["It is 3.5 m long. really.", "4 of them."]),
        ('He said "Go." (She went.) "Why?" asked he.', ['He said "Go."', "(She went.)", '"Why?" asked he.']),
        ("Dr. J. Smith, e.g. Fig. 3, came. Yes", ["Dr. J. Smith, e.g. Fig. 3, came.", "Yes"]),
        ("A title\n\n  \n and a line\nthat goes on...\n\n", ["A title", "and a line\nthat goes on..."]),
        ("élan vital. état. Él", ["élan vital. état.", "Él"]),
        ("", []),
        (" \n\n ", []),
    ],
)
def test_borders(text, sentences):
    """Marks, quotes, numbers, abbreviations, initials and blank lines."""
    assert split_sentences(text) == sentences


@given(st.text("Ab.!? \n\"')(", max_size=60))
def test_nothing_is_lost(text):
    """Sentences together are the text but for white space, and none is empty or begins or ends with it."""
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)
