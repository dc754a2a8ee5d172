"""A search's result as tables for a terminal or a pipe."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.planner.intervals import LEVEL
from megatron.planner.intervals.interval import interval_text
from megatron.planner.search.bill import Bill, money
from megatron.planner.search.outcome import Choice, Kept, Outcome, Rejected

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


def best_table(outcome: Outcome, kept: Sequence[tuple[int | None, Kept]], *, plain: bool) -> Table:
    """A row for each of these of `Outcome.rows`. `plain`: neither lines nor colours."""
    from rich import box
    from rich.table import Table

    table = Table(box=None if plain else box.SIMPLE, header_style="" if plain else "bold", pad_edge=False)
    rows = [cells(each, rank, outcome.gain(each)) for rank, each in kept]
    shown = [index for index, _ in enumerate(HEADINGS) if any(says(index, row[index]) for row in rows)]
    for index in shown:
        is_text = HEADINGS[index] in TEXTS
        table.add_column(HEADINGS[index], justify="left" if is_text else "right", no_wrap=plain or not is_text)
    for (_, each), row in zip(kept, rows, strict=True):
        style = "" if plain or not each.estimate.under_pressure else "yellow"
        table.add_row(*(row[index] for index in shown), style=style)
    return table


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
