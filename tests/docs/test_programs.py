"""docs/programs.md is true: its files are read, proved and refused as it says."""

import re
import shlex
from pathlib import Path

import pytest

from megatron.commands.schedule import main as tool
from megatron.pipeline.schedules import read_schedule
from megatron.pipeline.schedules.continuation import Repetition

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "programs.md").read_text()
PAIRS, CHECKED, SWAPS, RHYTHM, REFUSED, LOST, DRAWN, _ = re.findall(
    r"```\n(.*?)```", re.sub(r"```bash.*?```", "", PAGE, flags=re.DOTALL), re.DOTALL
)


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """In a folder with the files of the page."""
    monkeypatch.chdir(tmp_path)
    Path("pairs.csv").write_text(PAIRS)
    Path("rhythm.csv").write_text(RHYTHM)


def test_the_first_file_is_checked_as_shown(capsys):
    """With its fill, its period and its hash."""
    command, _, shown = CHECKED.partition("\n")
    assert tool(shlex.split(command.removeprefix("$ python tools/schedule.py "))) == 0
    assert capsys.readouterr().out == shown


def test_completed_rows_are_the_same_program(capsys):
    """`show --complete` writes what a run would execute."""
    assert tool(["show", "pairs.csv", "--complete", "--csv", "whole.csv"]) == 0
    assert read_schedule("whole.csv") == read_schedule("pairs.csv")


def test_the_file_with_activations_on_the_host():
    """It runs for any number of batches, and its ranks hold fewer than the four microbatches of a batch."""
    Path("swaps.csv").write_text(SWAPS)
    assert read_schedule("swaps.csv").max_saved_on_rank((4,)) == (3, 3)


def test_fill_and_period(tmp_path):
    """What is found in the second file, what is refused of it, and what its first two batches alone are."""
    assert read_schedule("rhythm.csv").repetition == Repetition(1, 1)
    text = RHYTHM.replace("# batches", "# fill: 0\n# period: 1\n# batches")
    Path("given.csv").write_text(text)
    with pytest.raises(ValueError, match=re.escape(REFUSED.strip().removesuffix("..."))):
        read_schedule("given.csv")


def test_copies_are_drawn_as_shown(capsys):
    """By the model's stages, with the number of the copy; and they run for any number of batches."""
    Path("lost.csv").write_text(LOST)
    command, _, shown = DRAWN.partition("\n")
    assert tool(shlex.split(command.removeprefix("$ python tools/schedule.py "))) == 0
    assert capsys.readouterr().out == shown
    assert tool(["check", "lost.csv"]) == 0
    checked = capsys.readouterr().out
    assert "ranks, stages            3, 3, copies of the model's 2" in checked
    assert "proved for every number of batches:" in checked
