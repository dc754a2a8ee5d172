"""A sweep as a table for a terminal or a pipe, for its page, and as records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.planner.search.bill import amount
from megatron.planner.search.picture import describe
from megatron.planner.search.records import kept_record
from megatron.planner.search.sweep import Sweep, SweepPoint
from megatron.planner.search.table import HEADINGS, INTERVAL, cells

if TYPE_CHECKING:
    from rich.table import Table

TEXTS = frozenset({"the best configuration", "layers", "memory", "remarks"})


def sweep_rows(sweep: Sweep) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings, and texts of each point, without columns that say nothing in any row."""
    of_best = ("layers", "s/iteration", INTERVAL, "days", sweep.cost_name, "cost/M tokens", "MFU, %", "GiB", "memory")
    names = ("sequence length", "GPUs", "batch", "the best configuration", *of_best, "remarks")
    rows = [_texts(sweep, point) for point in sweep.points]
    shown = [name for name in names if any(row.get(name) for row in rows)]
    return tuple(shown), [tuple(row.get(name, "") for name in shown) for row in rows]


def _texts(sweep: Sweep, point: SweepPoint) -> dict[str, str]:
    """By heading."""
    place = {"sequence length": str(point.sequence_length), "GPUs": str(point.num_gpus)}
    remarks = {"remarks": ", ".join(sweep.remarks(point))}
    if point.best is None:
        return place | remarks
    choice = point.best.choice
    said = {"batch": str(choice.global_batch_size), "the best configuration": describe(choice)}
    of_search = dict(zip(HEADINGS, cells(point.best, 1), strict=True))
    return of_search | said | {sweep.cost_name: amount(point.cost)} | place | remarks


def sweep_table(sweep: Sweep, *, plain: bool) -> Table:
    """A row for each point. `plain`: neither lines nor colours."""
    from rich import box
    from rich.table import Table

    table = Table(box=None if plain else box.SIMPLE, header_style="" if plain else "bold", pad_edge=False)
    names, rows = sweep_rows(sweep)
    for name in names:
        table.add_column(name, justify="left" if name in TEXTS else "right", no_wrap=plain or name not in TEXTS)
    knees = set(map(id, sweep.knees.values()))
    for point, row in zip(sweep.points, rows, strict=True):
        table.add_row(*row, style="bold" if id(point) in knees and not plain else "")
    return table


def sweep_records(sweep: Sweep) -> list[dict]:
    """A flat record of each point; what is null is not known, or cannot run for its `reason`."""
    found = []
    for point in sweep.points:
        on = {"num_gpus": point.num_gpus, "sequence_length": point.sequence_length}
        if point.best is None:
            found.append({**on, "status": "rejected", "reason": point.reason})
            continue
        record = {name: value for name, value in kept_record(point.best, 1).items() if name not in ("rank", "reason")}
        place = {
            "time": point.time, "cost_of_time": point.cost,
            "on_front": point in sweep.fronts[point.sequence_length],
            "is_knee": point == sweep.knees.get(point.sequence_length),
        }  # fmt: skip
        found.append({**on, **record, **place})
    return found
