"""An argparse parser made from the flag records, whose errors are one sentence.

An error names the flag that was meant if the word is a misspelling of it. Similar letters do not make a similar
meaning: the flag nearest to another program's `--data-impl` is the unrelated `--data-path`, and such a hint would
mislead the user. So a hint requires the same flag with a slip: other separators or capitals, a wrong letter or two, or
one word left out after the first. Among equally near flags, a flag that works is preferred to a refused one, then one
with the same first word. If two are left, the error names none.
"""

import argparse
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import NoReturn

from megatron.documents.flag_files import FlagFileParser, in_one
from megatron.trainer.arguments.flags import experts, files, model, parallel, refusals, training
from megatron.trainer.arguments.flags.specification import Arguments, Flag, Group, Role

GROUPS: tuple[Group, ...] = (
    model.MODEL, model.ATTENTION, model.MULTI_TOKEN, experts.EXPERTS, parallel.PIPELINE, parallel.DISTRIBUTED,
    training.FREEZING, training.BATCH, training.REGULARIZATION, training.LEARNING_RATE, training.PRECISION,
    training.EIGHT_BITS, training.RECOMPUTE, files.DATA, files.CONVERSATIONS, files.TOKENIZER, model.BERT, model.T5,
    model.CLASSIFICATION, model.VISION, files.CHECKPOINT, files.LOGGING, files.DRY_RUN, refusals.IGNORED,
    refusals.REFUSED,
)  # fmt: skip
PROGRAMS: dict[str, tuple[str, dict]] = {
    "gpt": ("pretrain_gpt.py", {}),
    "bert": ("pretrain_bert.py", {"architecture": "bert", "tokenizer_type": "BertWordPieceLowerCase"}),
    "t5": ("pretrain_t5.py", {"architecture": "t5", "tokenizer_type": "BertWordPieceCase"}),
    "vit": ("pretrain_vision_classify.py", {"architecture": "vit"}),
    "bert-classify": (
        "finetune_bert.py",
        {"architecture": "bert-classify", "tokenizer_type": "BertWordPieceLowerCase"},
    ),
}
"""Architecture -> the program that trains it, and the program's defaults that differ from the flags'."""
FLAGS: tuple[Flag, ...] = tuple(flag for group in GROUPS for flag in group.flags)
_HEAD = "flags cannot be used here"


def destinations(role: Role) -> tuple[str, ...]:
    """The destinations of the flags with this role, in the order of docs/flags.md."""
    return tuple(flag.dest for flag in FLAGS if role in flag.roles)


class _FlagParser(FlagFileParser):
    def parse_all(self, args=None, namespace=None):
        namespace, rest, mistakes = super().parse_all(args, namespace)
        return namespace, rest, self.with_usage(list(map(_sentence, mistakes)))

    def end(self, mistakes: list[str]) -> NoReturn:
        raise ValueError(in_one(self.with_usage(list(map(_sentence, mistakes))), _HEAD))


def _sentence(mistake: str) -> str:
    """argparse's error with only the first of the flag's names, where argparse lists all aliases."""
    return re.sub(r"^(--[\w-]+)(/--[\w-]+)+", r"\1", mistake.removeprefix("argument "))


def add_groups(parser: argparse.ArgumentParser, groups: Sequence[Group]) -> None:
    """Add each group's flags, without defaults: `fill_defaults` sets these, so that it knows which flags were given."""
    for group in groups:
        target = parser.add_argument_group(group.title, group.description)
        for flag in group.flags:
            target.add_argument(*flag.names, dest=flag.dest, help=_help(flag), default=argparse.SUPPRESS, **_how(flag))


def _how(flag: Flag) -> dict:
    if flag.stores is not None:
        return {"action": "store_true" if flag.stores else "store_false"}
    how = {"type": flag.type, "nargs": flag.nargs, "metavar": flag.metavar, "choices": flag.choices}
    if flag.metavar is None and flag.choices is None:
        how["metavar"] = {"integer": "N", "number": "X"}.get(getattr(flag.type, "__name__", ""), "VALUE")
    return how


def describe_default(flag: Flag) -> str:
    """The default in words; empty if there is none to show."""
    if flag.stores is not None or flag.default in (None, "", []):
        return ""
    if isinstance(flag.default, list):
        return " ".join(map(str, flag.default))
    return f"{flag.default:g}" if isinstance(flag.default, float) else str(flag.default)


def _help(flag: Flag) -> str:
    default = describe_default(flag)
    text = flag.help if not default or flag.refused else f"{flag.help} Default: {default}."
    return text.replace("%", "%%")


def build_parser(prog: str = "pretrain_gpt.py", groups: Sequence[Group] = GROUPS) -> FlagFileParser:
    """The parser with all groups; its `end` raises ValueError."""
    parser = _FlagParser(
        prog=prog,
        allow_abbrev=False,
        description="Train a transformer through a pipeline program.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=118),
    )
    add_groups(parser, groups)
    return parser


@cache
def _shared_parser(prog: str) -> FlagFileParser:
    """The parser, built once: a search parses thousands of command lines."""
    return build_parser(prog)


def fill_defaults(namespace: Arguments, groups: Sequence[Group], preferred: dict | None = None) -> Arguments:
    """Record the given destinations in `given`, then fill the rest from `preferred` and the flags' defaults."""
    namespace.given = tuple(sorted(set(vars(namespace)) - {"unknown", "unread"}))
    for name, value in (preferred or {}).items():
        if not hasattr(namespace, name):
            setattr(namespace, name, value)
    for group in groups:
        for flag in group.flags:
            if not hasattr(namespace, flag.dest):
                default = list(flag.default) if isinstance(flag.default, list) else flag.default
                setattr(namespace, flag.dest, default)
    return namespace


def refuse(namespace: Arguments, groups: Sequence[Group], accepts: Role = Role.NONE) -> None:
    """Raise one ValueError for all mistakes in `namespace.unknown` and all refused flags that ask for something.

    Refused flags that no value makes neutral are removed from `namespace`, except those with a role in `accepts`.
    """
    reasons = list(namespace.unknown)
    del namespace.unknown
    for group in groups:
        for flag in group.flags:
            if accepts & flag.roles:
                continue
            if flag.refused and flag.dest in namespace.given and getattr(namespace, flag.dest) not in flag.neutral:
                reasons.append(f"{shown(flag, getattr(namespace, flag.dest))}: {flag.refused}")
            if flag.refused and not flag.neutral:
                delattr(namespace, flag.dest)  # nothing reads it
    if reasons:
        raise ValueError(in_one(reasons, _HEAD))


def shown(flag: Flag, value: object) -> str:
    """A flag with its value as the user may have written it."""
    if flag.stores is not None:
        return flag.name
    return f"{flag.name} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def parse_known(parser: FlagFileParser, argv: Sequence[str] | None) -> Arguments:
    """Parse all of `argv`; the namespace's `unknown` and `unread` hold a sentence for each problem.

    `unknown`: invalid values, unknown flags (with the known flag that was misspelled), flags of Megatron-LM alone that
    are refused, and values without a flag. `unread`: flags of Megatron-LM alone that have no effect.
    """
    namespace, extra, mistakes = parser.parse_all(argv, Arguments())
    known = [word for action in parser._actions for word in action.option_strings]
    refused = {word for flag in FLAGS if flag.refused for word in flag.names}
    namespace.unknown, namespace.unread = mistakes, []
    seen = set()
    for name, values in refusals.by_flag(extra):
        elsewhere = refusals.table().get(name)
        taken = elsewhere.takes(values) if elsewhere else len(values) if name else 0
        if elsewhere:
            _judge(elsewhere, values[:taken], namespace)
        elif name and name not in seen:
            near = meant(name, known, refused)
            hint = f"did you mean {near}?" if near else "see --help for all flags"
            mistakes.append(f"{name} is not a known flag; {hint}")
        if taken < len(values):
            mistakes.append(f"'{values[taken]}' belongs to no flag; write every value after its flag")
        seen.add(name)
    namespace.unread = tuple(namespace.unread)
    return namespace


def _judge(flag: refusals.Elsewhere, values: list[str], namespace: Arguments) -> None:
    """Add a sentence about a flag that only Megatron-LM has, to the mistakes (`unknown`) or to the notes (`unread`)."""
    try:
        asks = flag.asks(values)
    except ValueError as error:
        namespace.unknown.append(str(error))
        return
    written = " ".join([flag.name, *values])
    if asks and flag.refused:
        namespace.unknown.append(f"{written}: {flag.reason}")
    elif asks:
        namespace.unread.append(f"{written} has no effect: {flag.reason}")


def parse_args(
    argv: Sequence[str] | None = None,
    *,
    prog: str = "pretrain_gpt.py",
    defaults: dict | None = None,
    accepts: Role = Role.NONE,
) -> Arguments:
    """Parse a command line into one namespace with Megatron-LM's names.

    Args:
        argv: words after the program's name; None takes them from `sys.argv`.
        prog: the program's name in `--help`.
        defaults: defaults of this program that differ from the table's; `architecture` ("gpt", "bert",
            "t5", "vit", "bert-classify") has no flag.
        accepts: flags with this role are not refused.

    The namespace's `given` holds the destinations that the command line named. Values are not yet checked against each
    other: see `validate_args`. Raises ValueError with one sentence.
    """
    parser = _shared_parser(prog)
    namespace = parse_known(parser, sys.argv[1:] if argv is None else argv)
    fill_defaults(namespace, GROUPS, {"architecture": "gpt", "made_program": None, **(defaults or {})})
    refuse(namespace, GROUPS, accepts)
    return namespace


# --- which known flag was meant ---------------------------------------------------------------------------------------

_LONG = 9  # a name with so many letters may have two wrong ones
_NEGATIONS = frozenset({"no", "non", "disable"})


def meant(name: str, known: Iterable[str], refused: Collection[str] = ()) -> str | None:
    """The flag of which `name` is a misspelling, or None. `refused`: the flags of `known` that cannot be used."""
    typed = _plain(name)
    allowed = 2 if len(typed.replace("-", "")) >= _LONG else 1
    best: tuple[int, bool, bool, bool] | None = None
    nearest: list[str] = []
    for flag in known:
        plain = _plain(flag)
        lacks = _lacks_a_word(typed, plain)
        distance = 0 if typed == plain else allowed if lacks else _distance(typed, plain, allowed)
        if distance > allowed:
            continue
        rank = (distance, lacks, flag in refused, typed.split("-")[0] != plain.split("-")[0])
        if best is None or rank < best:
            best, nearest = rank, [flag]
        elif rank == best:
            nearest.append(flag)
    return nearest[0] if len(nearest) == 1 else None


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def _lacks_a_word(typed: str, flag: str) -> bool:
    """Whether a name is a flag with one word left out, as `pipeline-parallel-size` for `pipeline-model-parallel-size`.

    A different first word makes another flag (`max-position-embeddings`), and so does a missing negation.
    """
    words, there = typed.split("-"), flag.split("-")
    if len(words) < 2 or len(there) != len(words) + 1:
        return False
    return any(there[:place] + there[place + 1 :] == words and there[place] not in _NEGATIONS
               for place in range(1, len(there)))  # fmt: skip


def _distance(one: str, other: str, most: int) -> int:
    """The edit distance with insertions, deletions, replacements and swaps; above `most` it is not exact."""
    if abs(len(one) - len(other)) > most:
        return most + 1
    before, row = [], list(range(len(other) + 1))
    for place, letter in enumerate(one, start=1):
        earlier, before, row = before, row, [place]
        for index, compared in enumerate(other, start=1):
            least = min(before[index] + 1, row[-1] + 1, before[index - 1] + (letter != compared))
            if place > 1 and index > 1 and letter == other[index - 2] and one[place - 2] == compared:
                least = min(least, earlier[index - 2] + 1)
            row.append(least)
        if min(row) > most and min(before) > most:
            return most + 1
    return row[-1]
