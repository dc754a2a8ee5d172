"""Command lines whose flags stand in files."""

import pytest

from megatron.documents.flag_files import FlagFileParser


def parser() -> FlagFileParser:
    made = FlagFileParser()
    made.add_argument("--name")
    made.add_argument("--sizes", nargs="+")
    return made


def test_a_file_stands_for_its_words(tmp_path):
    """Several a line or one, quotes, comments, backslashes, a file within a file; what comes later wins."""
    (tmp_path / "sizes").write_text("--sizes 1 2 \\\n  3\n")
    (tmp_path / "flags").write_text(
        f"# a comment\n\n--name 'a b'  # and one behind a word\n@{tmp_path}/sizes\n--more x\n"
    )
    found, rest = parser().parse_known_args([f"@{tmp_path}/flags"])
    assert (found.name, found.sizes, rest) == ("a b", ["1", "2", "3"], ["--more", "x"])
    found, _ = parser().parse_known_args([f"@{tmp_path}/flags", "--name", "c"])
    assert found.name == "c"


def test_what_cannot_be_read_is_refused(tmp_path, capsys):
    """A quote without an end, and a file that is not there."""
    (tmp_path / "flags").write_text("--name 'a\n")
    for file, reason in (("flags", "a quote that does not end in '--name 'a'"), ("none", "No such file")):
        with pytest.raises(SystemExit):
            parser().parse_args([f"@{tmp_path}/{file}"])
        assert reason in capsys.readouterr().err


def test_all_mistakes_at_once_and_no_usage(capsys):
    """Values that are none, missing values, missing and unknown flags: one message, with how to see the usage."""
    made = parser()
    made.prog = "tool"
    made.add_argument("--count", type=int)
    made.add_argument("--way", choices=("up", "down"))
    made.add_argument("--needed", required=True)
    with pytest.raises(SystemExit) as end:
        made.parse_args(["--count", "two", "--way", "left", "--name", "--needed", "x", "--more"])
    head, *mistakes = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and head == "tool: error: 4 mistakes in the command line"
    assert mistakes[-1].endswith("--more (tool --help shows the usage)")
    starts = ("argument --count: invalid int", "argument --way: invalid choice: 'left'", "argument --name: expected",
              "unrecognized arguments: --more")  # fmt: skip
    assert all(line.strip().startswith(start) for line, start in zip(mistakes, starts, strict=True))
    with pytest.raises(SystemExit):
        made.parse_args([])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tool: error: the following arguments are required: --needed (")
    assert made.parse_args(["--way", "up", "--needed", "x"]).way == "up"  # what was wrong before is forgotten


@pytest.mark.parametrize("words", [["--pair=1"], ["--pair", "1"]])
def test_a_value_too_few_is_one_mistake(words, capsys):
    """The values that are there belong to no other flag, and the parser reads the next command line as ever."""
    made = parser()
    made.add_argument("--pair", nargs=2)
    with pytest.raises(SystemExit):
        made.parse_args(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert "argument --pair: expected 2 arguments (" in line
    assert made.parse_args(["--pair", "1", "2"]).pair == ["1", "2"]
