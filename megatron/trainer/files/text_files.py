"""Texts in files, and the sentences of a text. Imports no torch.

A file of texts with classes, plain or compressed (.gz, .bz2, .xz), has JSON lines with `text` and `label`, or is a
tab-separated table whose first line names the columns `text` (or `sentence`, as in GLUE) and `label`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.documents.files import ending, open_text, require_characters

# --- texts with classes -----------------------------------------------------------------------------------------------

_TEXT = ("text", "sentence")
_LABEL = "label"

Sample = tuple[str, str]
"""A text and the name of its class."""


def missing(paths: Sequence[str]) -> list[str]:
    """The paths that do not exist on this machine."""
    return [path for path in paths if not Path(path).exists()]


def read(paths: Sequence[str]) -> list[Sample]:
    """Read all samples of files in order.

    Raises ValueError for a file that is missing or empty, and for a line without a text or a label.
    """
    samples: list[Sample] = []
    for path in map(Path, paths):
        with open_text(path) as stream:
            lines = stream.read().split("\n")
        before = len(samples)
        samples += _table(path, lines) if ending(path) == ".tsv" else _objects(path, lines)
        if len(samples) == before:
            raise ValueError(f"{path} has no samples; give lines with a text and a label")
    return samples


def count(paths: Sequence[str]) -> int:
    """The number of samples in files. Raises ValueError if `read` does."""
    return len(read(paths))


def class_names(paths: Sequence[str]) -> list[str]:
    """The classes in files, sorted: by value if all are numbers, otherwise alphabetically.

    Raises ValueError if `read` does.
    """
    names = {label for _, label in read(paths)}
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names)


def _objects(path: Path, lines: Sequence[str]) -> Iterator[Sample]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(f"{path}, line {number} is not JSON: {reason}; a table needs the ending .tsv") from error
        if not isinstance(found, dict):
            raise ValueError(f'{path}, line {number} is no object; write {{"text": ..., "label": ...}}')
        text, label = next((found[name] for name in _TEXT if name in found), None), found.get(_LABEL)
        if text is not None and not isinstance(text, str):
            raise ValueError(
                f"{path}, line {number} has the text {text!r}, which is no string; write it in quotation marks"
            )
        if text is None or not isinstance(label, (str, int)):
            there = ", ".join(found) or "nothing"
            raise ValueError(f"{path}, line {number} has no text and label, but {there}; name them text and label")
        label = str(int(label)) if isinstance(label, int) else label
        yield tuple(require_characters(each, f"{path}, line {number}") for each in (text, label))


def _table(path: Path, lines: Sequence[str]) -> Iterator[Sample]:
    columns = lines[0].rstrip("\r").split("\t")
    names = [name for name in _TEXT if name in columns]
    if not names or _LABEL not in columns:
        raise ValueError(f"{path} has the columns {', '.join(columns)}; its first line must name text and label")
    of_text, of_label = columns.index(names[0]), columns.index(_LABEL)
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        fields = line.rstrip("\r").split("\t")
        if len(fields) != len(columns):
            raise ValueError(
                f"{path}, line {number} has {len(fields)} columns, not {len(columns)}; write no tab in texts"
            )
        yield fields[of_text], fields[of_label]


# --- sentences --------------------------------------------------------------------------------------------------------

LONGEST_SENTENCE = 512
"""The largest number of tokens in a sentence; megatron.core ignores a document of several sentences with a longer one.
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
    """Whether the mark `end` after the words `before` ends a sentence, not only an abbreviation."""
    if end != ".":
        return True
    word = _LAST_WORD.search(before)[1]
    return not (word.lower() in ABBREVIATIONS or (len(word) == 1 and word.isupper()))
