"""The flags that a shell script gives to a training program, read without running the script.

Problem: Megatron's users keep their models in shell scripts, as arrays and strings of flags that meet in one command.
Running such a script to see the flags would start a job.

Solution: of the shell, what those scripts are made of is understood: assignments of words, strings and arrays (also with
+=), `$NAME`, `${NAME}`, `${NAME[@]}`, `${NAME:-default}`, `$((arithmetic))`, quotes, comments and continued lines. Names
that the script does not set are taken from the environment, and otherwise left as they stand. What stands in `if`,
`case`, loops and functions is not read, nor what is sourced or substituted by a command; the reader says so.
"""

import ast
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=")
_EXPANSION = re.compile(
    rf"\$\(\((?P<sum>.*?)\)\)|\$\{{(?P<braced>{_NAME})(?:\[[@*]\])?(?:(?P<how>:?[-=])(?P<default>[^}}]*))?\}}|\$(?P<name>{_NAME})"
)
_PREFIXES = frozenset({"export", "readonly", "local", "declare", "exec", "nohup", "time", "eval", "srun"})
_OPENS = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done"}
_ENDS_COMMAND = frozenset({";", "&", "&&", "|", "||", "|&", ">", ">>", "2>", "2>&1", "&>", "<"})


@dataclass(frozen=True)
class ScriptCommand:
    """A program (the file's name, as `pretrain_gpt.py`), the words after it, and what was not read."""

    program: str
    words: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass
class _State:
    environment: Mapping[str, str]
    variables: dict[str, list[str]] = field(default_factory=dict)  # a string is a list of one
    notes: list[str] = field(default_factory=list)

    def value(self, name: str) -> list[str] | None:
        if name in self.variables:
            return self.variables[name]
        return [self.environment[name]] if name in self.environment else None


def read_script(text: str, *, environment: Mapping[str, str], source: str = "the script") -> ScriptCommand:
    """The last command of a script that runs a file called pretrain_*.py.

    Raises:
        ValueError: there is none, or a quote or parenthesis does not end.
    """
    state, found = _State(environment), None
    closing: list[str] = []
    for line in _logical_lines(text, source):
        words = _split(line, source)
        first = words[0].raw if words else ""
        if closing:
            _nest(closing, words)
        elif first in _OPENS or re.fullmatch(rf"{_NAME}\(\)", first) or first == "function":
            closing.append(_OPENS.get(first, "}"))
            state.notes.append(f"{source}: what stands in '{line.split(chr(10))[0].strip()[:60]}' is not read")
            _nest(closing, words[1:])
        elif first in ("source", "."):
            state.notes.append(f"{source}: '{line.strip()[:60]}' is not followed")
        else:
            found = _execute(words, state) or found
    if found is None:
        raise ValueError(f"{source} runs no pretrain_*.py that can be read; give the model's flags on the command line")
    return ScriptCommand(found.program, found.words, tuple(state.notes))


# --- words


@dataclass(frozen=True)
class _Word:
    """A word as written. `parts`: (text, is quoted, may expand)."""

    raw: str
    parts: tuple[tuple[str, bool, bool], ...]
    array: tuple["_Word", ...] | None = None


def _logical_lines(text: str, source: str) -> list[str]:
    """Lines, joined where they are continued or where a quote or an array goes on."""
    lines, current = [], ""
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        current = f"{current}\n{line}" if current else line
        if _is_whole(current):
            lines.append(current)
            current = ""
    if current:
        raise ValueError(f"{source}: a quote or parenthesis does not end in '{current.strip()[:60]}'")
    return lines


def _is_whole(text: str) -> bool:
    try:
        _split(text, "")
    except ValueError:
        return False
    return True


def _split(text: str, source: str) -> list[_Word]:
    words, position = _words(text, 0, source, inside_array=False)
    assert position == len(text)
    return words


def _words(text: str, position: int, source: str, *, inside_array: bool) -> tuple[list[_Word], int]:
    words: list[_Word] = []
    while position < len(text):
        letter = text[position]
        if letter.isspace():
            position += 1
        elif letter == "#":
            position = (text + "\n").index("\n", position)
            position = min(position, len(text))
        elif letter == ")" and inside_array:
            return words, position + 1
        elif match := re.compile(r"\d?>&\d|&>>?|\d?>>?|<|&&|\|\|?&?|;;?|&").match(text, position):
            words.append(_Word(match.group(), ((match.group(), False, False),)))
            position = match.end()
        else:
            word, position = _word(text, position, source)
            words.append(word)
    if inside_array:
        raise ValueError(f"{source}: an array does not end")
    return words, position


def _word(text: str, position: int, source: str) -> tuple[_Word, int]:
    start, parts = position, []
    while position < len(text) and not text[position].isspace() and text[position] not in ";|&<>":
        letter = text[position]
        if letter == "'":
            end = text.find("'", position + 1)
            if end < 0:
                raise ValueError(f"{source}: a quote does not end")
            parts.append((text[position + 1 : end], True, False))
            position = end + 1
        elif letter == '"':
            end = re.compile(r'(?:[^"\\]|\\.)*"', re.DOTALL).match(text, position + 1)
            if end is None:
                raise ValueError(f"{source}: a quote does not end")
            parts.append((re.sub(r'\\(["\\$`])', r"\1", end.group()[:-1]), True, True))
            position = end.end()
        elif letter == "\\":
            parts.append((text[position + 1 : position + 2], True, False))
            position += 2
        elif text.startswith("$((", position) and (end := text.find("))", position)) > 0:
            parts.append((text[position : end + 2], False, True))
            position = end + 2
        elif letter == "$" and text.startswith("$(", position):
            end = text.find(")", position)
            if end < 0:
                raise ValueError(f"{source}: a substitution does not end")
            parts.append((text[position : end + 1], False, False))
            position = end + 1
        elif letter == "(" and _ASSIGNMENT.fullmatch(text[start:position]):
            array, end = _words(text, position + 1, source, inside_array=True)
            return _Word(text[start:position], ((text[start:position], False, False),), tuple(array)), end
        elif letter == ")" and text[start:position].count("(") <= text[start:position].count(")"):
            if position == start:
                position += 1  # of a case or a subshell, whose body is not read
                parts.append((")", False, False))
            break
        else:
            end = re.compile(r"\$\{[^}]*\}|[^\s'\"\\$;|&<>()]+|.", re.DOTALL).match(text, position).end()
            parts.append((text[position:end], False, True))
            position = end
    return _Word(text[start:position], _joined(parts)), position


def _joined(parts: list[tuple[str, bool, bool]]) -> tuple[tuple[str, bool, bool], ...]:
    """`$` and the name after it were cut apart."""
    result: list[tuple[str, bool, bool]] = []
    for part in parts:
        if result and part[1:] == result[-1][1:] == (False, True):
            result[-1] = (result[-1][0] + part[0], False, True)
        else:
            result.append(part)
    return tuple(result)


# --- meaning


def _nest(closing: list[str], words: list[_Word]) -> None:
    for word in words:
        if word.raw == closing[-1]:
            closing.pop()
            if not closing:
                return
        elif word.raw in _OPENS:
            closing.append(_OPENS[word.raw])


def _execute(words: list[_Word], state: _State) -> ScriptCommand | None:
    """Carry out assignments; returns the command if the line runs a training program."""
    expanded: list[str] = []
    for word in words:
        if word.raw in _ENDS_COMMAND and expanded and _program_at(expanded) is not None:
            break
        match = _ASSIGNMENT.match(word.raw)
        if match and all(each in _PREFIXES or each in _ENDS_COMMAND for each in expanded):
            _assign(match, word, state)
        else:
            expanded += _expand(word, state)
    place = _program_at(expanded)
    if place is None:
        return None
    return ScriptCommand(expanded[place].rpartition("/")[2], tuple(expanded[place + 1 :]))


def _program_at(words: list[str]) -> int | None:
    return next((i for i, word in enumerate(words) if re.fullmatch(r"(.*/)?pretrain_\w+\.py", word)), None)


def _assign(match: re.Match, word: _Word, state: _State) -> None:
    name, adds = match.group(1), bool(match.group(2))
    if word.array is not None:
        value = [text for each in word.array for text in _expand(each, state)]
        state.variables[name] = (state.value(name) or []) + value if adds else value
        return
    cut = len(match.group())
    first, quoted, expands = word.parts[0]
    parts = ((first[cut:], quoted, expands), *word.parts[1:])
    text = "".join(_text(part, state) for part in parts)
    state.variables[name] = [" ".join(state.value(name) or []) + text if adds else text]


def _expand(word: _Word, state: _State) -> list[str]:
    """A word's words: an unquoted variable is split at spaces, an array gives each of its own."""
    whole = word.parts[0][0] if len(word.parts) == 1 else ""
    match = _EXPANSION.fullmatch(whole) if word.parts and word.parts[0][2] else None
    if match and match["braced"] and "[" in whole and (values := state.value(match["braced"])) is not None:
        is_quoted = word.parts[0][1]
        return list(values) if is_quoted else [each for value in values for each in value.split()]
    result, current, is_open = [], "", False
    for part in word.parts:
        text = _text(part, state)
        if part[1] or not part[2] or "$" not in part[0]:
            current, is_open = current + text, True
            continue
        pieces = text.split()
        if not pieces:
            continue
        joins = is_open and not text[0].isspace()
        if is_open and not joins:
            result.append(current)
            current = ""
        result += [(current if joins else "") + pieces[0], *pieces[1:]]
        current, is_open = result.pop(), True
        if text[-1].isspace():
            result.append(current)
            current, is_open = "", False
    return [*result, current] if is_open else result


def _text(part: tuple[str, bool, bool], state: _State) -> str:
    text, _, expands = part
    return _EXPANSION.sub(lambda match: _replacement(match, state), text) if expands else text


def _replacement(match: re.Match, state: _State) -> str:
    if match["sum"] is not None:
        return _arithmetic(match["sum"], state) or match.group()
    values = state.value(match["braced"] or match["name"])
    empty = values is None or ((match["how"] or "").startswith(":") and not "".join(values))
    if empty and match["how"]:
        return _text((match["default"], False, True), state)
    return match.group() if values is None else " ".join(values)


_OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip


def _arithmetic(text: str, state: _State) -> str | None:
    """Whole numbers, names, + - * / % and parentheses; None for anything else."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return int("".join(state.value(node.id) or []))
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise ValueError

    try:
        return str(value(ast.parse(_EXPANSION.sub(r"\g<braced>\g<name>", text).strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None
