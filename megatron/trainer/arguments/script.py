"""The flags that a shell script gives to a training program, read without running the script.

Problem: Megatron's users keep their models in shell scripts, as arrays and strings of flags that are joined in one
command. Running such a script to see the flags would start a job.

Solution: the reader knows the parts of the shell language that such scripts use: assignments of words, strings and
arrays (also with +=), `$NAME`, `${NAME}`, `${NAME[@]}`, `${NAME[0]}`, `${NAME:-default}` and `$((arithmetic))`. Names
that the script does not set are taken from the environment. Names that the environment lacks, too, and command
substitutions stay as written. The reader skips the bodies of `if`, `case`, loops and functions, sourced files, and
assignments that depend on another command; a note names each of them with its line.
"""

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\)"  # four deep
_BRACED = r"(?:[^{}]|\$\{[^{}]*\})*"  # may contain another variable
_EXPANSION = (
    rf"\$(?P<command>{_PARENTHESES})|\$(?P<name>{_NAME})|\$\{{(?P<braced>{_NAME})(?:\[(?P<index>[@*]|\d+)\])?"
    rf"(?:(?P<how>:?[-=])(?P<default>{_BRACED}))?\}}"
)
_QUOTED = rf"(?:[^\"\\$]|\\.|\${_PARENTHESES}|\$\{{{_BRACED}\}}|\$(?![({{]))*"
_IN_QUOTES = re.compile(rf"\\(?P<escaped>[\"\\$`]|\r?\n)|{_EXPANSION}")
_UNKNOWN = rf"\$\{{{_BRACED}\}}|`[^`]*`"
_PIECE = re.compile(
    rf"'[^']*'|\\[^\r\n]|\"(?P<double>{_QUOTED})\"|\\(?P<escaped>\r?\n)|{_EXPANSION}|(?P<unknown>{_UNKNOWN})", re.DOTALL
)
_WORD = rf"'[^']*'|\"{_QUOTED}\"|\\.|\${_PARENTHESES}|{_UNKNOWN}|\$(?![({{])|[^\s'\"\\$;|&<>()`]"
_TOKEN = re.compile(
    r"(?:[^\S\n]|\\\r?\n|#[^\n]*)*(?:\d?>&\d|(?P<end>&&|\|\|?&?|;;?|&?>>?|\d>>?|[<&()\n])"
    rf"|(?P<word>(?:{_WORD})+)(?P<array>(?<==)\()?|(?P<open>.|\Z))",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(rf"({_NAME})(\[.*\])?(\+?)=(.*)", re.DOTALL)
_SUM = re.compile(r"\(\((?:[\d\s()+/%-]|\*(?!\*))+\)\)")
_PREFIXES = frozenset({"export", "readonly", "local", "declare", "exec", "nohup", "time", "eval"})
_CLOSES = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "{": "}"}
_PROGRAM = re.compile(r"(?:.*/)?(?:pretrain_\w+|finetune_bert)\.py")
_REMEDY = "write the model's flags into a file and give @FILE in place of the script"


@dataclass(frozen=True)
class ScriptCommand:
    """A program's file name, such as `pretrain_gpt.py`, its arguments, and notes on parts that were not read."""

    program: str
    argv: tuple[str, ...]
    notes: tuple[str, ...] = ()


def read_script(text: str, *, environment: Mapping[str, str], source: str = "the script") -> ScriptCommand:
    """The last command in a script that runs a file called pretrain_*.py or finetune_bert.py.

    Raises ValueError if there is none, or if a quote or parenthesis does not end.
    """
    reader = _Reader(f"{text}\n", source, {name: [value] for name, value in environment.items()})
    for token in _TOKEN.finditer(reader.text):
        reader.take(token)
    if not reader.found:
        raise ValueError("; ".join([f"{source} runs no pretrain_*.py that can be read", *reader.notes[:2], _REMEDY]))
    return ScriptCommand(reader.found[0].rpartition("/")[2], tuple(reader.found[1:]), tuple(reader.notes))


@dataclass
class _Reader:
    """A reader that goes through a script once. Variables are lists of words; a string is a list of one word."""

    text: str
    source: str
    variables: dict[str, list[str]]
    found: list[str] = field(default_factory=list)  # a training program and its arguments
    notes: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)  # the words that will close the open blocks
    command: list[str] = field(default_factory=list)  # the words of the current command so far
    depends: bool = False  # whether another command decides if this one runs
    array: tuple[str, list[str], int] | None = None  # the array being read: name, words so far, start

    def take(self, token: re.Match) -> None:
        """Read the next operator, or the next word of a command."""
        word, only_assigns = token["word"], all(each in _PREFIXES or each.startswith("-") for each in self.command)
        note = None
        if token["open"] or (token["open"] is not None and self.array):
            start = self.array[2] if self.array else token.start("open")
            raise ValueError(self._said(start, f"has a quote or parenthesis that does not end; {_REMEDY}"))
        if self.array and token["end"] == ")":
            self.variables[self.array[0]], self.array = self.array[1], None
        elif self.array:
            self.array[1].extend(self._words(word or ""))
        elif token["end"]:
            self.depends = token["end"] in ("&&", "||") and (self.depends or not only_assigns)
            places = [place for place, each in enumerate(self.command) if _PROGRAM.fullmatch(each)]
            self.found, self.command = self.command[places[0] :] if places else self.found, []
        elif word and only_assigns and (assignment := _ASSIGNMENT.fullmatch(word)):
            name, index, adds, text = assignment.groups()
            note = "assigns what is not read" if not self.blocks and (self.depends or index) else None
            name, before = "" if self.blocks or note else name, self.variables.get(name, []) if adds else []
            if token["array"]:
                self.array = name, [*before], token.start("word")
            else:
                self.variables[name] = [" ".join(before) + "".join(self._words(text, splits=False))]
        elif self.blocks and word == self.blocks[-1]:
            self.blocks.pop()
        elif word in _CLOSES and (self.blocks or self.command[:1] in ([], ["function"])):
            note = None if self.blocks else "opens a block that is not read"
            self.blocks.append(_CLOSES[word])
        elif word and not self.blocks:
            note = "is not followed" if word in ("source", ".") and not self.command else None
            self.command += self._words(word)
        if note:
            self.notes.append(self._said(token.start("word"), note))

    def _said(self, position: int, what: str) -> str:
        before = self.text[:position].split("\n")
        line = self.text.split("\n")[len(before) - 1].strip()[:60]
        return f"{self.source}: '{line}' (line {len(before)}) {what}"

    def _words(self, text: str, *, splits: bool = True) -> list[str]:
        """Expand a word to words: an unquoted variable is split at spaces, a quoted array gives a word per element."""

        def quoted(piece: re.Match) -> str:
            if piece.lastgroup is None:
                return piece[0]
            double = piece["double"]
            array = splits and double and _IN_QUOTES.fullmatch(double)
            if array and array["index"] == "@" and array["braced"] in self.variables:
                return shlex.join(self.variables[array["braced"]])
            value = self._replaced(piece) if double is None else _IN_QUOTES.sub(self._replaced, double)
            is_split = splits and double is None and value != piece[0]
            return re.sub(r"\S+", lambda each: shlex.quote(each[0]), value) if is_split else shlex.quote(value)

        return shlex.split(_PIECE.sub(quoted, text))

    def _replaced(self, match: re.Match) -> str:
        """The expansion of a variable, a sum or an escaped letter; an unknown one stays as written."""
        if match["escaped"]:
            return match["escaped"].strip("\r\n")
        if match["command"]:  # a sum, perhaps, of numbers and of names of numbers
            numbers = {name: each[0] for name, each in self.variables.items() if each and each[0].isdigit()}
            plain = re.sub(rf"\$?\{{?({_NAME})\}}?", lambda name: numbers.get(name[1], name[0]), match["command"])
            with suppress(SyntaxError, TypeError, ZeroDivisionError):
                return str(eval(plain.replace("/", "//"))) if _SUM.fullmatch(plain) else match[0]
            return match[0]
        values, how, index = self.variables.get(match["braced"] or match["name"]), match["how"] or "", match["index"]
        if values is not None and (index or "@").isdigit():
            values = values[int(index) : int(index) + 1]
        if how and (values is None or (how.startswith(":") and not "".join(values))):
            return _IN_QUOTES.sub(self._replaced, match["default"].strip('"'))
        return match[0] if values is None else " ".join(values)
