"""Printed tables, with lines and colours on a terminal, and plain and uncut in a pipe; and numbers as text."""

from __future__ import annotations

import sys
from collections.abc import Collection, Container, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def console(width: int = 10_000, *, highlight: bool = False) -> Console:
    """A console for standard output. If that is not a terminal, there are no colours, and `width` bounds the lines."""
    from rich.console import Console

    plain = not sys.stdout.isatty()
    return Console(width=width if plain else None, no_color=plain or None, highlight=highlight)


def ranges_of(numbers: Iterable[int]) -> str:
    """Ascending numbers as text, such as 1-5 7."""
    ranges: list[list[int]] = []
    for each in numbers:
        if ranges and each == ranges[-1][-1] + 1:
            ranges[-1][1:] = [each]
        else:
            ranges.append([each])
    return " ".join("-".join(map(str, each)) for each in ranges)


def plain_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, plain: bool, left: Container[str],
    wraps: Container[str] = (), styles: Sequence[str] = (),
) -> Table:  # fmt: skip
    """A table without lines between its columns.

    Args:
        plain: whether the table is for a pipe, without any lines and colours.
        left: the columns of words, which are aligned left; columns of numbers are aligned right.
        wraps: the columns whose texts may be broken on a terminal.
        styles: rich's style of each row on a terminal.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=None if plain else box.SIMPLE, header_style="" if plain else "bold", pad_edge=False)
    for column in columns:
        justify = "left" if column in left else "right"
        table.add_column(column, justify=justify, no_wrap=plain or column not in wraps)
    for index, row in enumerate(rows):
        table.add_row(*row, style=styles[index] if styles and not plain else None)
    return table


def lined_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Container[str]) -> Table:
    """A table with lines, on a terminal and in a pipe. `left`: the columns of words, which are aligned left."""
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> None:
    """Print a table to standard output. `right`: indices of the columns with numbers."""
    plain = not sys.stdout.isatty()
    left = [column for index, column in enumerate(columns) if index not in right]
    console(highlight=True).print(plain_table(columns, rows, plain=plain, left=left, wraps=columns))
