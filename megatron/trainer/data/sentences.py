"""Where does a sentence end? Rules of the standard library's kind, so that every machine splits alike.

A blank line ends a sentence. So does white space after `.`, `!` or `?`, with quotes and brackets that close there, if
the next word, behind quotes and brackets that open there, does not begin with a small letter. It does not after a
single capital (an initial) or an abbreviation of the list below. Made for English; whoever knows better gives
`tools/preprocess_data.py` lists of sentences. No torch in here.
"""

import re

LONGEST_SENTENCE = 512
"""Tokens. megatron.core makes no samples of a document with a longer one, unless it is the document's only one."""

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
    """The sentences of `text`, in order, without the white space around them; none is empty."""
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
    """Whether the mark `end` after the words `before` is more than the point of an abbreviation."""
    if end != ".":
        return True
    word = _LAST_WORD.search(before)[1]
    return not (word.lower() in ABBREVIATIONS or (len(word) == 1 and word.isupper()))
