"""The rules by which texts are split into sentences; they use only the standard library, so all machines agree.

A blank line ends a sentence. So does white space after `.`, `!` or `?` and any closing quotes and brackets, if the next
word, after any opening quotes and brackets, does not begin with a small letter. A point after a single capital (an
initial) or after an abbreviation of the list below does not end a sentence. The rules are made for English; for other
languages give `tools/preprocess_data.py` lists of sentences. This module imports no torch.
"""

import re

LONGEST_SENTENCE = 512
"""The largest number of tokens of a sentence. megatron.core ignores a document of several sentences with a longer one.
"""

ABBREVIATIONS = frozenset(
    """
    mr mrs ms dr prof rev gen col sgt capt st sr jr vs etc cf al e.g i.e viz no vol fig figs eq eqs sec ch pp ed eds
    approx dept est inc ltd co corp jan feb mar apr jun jul aug sep sept oct nov dec u.s u.k a.m p.m
    """.split()  # noqa: SIM905
)

_PARAGRAPHS = re.compile(r"\n[^\S\n]*\n\s*")
_BORDER = re.compile(
    r"""
    (?P<end> [.!?]+ ["'”’)\]}]* )
    \s+
    (?= ["'“‘(\[{]* (?P<first> \w ) )
    """,
    re.VERBOSE,
)
_LAST_WORD = re.compile(r"([^\s\"'“‘(\[{]*)$")


def split_sentences(text: str) -> list[str]:
    """The sentences of `text` in order, without surrounding white space and without empty sentences."""
    sentences = []
    for paragraph in _PARAGRAPHS.split(text):
        start = 0
        for border in _BORDER.finditer(paragraph):
            if not border["first"].islower() and _ends_sentence(paragraph[start : border.start()], border["end"]):
                sentences.append(paragraph[start : border.end("end")])
                start = border.end()
        sentences.append(paragraph[start:])
    return [stripped for sentence in sentences if (stripped := sentence.strip())]


def _ends_sentence(before: str, end: str) -> bool:
    """Whether the mark `end` after the words `before` ends a sentence, and not only an abbreviation."""
    if end != ".":
        return True
    word = _LAST_WORD.search(before)[1]
    return not (word.lower() in ABBREVIATIONS or (len(word) == 1 and word.isupper()))
