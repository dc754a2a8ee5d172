"""What commands print alike: tables for a terminal, without lines and colours for a pipe, and notes on entries."""

import sys
from collections.abc import Collection, Sequence

from megatron.documents.tables import console, plain_table
from megatron.planner.published.entries import Entry


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> None:
    """`right`: indices of the columns with numbers."""
    plain = not sys.stdout.isatty()
    left = [column for index, column in enumerate(columns) if index not in right]
    console(highlight=True).print(plain_table(columns, rows, plain=plain, left=left, wraps=columns))


def note_unread(entries: Sequence[Entry]) -> None:
    """Say which measurements are not read, so that nobody misses them in silence."""
    for entry in entries:
        for text in entry.unread:
            print(f"note: {entry.id}: {text}, and left out", file=sys.stderr)
