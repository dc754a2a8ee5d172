"""Words of a shell script, as far as scripts of training jobs need: quotes, comments, arrays, continued lines.

A word keeps its parts apart, since what an unquoted variable holds is split at spaces, and a quoted one is not.
"""

import re
from dataclasses import dataclass

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
ASSIGNMENT = re.compile(rf"({NAME})(\+?)=")
_REDIRECTION = re.compile(r"\d?>&\d|&>>?|\d?>>?|<|&&|\|\|?&?|;;?|&")
SUM = r"\$\(\((?P<sum>(?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)"  # with parentheses in parentheses
_SUM = re.compile(SUM)
_QUOTED = re.compile(r'(?:[^"\\]|\\.)*"', re.DOTALL)
DEFAULT = r"(?:[^{}]|\$\{[^{}]*\})*"  # which may hold another variable
_PLAIN = re.compile(rf"\$\{{{DEFAULT}\}}" + r"|\$?[^\s'\"\\$;|&<>()]+|.", re.DOTALL)


@dataclass(frozen=True)
class WordPart:
    """A piece of a word. `expands`: variables in it are replaced; in quotes, without splitting."""

    text: str
    is_quoted: bool
    expands: bool


@dataclass(frozen=True)
class ShellWord:
    """A word: as written, in parts, and for NAME=( ... ) the words of the array."""

    raw: str
    parts: tuple[WordPart, ...]
    array: tuple["ShellWord", ...] | None = None


def logical_lines(text: str, source: str) -> list[list[ShellWord]]:
    """The words of each line; a line goes on where it is continued, or a quote or an array has not ended.

    Raises:
        ValueError: a quote or a parenthesis does not end.
    """
    lines, current = [], ""
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        current = f"{current}\n{line}" if current else line
        try:
            lines.append(_words(current, 0, in_array=False)[0])
        except _Unfinished:
            continue
        current = ""
    if current:
        raise ValueError(f"{source}: a quote or parenthesis does not end in '{current.strip()[:60]}'")
    return lines


class _Unfinished(ValueError):
    """A quote or a parenthesis goes on in the next line."""


def _words(text: str, position: int, *, in_array: bool) -> tuple[list[ShellWord], int]:
    words: list[ShellWord] = []
    while position < len(text):
        letter = text[position]
        if letter.isspace():
            position += 1
        elif letter == "#":
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        elif letter == ")" and in_array:
            return words, position + 1
        elif match := _REDIRECTION.match(text, position):
            words.append(ShellWord(match.group(), (WordPart(match.group(), False, False),)))
            position = match.end()
        else:
            word, position = _word(text, position)
            words.append(word)
    if in_array:
        raise _Unfinished
    return words, position


def _word(text: str, start: int) -> tuple[ShellWord, int]:
    position, parts = start, []
    while position < len(text) and not text[position].isspace() and text[position] not in ";|&<>":
        letter = text[position]
        if letter == "(" and ASSIGNMENT.fullmatch(text[start:position]):
            array, end = _words(text, position + 1, in_array=True)
            return ShellWord(text[start:position], tuple(_joined(parts)), tuple(array)), end
        if letter in "()" and parts:
            break
        part, position = _part(text, position)
        parts.append(part)
        if letter in "()":
            break
    return ShellWord(text[start:position], tuple(_joined(parts))), position


def _part(text: str, position: int) -> tuple[WordPart, int]:
    letter = text[position]
    if letter == "'":
        end = _found(text, "'", position + 1)
        return WordPart(text[position + 1 : end], True, False), end + 1
    if letter == '"':
        match = _QUOTED.match(text, position + 1)
        if match is None:
            raise _Unfinished
        return WordPart(re.sub(r'\\(["\\$`])', r"\1", match.group()[:-1]), True, True), match.end()
    if letter == "\\":
        return WordPart(text[position + 1 : position + 2], True, False), position + 2
    if text.startswith("$((", position):
        match = _SUM.match(text, position)
        if match is None:
            raise _Unfinished
        return WordPart(match.group(), False, True), match.end()
    if text.startswith("$(", position):
        end = _found(text, ")", position) + 1
        return WordPart(text[position:end], False, False), end
    end = _PLAIN.match(text, position).end()
    return WordPart(text[position:end], False, letter not in "()"), end


def _found(text: str, what: str, position: int) -> int:
    end = text.find(what, position)
    if end < 0:
        raise _Unfinished
    return end


def _joined(parts: list[WordPart]) -> list[WordPart]:
    """Neighbours of one kind as one part."""
    result: list[WordPart] = []
    for part in parts:
        if result and not part.is_quoted and part.expands and result[-1].expands and not result[-1].is_quoted:
            result[-1] = WordPart(result[-1].text + part.text, False, True)
        else:
            result.append(part)
    return result
