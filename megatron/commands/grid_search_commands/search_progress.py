"""How far a search is, on a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.planner.search.search import Progress


@contextmanager
def progress_bars() -> Iterator[Progress | None]:
    """A bar on standard error while it is a terminal; nothing else is ever printed there by it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        tasks: dict = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report
