"""What commands print alike: tables for a terminal, without lines and colours for a pipe, and notes on entries."""

import sys
from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from megatron.planner.published.entries import Entry

_PIPE_WIDTH = 10_000  # where nothing is cut


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> None:
    """`right`: indices of the columns with numbers."""
    plain = not sys.stdout.isatty()
    table = Table(box=None if plain else box.SIMPLE, header_style="" if plain else "bold", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in right else "left", no_wrap=plain)
    for row in rows:
        table.add_row(*row)
    Console(width=_PIPE_WIDTH, no_color=True).print(table) if plain else Console().print(table)


def note_unread(entries: Sequence[Entry]) -> None:
    """Say which measurements are not read, so that nobody misses them in silence."""
    for entry in entries:
        for text in entry.unread:
            print(f"note: {entry.id}: {text}, and left out", file=sys.stderr)
