"""What a search and a sweep found, as tables for a terminal, a pipe and a page."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.documents.tables import plain_table
from megatron.planner.intervals import LEVEL
from megatron.planner.intervals.interval import interval_text
from megatron.planner.search.bill import Bill, amount, money
from megatron.planner.search.outcome import Choice, Kept, Outcome, Rejected
from megatron.planner.search.sweep import Sweep, SweepPoint

if TYPE_CHECKING:
    from rich.table import Table

INTERVAL = f"s ({LEVEL:.0%})"
HEADINGS = (
    "rank", "gain, %", "schedule", "layers", "t", "p", "d", "cp", "ep", "v", "microbatch", "microbatches", "recompute",
    "split optimizer", "rank mapping", "s/iteration", INTERVAL, "sequences/s", "days", "cost", "cost/M tokens",
    "MFU, %", "bubble, %", "GiB", "memory", "notes",
)  # fmt: skip
TEXTS = frozenset({"schedule", "layers", "recompute", "split optimizer", "rank mapping", "memory", "notes"})


BESIDE = "beside"
"""In place of the rank of what stands beside the ranking."""


def _percent(gain: float) -> str:
    return f"{round(100 * gain, 1) + 0.0:+.1f}"  # without the sign of -0.0


def cells(each: Kept, rank: int | None, gain: float | None = None) -> tuple[str, ...]:
    """The texts under `HEADINGS`; of what stands beside the ranking, `rank` is None. A time with ~ is an estimate
    (`Kept.is_simulated`)."""
    choice, estimate = each.choice, each.estimate
    return (
        BESIDE if rank is None else str(rank), "" if gain is None else _percent(gain), _schedule(choice),
        each.layers, str(choice.tensor), str(choice.pipeline), str(choice.data),
        str(choice.context or ""), str(choice.expert or ""), str(choice.virtual),
        str(choice.micro_batch_size), str(estimate.configuration.num_microbatches), choice.recompute.value,
        "yes" if choice.distributed_optimizer else "no", choice.rank_mapping,
        f"{'' if each.is_simulated else '~'}{_number(estimate.seconds)}",
        "" if each.accuracy is None else interval_text(each.accuracy, estimate.seconds),
        _number(each.sequences_per_second), *_bill(each.bill),
        f"{100 * estimate.mfu:.1f}", f"{100 * estimate.bubble:.1f}", f"{each.memory_gib:.1f}", estimate.verdict.word,
        "; ".join(each.notes),
    )  # fmt: skip


def _bill(bill: Bill | None) -> tuple[str, str, str]:
    """Days, money for all and money for a million tokens, as far as they are known."""
    if bill is None:
        return "", "", ""
    amounts = (bill.cost, bill.cost_per_million_tokens)
    whole, million = ("" if each is None else money(each, bill.currency) for each in amounts)
    return "" if bill.days is None else _number(bill.days), whole, million


def _schedule(choice: Choice) -> str:
    predicts = choice.provisional not in (None, "off")
    return f"{choice.schedule} ({choice.provisional})" if predicts else choice.schedule


def describe(choice: Choice) -> str:
    """A configuration in few words."""
    buffers = " with one gradient buffer" if choice.single_gradient_buffer else ""
    parts = [choice.schedule + buffers, f"t={choice.tensor}", f"p={choice.pipeline}", f"d={choice.data}"]
    parts += [f"{name}={size}" for name, size in (("cp", choice.context), ("ep", choice.expert)) if (size or 1) > 1]
    if choice.virtual > 1:
        parts.append(f"v={choice.virtual}")
    parts.append(f"microbatches of {choice.micro_batch_size}")
    if choice.recompute.value != "none":
        parts.append(f"recompute {choice.recompute.value}")
    return ", ".join(parts)


def best_table(outcome: Outcome, kept: Sequence[tuple[int | None, Kept]], *, plain: bool) -> Table:
    """A row for each of these of `Outcome.rows`. `plain`: neither lines nor colours."""
    rows = [cells(each, rank, outcome.gain(each)) for rank, each in kept]
    shown = [index for index, _ in enumerate(HEADINGS) if any(says(index, row[index]) for row in rows)]
    return plain_table(
        [HEADINGS[index] for index in shown], [[row[index] for index in shown] for row in rows], plain=plain,
        left=TEXTS, wraps=TEXTS, styles=["yellow" if each.estimate.under_pressure else "" for _, each in kept],
    )  # fmt: skip


def says(index: int, text: str) -> bool:
    """A column that says nothing in any row is left out."""
    return text != "1" if HEADINGS[index] == "v" else bool(text)


def reasons(rejected: Sequence[Rejected], most: int) -> list[tuple[str, int]]:
    """The commonest kinds of reasons, an example each, and how many choices they excluded."""
    kinds: dict[str, list[Rejected]] = {}
    for each in rejected:
        kinds.setdefault(_kind(each.reason), []).append(each)
    ordered = sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0]))
    return [(_example(kind, of_kind), len(of_kind)) for kind, of_kind in ordered[:most]]


_MEMORY = "out of memory"


def _kind(reason: str) -> str:
    """A reason without its numbers."""
    return _MEMORY if " misses " in reason else re.sub(r"\b\d+\b", "N", reason)


def _example(kind: str, of_kind: Sequence[Rejected]) -> str:
    if kind != _MEMORY:
        return of_kind[0].reason
    near = min(of_kind, key=lambda each: math.inf if each.missing_gib is None else each.missing_gib)
    return f"{_MEMORY}; the nearest: {near.reason}"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


# --- a sweep

SWEEP_TEXTS = frozenset({"the best configuration", "layers", "memory", "remarks"})


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
    names, rows = sweep_rows(sweep)
    knees = set(map(id, sweep.knees.values()))
    styles = ["bold" if id(point) in knees else "" for point in sweep.points]
    return plain_table(names, rows, plain=plain, left=SWEEP_TEXTS, wraps=SWEEP_TEXTS, styles=styles)
