"""Tables of the relay's benchmarks: a column is a heading and what it says of a row."""

import sys
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

Row = dict[str, object]
Columns = Mapping[str, Callable[[Row], str]]


def show_table(title: str, columns: Columns, rows: Sequence[Row]) -> None:
    """Words to the left, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for heading in columns:
        table.add_column(heading, justify="left" if heading == "" else "right")
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    (Console() if sys.stdout.isatty() else Console(width=180, no_color=True)).print(table)
