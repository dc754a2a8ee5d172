"""What benchmarks leave behind, and print."""

import json
import os
from argparse import Namespace
from pathlib import Path

from benchmarks.common.results import save, set_environment, status_of
from benchmarks.common.tables import show_table, spread


def test_flags_and_rows_are_saved(tmp_path):
    """But for the file itself and what is left out; without --json nothing is written."""
    file = tmp_path / "found.json"
    save(Namespace(json=file, stages=4, pictures=Path("a")), [{"p": 1}], unsaved=("pictures",), found={"x": 2})
    assert json.loads(file.read_text()) == {"settings": {"stages": 4}, "rows": [{"p": 1}], "found": {"x": 2}}
    save(Namespace(json=None, stages=4), [{"p": 1}])
    assert list(tmp_path.iterdir()) == [file]


def test_what_ran_otherwise_is_named(capsys):
    """A row that says nothing of it is as it should be."""
    rows = [{"p": 1, "executed_is_program": True}, {"p": 2}]
    assert status_of(rows, lambda row: f"p={row['p']}") == 0
    rows.append({"p": 3, "executed_is_program": False})
    assert status_of(rows, lambda row: f"p={row['p']}") == 1
    assert capsys.readouterr().err == "executed something else than the program: p=3\n"


def test_the_users_environment_stays(monkeypatch):
    """Only what is not set is set."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    set_environment()
    assert (os.environ["OMP_NUM_THREADS"], os.environ["GLOO_SOCKET_IFNAME"]) == ("3", "lo")


def test_spread():
    """Median, least and greatest, with thousands apart where that is asked for."""
    assert spread([3.0, 1.0, 2.25], 1) == "2.2 (1.0-3.0)"
    assert spread([1234.5, 2.0], 2, ",") == "618.25 (2.00-1,234.50)"


def test_a_column_says_something_of_each_row(capsys):
    """In a pipe as wide as it is; words to the left, numbers to the right."""
    columns = {"": lambda row: row["name"], "ms": lambda row: f"{row['seconds'] * 1e3:.0f}"}
    show_table("times", columns, [{"name": "a long name", "seconds": 0.001}, {"name": "b", "seconds": 12.0}])
    lines = [line.strip("│ \n") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "times" and [line.split("│") for line in lines if line.startswith(("a", "b"))] == [
        ["a long name ", "     1"],
        ["b           ", " 12000"],
    ]
