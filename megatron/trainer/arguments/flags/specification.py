"""Command line flags as data.

Problem: Megatron-LM's users bring scripts with hundreds of flags. Each must parse, and then either work or be
refused by name with a remedy. The parser, the help, the documentation and the values that the code reads must agree.

Solution: a flag is a small frozen record, and flags about one subject are the fields of one dataclass, which has their
names, types and defaults. The parser, `--help`, `docs/flags.md`, the refusals, `TrainConfig` and the notes on flags
without effect are all derived from these dataclasses (parser.py, reference.py, config.py). A flag has roles, by which
checkpoints and searches select the flags that they treat alike.
"""

import argparse
import enum
import math
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import InitVar, dataclass, field, fields, replace
from types import NoneType
from typing import Any, get_args

_PATHS = ("DIR", "FILE", "PATH", "PREFIX")


class Arguments(argparse.Namespace):
    """The values of a training program's flags by destination, as parsed, while the rules check and complete them.

    `TrainConfig.of` (config.py) makes a configuration from them, in which every value has a type.
    """


class Role(enum.Flag):
    """The groups of flags that other code treats alike; a flag may be in several.

    CONFIGURATION: a configuration of a search sets the flag, or the flag only fits one configuration.
    PREDICTION: how 2bw predicts its weights; a search keeps the user's value.
    SHORT_RUN: a profile or a measured run sets it itself.
    SOURCE: says which samples there are.
    ORDER: decides which sample stands where in the order of training.
    LOCATION: says where things are, or names something that is known only there.
    SHAPE: decides the shape or the meaning of the weights; always the checkpoint's under --use-checkpoint-args.
    SAVED: the checkpoint's under --use-checkpoint-args, unless the command line names it.
    DEGREES: the degrees, and the split of the layers into stages; taken over by --use-mp-args-from-checkpoint-args.
    PRICED: training refuses the flag, or some of its values, and a search prices them.
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
    """One flag.

    Attributes:
        stores: makes the flag a switch, which takes no value, and stores this value.
        refused: why the flag cannot be used here, and the remedy.
        ignored: why the flag is accepted without effect.
        neutral: the values of a refused or ignored flag that ask for nothing.
        roles: None: those of its group.
    """

    names: tuple[str, ...]
    help: str
    dest: str = ""
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
    """Flags that belong together, in the order of `--help`; `roles` apply to every flag that has none of its own."""

    title: str
    description: str
    flags: tuple[Flag, ...]
    roles: InitVar[Role] = Role.NONE

    def __post_init__(self, roles: Role) -> None:
        own = tuple(replace(flag, roles=roles) if flag.roles is None else flag for flag in self.flags)
        object.__setattr__(self, "flags", own)

    @classmethod
    def of(cls, subject: type, title: str, roles: Role = Role.NONE, *, further: Iterable[Flag] = ()) -> "Group":
        """The group of a dataclass's flags and `further` flags; the dataclass's docstring is its description."""
        flags = (_complete(each.metadata["flag"], each.name, each.type) for each in fields(subject))
        return cls(title, " ".join(subject.__doc__.split()), (*flags, *further), roles)


def _complete(flag: Flag, name: str, kind: Any) -> Flag:
    """Complete a field's flag: unless it has a name, it gets the field's, and its values get the field's type."""
    first, *aliases = flag.names
    if flag.stores is not None:
        kind = None
    while get_args(kind):  # of `list[int] | None`: int
        kind = next(each for each in get_args(kind) if each is not NoneType)
    kind = path if flag.metavar in _PATHS else {int: integer, float: number}.get(kind, kind)
    return replace(flag, names=(first or name_of(name), *aliases), dest=name, type=kind)


def name_of(destination: str) -> str:
    """The flag of a destination: `num_layers` gives `--num-layers`.

    A flag that begins with a digit has a destination that begins with `pipeline_`, since no attribute begins with a
    digit.
    """
    short = destination.removeprefix("pipeline_")
    return "--" + (short if short[0].isdigit() else destination).replace("_", "-")


def _field(flag: Flag) -> Any:
    default = {"default_factory": flag.default.copy} if isinstance(flag.default, list) else {"default": flag.default}
    return field(**default, metadata={"flag": flag})


def option(
    default: Any,
    text: str,
    *,
    name: str = "",
    aliases: Iterable[str] = (),
    choices: Collection[Any] | None = None,
    nargs: int | str | None = None,
    metavar: str | tuple[str, ...] | None = None,
    roles: Role | None = None,
) -> Any:
    """The field of a flag that takes a value, or several by `nargs`; with a `metavar` such as FILE, a path."""
    return _field(
        Flag(
            names=(name, *aliases),
            help=text,
            default=default,
            choices=choices,
            nargs=nargs,
            metavar=metavar,
            roles=roles,
        )
    )


def switch(text: str, *, name: str = "", aliases: Iterable[str] = (), roles: Role | None = None) -> Any:
    """The field of a flag that turns something on; off by default."""
    return _field(Flag(names=(name, *aliases), help=text, default=False, stores=True, roles=roles))


def negation(name: str, text: str, *, aliases: Iterable[str] = (), roles: Role | None = None) -> Any:
    """The field of a flag such as `--no-rope-fusion` that turns off what is on by default."""
    return _field(Flag(names=(name, *aliases), help=text, default=True, stores=False, roles=roles))


def path(text: str) -> str:
    """A path, with a leading `~` expanded to the user's home: a shell does not expand it in `--save=~/run`."""
    return os.path.expanduser(text)


def integer(text: str) -> int:
    """Convert to an int. Raises argparse.ArgumentTypeError with a message that quotes the text."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None


def number(text: str) -> float:
    """Convert to a finite float. Raises argparse.ArgumentTypeError with a message that quotes the text."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"'{text}' is not a finite number")
    return value
