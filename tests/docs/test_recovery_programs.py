"""docs/recovery_programs.md shows what its commands print."""

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron.commands import schedule

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recovery_programs.md").read_text()


def test_its_commands_print_what_it_shows(tmp_path, monkeypatch, capsys):
    """In the order of the page, in one folder."""
    monkeypatch.chdir(tmp_path)
    num_commands = 0
    for block in re.findall(r"```\n(\$.*?)```", PAGE, re.DOTALL):
        for command, shown in re.findall(r"\$ python tools/schedule\.py (.*)\n((?:[^$].*\n|\n)*)", block):
            assert schedule.main(shlex.split(command)) == 0
            assert capsys.readouterr().out == shown
            num_commands += 1
    assert num_commands == 3


@pytest.mark.full
@pytest.mark.parametrize(
    ("row", "job"),
    [
        ("4 ranks, 4 replicas of 8 microbatches", "--stages 4 --microbatches 8 --replicas 4"),
        pytest.param("4 ranks, 2 replicas of 8", "--stages 4 --microbatches 8 --replicas 2", marks=pytest.mark.full),
        pytest.param(
            "4 ranks, 4 replicas of 8, two ranks lost: `--pairs`", "--stages 4 --microbatches 8 --replicas 4 --pairs",
            marks=pytest.mark.full,
        ),
        pytest.param("8 ranks, 4 replicas of 16", "--stages 8 --microbatches 16 --replicas 4", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_what_moves_gain(tmp_path, row, job):
    """The means of the table: flush, bpipe with its moves, and flush that holds no more than bpipe."""
    [cells] = [line.strip("| ").split(" | ")[1:] for line in PAGE.splitlines() if line.startswith(f"| {row} | ")]
    held = cells[-1].split("`")[1]
    for words, cell in zip(("flush", "bpipe", f"flush {held}"), cells, strict=True):
        assert schedule.main(f"without --schedule {words} {job} --json {tmp_path}/found.json".split()) == 0
        found = json.loads((tmp_path / "found.json").read_text())
        mean = sum(each["slowdown"] - 1 for each in found) / len(found)
        assert cell.split(",")[0] == f"{mean:.1%}"
        if row.startswith("4 ranks, 4 replicas of 8 "):
            first = {"flush": "30.3%", "bpipe": "30.3%"}.get(words, "57.6%")
            assert f"{found[0]['slowdown'] - 1:.1%}" == first and first in PAGE
