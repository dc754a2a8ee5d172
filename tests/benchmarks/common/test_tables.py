"""Tables and figures that benchmarks print."""

from benchmarks.common.tables import show_table, spread


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
