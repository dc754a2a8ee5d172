"""What benchmarks print: tables of rows, and a figure as its median with least and greatest."""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

Row = dict[str, object]
Columns = Mapping[str, Callable[[Row], str]]
"""A heading, and what it says of a row."""


def terminal(width: int = 180) -> Console:
    """The terminal; where output goes elsewhere, plain text so wide."""
    return Console() if sys.stdout.isatty() else Console(width=width, no_color=True)


def show_table(
    title: str, columns: Columns, rows: Sequence[Row], *, left: Sequence[str] = ("",), width: int = 180
) -> None:
    """Words, in the columns `left`, to the left, and numbers to the right."""
    table = Table(title=title, title_justify="left")
    for heading in columns:
        table.add_column(heading, justify="left" if heading in left else "right")
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    terminal(width).print(table)


def spread(values: Sequence[float], digits: int, separator: str = "") -> str:
    """Median, least and greatest; `separator`: "," between thousands, or none."""
    middle, low, high = (
        f"{value:{separator}.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({low}-{high})"
