"""The printed results of benchmarks: tables of rows, and a figure as its median with the least and greatest value."""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

Row = dict[str, object]
Columns = Mapping[str, Callable[[Row], str]]
"""Heading -> a function from a row to the text of its cell."""


def terminal(width: int = 180) -> Console:
    """The terminal, or plain text of `width` characters if the output is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=width, no_color=True)


def show_table(
    title: str, columns: Columns, rows: Sequence[Row], *, left: Sequence[str] = ("",), width: int = 180
) -> None:
    """Print a table. `left`: the columns of words, which are aligned left; columns of numbers are aligned right."""
    table = Table(title=title, title_justify="left")
    for heading in columns:
        table.add_column(heading, justify="left" if heading in left else "right")
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    terminal(width).print(table)


def spread(values: Sequence[float], digits: int, separator: str = "") -> str:
    """Median, least and greatest value as text. `separator`: "," between thousands, or ""."""
    middle, low, high = (
        f"{value:{separator}.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({low}-{high})"
