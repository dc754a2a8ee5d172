"""Flags that only Megatron-LM reads: each is refused with a remedy or noted, with its value, and hides nothing."""

from pathlib import Path

import pytest

from megatron.trainer.arguments import parse_args, validate_args
from megatron.trainer.arguments.flags.parser import FLAGS
from megatron.trainer.arguments.flags.refusals import by_flag, table
from tests.trainer.arguments.command_line import argv

OTHER = {None: "", "N": " 77", "X": " 7.5", "TEXT": " other"}
ROWS = list(table().values())


def _written(row):
    return f"{row.name}{OTHER[row.kind]}"


def test_no_flag_is_in_two_tables():
    """A flag that is read here is not in the table of those that are not."""
    assert len(ROWS) > 450
    assert not {row.name for row in ROWS} & {name for flag in FLAGS for name in flag.names}


def test_no_flag_of_megatron_lm_is_unknown():
    """Each is read here, or the table says what becomes of it."""
    lines = Path(__file__).with_name("megatron_lm_flags.txt").read_text(encoding="utf-8").splitlines()
    theirs = {name for line in lines if not line.startswith("#") for name in line.split()}
    assert len(theirs) > 850
    assert not theirs - {row.name for row in ROWS} - {name for flag in FLAGS for name in flag.names}


def test_refused_flags_are_named_in_one_message():
    """All that are refused, in one message, with the reason and the remedy of each."""
    refused = [row for row in ROWS if row.refused]
    with pytest.raises(ValueError) as error:
        parse_args(argv(" ".join(map(_written, refused))))
    first, *rest = str(error.value).splitlines()
    assert first == f"{len(refused)} flags cannot be used here"
    assert [line.strip() for line in rest] == [f"{_written(row)}: {row.reason}" for row in refused]
    assert all(row.reason.endswith(".") and ("; " in row.reason or "use " in row.reason) for row in refused)


def test_flags_without_effect_are_noted_and_change_nothing():
    """Each of the others is a note, and the configuration is the same as without them."""
    noted = [row for row in ROWS if not row.refused]
    args = parse_args(argv(" ".join(map(_written, noted))))
    notes = [f"{_written(row)} has no effect: {row.reason}" for row in noted]
    assert validate_args(args, world_size=1) == notes
    alone = parse_args(argv())
    validate_args(alone, world_size=1)
    assert {key for key, value in vars(args).items() if vars(alone)[key] != value} == {"unread"}
    assert not any(row.reason.endswith(".") for row in noted)


def test_defaults_of_megatron_lm_ask_for_nothing():
    """A script that spells Megatron-LM's defaults out is neither refused nor told anything."""
    given = [f"{row.name}={row.default}" for row in ROWS if row.default is not None]
    assert len(given) > 100
    assert validate_args(parse_args([*argv(), *given]), world_size=1) == []


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("--grpo-iterations two", r"^--grpo-iterations: 'two' is not a whole number$"),
        ("--grpo-iterations", r"^--grpo-iterations: expected a value$"),
        ("--offload-modules", r"^--offload-modules: expected values$"),
        ("--use-mup 3", r"(?s)^2 flags .*--use-mup: learning rates.*'3' belongs to no flag; write every value"),
        ("--grpo-iterations 2 5", r"^'5' belongs to no flag; write every value after its flag$"),
    ],
)
def test_wrong_values_are_named(written, message):
    """A value of the wrong kind, a missing one, and one too many."""
    with pytest.raises(ValueError, match=message):
        parse_args(argv(written))


def test_words_by_flag():
    """Words go to the flag before them, also behind `=`; words before the first flag to none."""
    words = ["a", "--one", "1", "2", "--two=x=y", "--three"]
    assert [*by_flag(words)] == [("", ["a"]), ("--one", ["1", "2"]), ("--two", ["x=y"]), ("--three", [])]
    assert [*by_flag([])] == []
