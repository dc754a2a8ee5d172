"""Extractive question answering: how predicted answers are compared with the true ones, as SQuAD does."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and more than one blank in a row."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(predicted: str, answers: Sequence[str]) -> float:
    """1 where it is one of the answers, or says nothing where there is none."""
    return float(normalised(predicted) in {normalised(answer) for answer in answers or ("",)})


def f1(predicted: str, answers: Sequence[str]) -> float:
    """The best agreement in words with one of the answers: the harmonic mean of precision and recall."""
    return max(_f1(normalised(predicted).split(), normalised(answer).split()) for answer in answers or ("",))


def _f1(predicted: list[str], true: list[str]) -> float:
    if not predicted or not true:
        return float(predicted == true)
    same = sum((Counter(predicted) & Counter(true)).values())
    return 2 * same / (len(predicted) + len(true))
