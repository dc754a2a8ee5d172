"""The commands of tools/grid_search.py, a module each, with what they share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.planner.published.entries import Entry


def note_unread(entries: Sequence[Entry]) -> None:
    """Print to standard error which measurements of published entries are not read."""
    for entry in entries:
        for text in entry.unread:
            print(f"note: {entry.id}: {text}, and left out", file=sys.stderr)
