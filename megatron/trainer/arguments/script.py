"""The flags that a shell script gives to a training program, read without running the script.

Problem: Megatron's users keep their models in shell scripts, as arrays and strings of flags that meet in one command.
Running such a script to see the flags would start a job.

Solution: of the shell, what those scripts are made of is understood: assignments of words, strings and arrays (also
with +=), `$NAME`, `${NAME}`, `${NAME[@]}`, `${NAME[0]}`, `${NAME:-default}` and `$((arithmetic))`. Names that the
script does not set are taken from the environment, and otherwise left as they stand. What stands in `if`, `case`, loops
and functions is not read, nor what is sourced or made by a command; the notes say so.
"""

import ast
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.trainer.arguments.shell import ASSIGNMENT, DEFAULT, NAME, SUM, ShellWord, WordPart, logical_lines

_EXPANSION = re.compile(
    rf"{SUM}"
    rf"|\$\{{(?P<braced>{NAME})(?:\[(?P<index>[@*]|\d+)\])?(?:(?P<how>:?[-=])(?P<default>{DEFAULT}))?\}}"
    rf"|\$(?P<name>{NAME})"
)
_PREFIXES = frozenset({"export", "readonly", "local", "declare", "exec", "nohup", "time", "eval"})
_CLOSES = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "{": "}"}
_SEPARATORS = frozenset({";", "&&", "||"})
_ENDS = re.compile(r"\d?>&\d|&>>?|\d?>>?|<|&&|\|\|?&?|;;?|&")
_PROGRAM = re.compile(r"(?:.*/)?(pretrain_\w+\.py|finetune_bert\.py)")


@dataclass(frozen=True)
class ScriptCommand:
    """A program (the file's name, as `pretrain_gpt.py`), the words after it, and what was not read."""

    program: str
    words: tuple[str, ...]
    notes: tuple[str, ...] = ()


def read_script(text: str, *, environment: Mapping[str, str], source: str = "the script") -> ScriptCommand:
    """The last command of a script that runs a file called pretrain_*.py.

    Raises:
        ValueError: there is none, or a quote or parenthesis does not end.
    """
    shell, found, notes, open_blocks = _Shell(environment), None, [], []
    for words in logical_lines(text, source):
        first = words[0].raw if words else ""
        is_function = first == "function" or (len(words) > 1 and words[1].raw == "(") or first.endswith("(")
        if open_blocks or first in _CLOSES or is_function:
            if not open_blocks:
                notes.append(f"{source}: what stands in '{_shown(words)}' is not read")
            _follow(open_blocks, words)
        elif first in ("source", "."):
            notes.append(f"{source}: '{_shown(words)}' is not followed")
        else:
            found = shell.execute(words) or found
    if found is None:
        raise ValueError(f"{source} runs no pretrain_*.py that can be read; give the model's flags on the command line")
    return ScriptCommand(*found, tuple(notes))


def _shown(words: list[ShellWord]) -> str:
    return " ".join(word.raw for word in words)[:60]


def _follow(open_blocks: list[str], words: list[ShellWord]) -> None:
    """Enter and leave blocks as their words say."""
    for word in words:
        if open_blocks and word.raw == open_blocks[-1]:
            open_blocks.pop()
        elif word.raw in _CLOSES:
            open_blocks.append(_CLOSES[word.raw])


@dataclass
class _Shell:
    """Variables, each a list of words; a string is a list of one."""

    environment: Mapping[str, str]
    variables: dict[str, list[str]] = field(default_factory=dict)

    def execute(self, words: list[ShellWord]) -> tuple[str, tuple[str, ...]] | None:
        """Carry out a line's assignments; returns program and words if it runs a training program."""
        command: list[str] = []
        for word in words:
            match = ASSIGNMENT.match(word.raw)
            if match and all(each in _PREFIXES or each in _SEPARATORS for each in command):
                self._assign(match, word)
            elif _ENDS.fullmatch(word.raw) and any(map(_PROGRAM.fullmatch, command)):
                break
            else:
                command += self._expand(word)
        for place, word in enumerate(command):
            if match := _PROGRAM.fullmatch(word):
                return match.group(1), tuple(command[place + 1 :])
        return None

    def _value(self, name: str) -> list[str] | None:
        if name in self.variables:
            return self.variables[name]
        return [self.environment[name]] if name in self.environment else None

    def _assign(self, match: re.Match, word: ShellWord) -> None:
        name, adds = match.group(1), bool(match.group(2))
        before = (self._value(name) or []) if adds else []
        if word.array is not None:
            self.variables[name] = [*before, *(text for each in word.array for text in self._expand(each))]
            return
        first, *others = word.parts
        parts = [WordPart(first.text[len(match.group()) :], first.is_quoted, first.expands), *others]
        self.variables[name] = [" ".join(before) + "".join(map(self._text, parts))]

    def _expand(self, word: ShellWord) -> list[str]:
        """A word's words: an unquoted variable is split at spaces, a quoted array gives each of its own."""
        only = word.parts[0] if len(word.parts) == 1 else None
        match = _EXPANSION.fullmatch(only.text) if only and only.is_quoted and only.expands else None
        if match and match["index"] in ("@", "*"):
            values = self._value(match["braced"])
            if values is not None:
                return list(values)
        result: list[str | None] = [None]  # the last one is being written; None: not yet begun
        for part in word.parts:
            text = self._text(part)
            if part.is_quoted or not (part.expands and "$" in part.text):
                result[-1] = (result[-1] or "") + text
                continue
            for index, piece in enumerate(re.split(r"\s+", text)):
                if index and result[-1] is not None:
                    result.append(None)
                if piece:
                    result[-1] = (result[-1] or "") + piece
        return [each for each in result if each is not None]

    def _text(self, part: WordPart) -> str:
        return _EXPANSION.sub(self._replacement, part.text) if part.expands else part.text

    def _replacement(self, match: re.Match) -> str:
        if match["sum"] is not None:
            return self._arithmetic(match["sum"], written=match.group())
        values, how, index = self._value(match["braced"] or match["name"]), match["how"] or "", match["index"] or "@"
        if values is not None and index.isdigit():
            values = values[int(index) : int(index) + 1]
        if how and (values is None or (how.startswith(":") and not "".join(values))):
            return self._text(WordPart(match["default"], True, True))
        return match.group() if values is None else " ".join(values)

    def _arithmetic(self, text: str, *, written: str) -> str:
        """Whole numbers, names, + - * / % and parentheses; anything else stays as written."""

        def value(node: ast.AST) -> int:
            if isinstance(node, ast.Constant) and type(node.value) is int:
                return node.value
            if isinstance(node, ast.Name):
                return int("".join(self._value(node.id) or []))
            if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
                return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
            raise ValueError

        plain = re.sub(rf"\$\{{?({NAME})\}}?", r"\1", text).strip()
        try:
            return str(value(ast.parse(plain, mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError):
            return written


_OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
