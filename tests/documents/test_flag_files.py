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
