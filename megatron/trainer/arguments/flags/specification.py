"""What a command line flag is, as data.

Problem: Megatron-LM's users bring scripts with hundreds of flags. Each must parse, and then either work or be
refused by name with a remedy; help and documentation must not drift from what the parser accepts.

Solution: a flag is a small frozen record and a group is a list of them. The parser, `--help`, `docs/flags.md` and
the refusals are all derived from these records (parser.py, reference.py), and so is what a run says about flags
without effect. Roles say what else treats flags alike: checkpoints and searches ask for those of one.
"""

import argparse
import enum
import math
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import InitVar, dataclass, replace
from typing import Any

_PATHS = ("DIR", "FILE", "PATH", "PREFIX")


class Role(enum.Flag):
    """What code that treats flags in groups knows of a flag.

    CONFIGURATION: a configuration of a search decides it, or it only fits one.
    PREDICTION: how 2bw predicts its weights, which a search leaves as the user has it.
    SHORT_RUN: a profile or a measured run decides it by itself.
    SOURCE: says which samples there are.
    ORDER: decides which sample stands where in the order of training.
    LOCATION: says where things are, or what is known of them only there.
    SHAPE: decides the shape or the meaning of the weights; always the checkpoint's under --use-checkpoint-args.
    SAVED: the checkpoint's under --use-checkpoint-args, unless the command line names it.
    DEGREES: the degrees, and the cut of the layers into stages; taken over by --use-mp-args-from-checkpoint-args.
    PRICED: refused by a training, and priced by a search.
    """

    NONE = 0
    CONFIGURATION = enum.auto()
    PREDICTION = enum.auto()
    SHORT_RUN = enum.auto()
    SOURCE = enum.auto()
    LOCATION = enum.auto()
    SHAPE = enum.auto()
    SAVED = enum.auto()
    DEGREES = enum.auto()
    PRICED = enum.auto()
    ORDER = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag. `stores` makes it a switch (no value follows); `refused` names why it cannot be used here and the
    remedy, `ignored` why it is accepted without effect; with either `neutral` lists the values that ask for nothing.
    `roles` are its group's where it has none of its own."""

    names: tuple[str, ...]
    help: str
    dest: str
    type: Callable[[str], Any] | None = None
    default: Any = None
    choices: Collection[Any] | None = None
    nargs: int | str | None = None
    stores: bool | None = None
    metavar: str | tuple[str, ...] | None = None
    refused: str | None = None
    ignored: str | None = None
    neutral: tuple[Any, ...] = ()
    roles: Role | None = None

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Group:
    """Flags that belong together, in the order in which `--help` shows them. `roles`: of every flag that names none."""

    title: str
    description: str
    flags: tuple[Flag, ...]
    roles: InitVar[Role] = Role.NONE

    def __post_init__(self, roles: Role) -> None:
        own = tuple(replace(flag, roles=roles) if flag.roles is None else flag for flag in self.flags)
        object.__setattr__(self, "flags", own)


def _destination(name: str) -> str:
    name = name.lstrip("-").replace("-", "_")
    return f"pipeline_{name}" if name[0].isdigit() else name  # --2bw-...: an attribute cannot start with a digit


def option(
    name: str,
    kind: Callable[[str], Any],
    default: Any,
    text: str,
    *,
    aliases: Iterable[str] = (),
    choices: Collection[Any] | None = None,
    nargs: int | str | None = None,
    metavar: str | tuple[str, ...] | None = None,
    roles: Role | None = None,
) -> Flag:
    """A flag that takes a value (or several, by `nargs`); text that `metavar` calls a file or the like is a path."""
    return Flag(
        names=(name, *aliases),
        help=text,
        dest=_destination(name),
        type=path if kind is str and metavar in _PATHS else kind,
        default=default,
        choices=choices,
        nargs=nargs,
        metavar=metavar,
        roles=roles,
    )


def switch(
    name: str,
    text: str,
    *,
    aliases: Iterable[str] = (),
    dest: str | None = None,
    roles: Role | None = None,
) -> Flag:
    """A flag that turns something on; off by default."""
    dest = dest or _destination(name)
    return Flag(names=(name, *aliases), help=text, dest=dest, default=False, stores=True, roles=roles)


def negation(name: str, dest: str, text: str, *, aliases: Iterable[str] = (), roles: Role | None = None) -> Flag:
    """A flag such as `--no-rope-fusion` that turns off `dest`, which is on by default."""
    return Flag(names=(name, *aliases), help=text, dest=dest, default=True, stores=False, roles=roles)


def refused(
    name: str,
    reason: str,
    *,
    takes: int | str | None = 0,
    kind: Callable[[str], Any] = str,
    default: Any = None,
    neutral: tuple[Any, ...] = (),
    roles: Role | None = None,
) -> Flag:
    """A flag of Megatron-LM that parses and is then refused with `reason`, which ends in what to do instead.

    `takes` is 0 for a switch, None for one value, else argparse's nargs. A value in `neutral` passes.
    """
    is_switch = takes == 0
    return Flag(
        names=(name,),
        help=f"Refused: {reason}",
        dest=_destination(name),
        type=None if is_switch else kind,
        default=False if is_switch else default,
        nargs=None if is_switch else takes,
        stores=True if is_switch else None,
        refused=reason,
        neutral=neutral,
        roles=roles,
    )


def ignored(
    name: str,
    reason: str,
    *,
    takes: int | None = 0,
    choices: Collection[str] | None = None,
    neutral: tuple[Any, ...] = (),
) -> Flag:
    """A flag of Megatron-LM that is accepted and then reported as without effect, with `reason`.

    `takes` is 0 for a switch, None for one value. A value in `neutral` is not worth a word.
    """
    return Flag(
        names=(name,),
        help=f"Accepted without effect: {reason}.",
        dest=_destination(name),
        type=None if takes == 0 else str,
        default=False if takes == 0 else None,
        choices=choices,
        stores=True if takes == 0 else None,
        ignored=reason,
        neutral=neutral,
    )


def path(text: str) -> str:
    """A path; a leading `~` is the user's home, which a shell leaves alone in `--save=~/run`."""
    return os.path.expanduser(text)


def integer(text: str) -> int:
    """A whole number, with a message that says what was wrong."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None


def number(text: str) -> float:
    """A finite real number, with a message that says what was wrong."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"'{text}' is not a finite number")
    return value
