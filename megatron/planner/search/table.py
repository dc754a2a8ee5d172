"""Tables, files (JSON lines, CSV) and sentences of the results of a search and a sweep."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron.documents.files import write_whole
from megatron.documents.tables import plain_table
from megatron.planner.job.configuration import CHOSEN, SETTINGS, Configuration, remarks
from megatron.planner.job.estimate import Estimate
from megatron.planner.memory.memory import GIB
from megatron.planner.published.interval import LEVEL, Interval, NotValidated, interval_text, short_number
from megatron.planner.search.outcome import Bill, Choice, Kept, Outcome, Rejected, Sweep, SweepPoint, amount, money

if TYPE_CHECKING:
    from rich.table import Table


INTERVAL = f"s ({LEVEL:.0%})"
BESIDE = "beside"
"""The text in place of a rank, for a configuration beside the ranking."""


class Row(NamedTuple):
    """A configuration of `Outcome.rows` with its `Outcome.gain`."""

    rank: int | None
    kept: Kept
    gain: float | None = None


@dataclass(frozen=True)
class Column:
    """A column of tables of configurations.

    Attributes:
        heading: the heading.
        cell: returns the text of a row.
        hint: the tooltip of the heading in the page.
        is_text: whether cells hold words.
        silent: a default text. A column in which each cell is empty or has this text is left out.
    """

    heading: str
    cell: Callable[[Row], str]
    hint: str = ""
    is_text: bool = False
    silent: str = ""

    def says(self, text: str) -> bool:
        return text not in ("", self.silent)


def _size(name: str, hint: str, silent: str = "") -> Column:
    return Column(SETTINGS[name].short, lambda row: str(getattr(row.kept.choice, name) or ""), hint, silent=silent)


def _estimate(heading: str, cell: Callable[[Estimate], str], hint: str = "") -> Column:
    return Column(heading, lambda row: cell(row.kept.estimate), hint)


def _bill(heading: str, cell: Callable[[Bill], str], hint: str) -> Column:
    return Column(heading, lambda row: "" if row.kept.bill is None else cell(row.kept.bill), hint)


COLUMNS = (
    Column("rank", lambda row: BESIDE if row.rank is None else str(row.rank)),
    Column("gain, %", lambda row: "" if row.gain is None else _percent(row.gain),
           "gain in speed over the best of the ranking, of a schedule that is not ranked"),
    Column("schedule", lambda row: _schedule(row.kept.choice), is_text=True),
    Column("layers", lambda row: row.kept.layers,
           "implementation (TE: Transformer Engine, local: megatron.core), and the attention kernel", is_text=True),
    _size("tensor", "tensor parallel ranks"),
    _size("pipeline", "pipeline ranks"),
    _size("data", "replicas"),
    _size("context", "context parallel ranks"),
    _size("expert", "expert parallel ranks"),
    _size("virtual", "stages on each rank", silent="1"),
    Column("microbatch", lambda row: str(row.kept.choice.micro_batch_size)),
    _estimate("microbatches", lambda estimate: str(estimate.configuration.num_microbatches)),
    Column("recompute", lambda row: row.kept.choice.recompute.value, is_text=True),
    Column("split optimizer", lambda row: "yes" if row.kept.choice.distributed_optimizer else "no", is_text=True),
    Column("rank mapping", lambda row: row.kept.choice.rank_mapping, is_text=True),
    Column("s/iteration", lambda row: "~"[row.kept.is_simulated :] + short_number(row.kept.estimate.seconds),
           "~: estimated; the others were simulated"),
    Column(INTERVAL, lambda row: _interval_text(row.kept),
           f"range in which {LEVEL:.0%} of similar published runs lie; not validated: no similar run was compared"),
    Column("sequences/s", lambda row: short_number(row.kept.sequences_per_second)),
    _bill("days", lambda bill: "" if bill.days is None else short_number(bill.days), "for all tokens, without a pause"),
    _bill("cost", lambda bill: _money(bill.cost, bill), "for all tokens"),
    _bill("cost/M tokens", lambda bill: _money(bill.cost_per_million_tokens, bill), "for a million tokens"),
    _estimate("MFU, %", lambda estimate: f"{100 * estimate.mfu:.1f}"),
    _estimate("bubble, %", lambda estimate: f"{100 * estimate.bubble:.1f}"),
    Column("GiB", lambda row: f"{row.kept.memory_gib:.1f}", "memory of the fullest GPU"),
    Column("memory", lambda row: row.kept.estimate.verdict.word, is_text=True),
    Column("notes", lambda row: "; ".join(row.kept.notes), is_text=True),
)  # fmt: skip
"""The columns of tables of configurations. A time with ~ is an estimate (`Kept.is_simulated`)."""

HEADINGS = tuple(column.heading for column in COLUMNS)
TEXTS = frozenset(column.heading for column in COLUMNS if column.is_text)


def cells(each: Kept, rank: int | None, gain: float | None = None) -> tuple[str, ...]:
    """The cells of a row under `HEADINGS`."""
    row = Row(rank, each, gain)
    return tuple(column.cell(row) for column in COLUMNS)


def columns_of(
    outcome: Outcome, rows: Sequence[tuple[int | None, Kept]], *, wanted: Collection[str] = ()
) -> list[tuple[Column, list[str]]]:
    """The columns with their cells for the given rows of `Outcome.rows`. Columns that say nothing in any row are left
    out, unless `wanted` names them."""
    texts = [cells(each, rank, outcome.gain(each)) for rank, each in rows]
    columns = [(column, [row[index] for row in texts]) for index, column in enumerate(COLUMNS)]
    return [each for each in columns if each[0].heading in wanted or any(map(each[0].says, each[1]))]


def _percent(gain: float) -> str:
    return f"{round(100 * gain, 1) + 0.0:+.1f}"  # without the sign of -0.0


def _interval_text(each: Kept) -> str:
    return "" if each.accuracy is None else interval_text(each.accuracy, each.estimate.seconds)


def _money(amount: float | None, bill: Bill) -> str:
    return "" if amount is None else money(amount, bill.currency)


def _schedule(choice: Choice) -> str:
    predicts = choice.provisional not in (None, "off")
    kind = "feedback" if choice.provisional_microbatches == 0 else choice.provisional
    return f"{choice.schedule} ({kind})" if predicts else choice.schedule


def describe(choice: Choice) -> str:
    """Describe a configuration in short text."""
    parts = [" with ".join((choice.schedule, *remarks(choice)))]
    for name in ("tensor", "pipeline", "data", "context", "expert", "virtual"):
        size = getattr(choice, name) or 1
        if size > 1 or name in ("tensor", "pipeline", "data"):
            parts.append(f"{SETTINGS[name].short}={size}")
    parts.append(f"microbatches of {choice.micro_batch_size}")
    if choice.recompute.value != "none":
        parts.append(f"recompute {choice.recompute.value}")
    return ", ".join(parts)


def best_table(outcome: Outcome, kept: Sequence[tuple[int | None, Kept]], *, plain: bool) -> Table:
    """A table with a row for each of `kept` (as in `Outcome.rows`). `plain`: no lines and no colours."""
    shown = columns_of(outcome, kept)
    rows = list(zip(*(texts for _, texts in shown), strict=True))
    return plain_table(
        [column.heading for column, _ in shown], rows, plain=plain, left=TEXTS, wraps=TEXTS,
        styles=["yellow" if each.estimate.under_pressure else "" for _, each in kept],
    )  # fmt: skip


def reasons(rejected: Sequence[Rejected], most: int) -> list[tuple[str, int]]:
    """The most frequent kinds of reasons, each with an example and the number of choices that it rejected."""
    kinds: dict[str, list[Rejected]] = {}
    for each in rejected:
        kinds.setdefault(_kind(each.reason), []).append(each)
    ordered = sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0]))
    return [(_example(kind, of_kind), len(of_kind)) for kind, of_kind in ordered[:most]]


_MEMORY = "out of memory"


def _kind(reason: str) -> str:
    """The kind of a reason: the reason without its numbers."""
    return _MEMORY if " misses " in reason else re.sub(r"\b\d+\b", "N", reason)


def _example(kind: str, of_kind: Sequence[Rejected]) -> str:
    if kind != _MEMORY:
        return of_kind[0].reason
    near = min(of_kind, key=lambda each: math.inf if each.missing_gib is None else each.missing_gib)
    return f"{_MEMORY}; the nearest: {near.reason}"


# --- a sweep

SWEEP_TEXTS = frozenset({"the best configuration", "layers", "memory", "remarks"})


def sweep_rows(sweep: Sweep) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headings and the cells of each point, without columns that are empty in all rows."""
    of_best = ("layers", "s/iteration", INTERVAL, "days", sweep.cost_name, "cost/M tokens", "MFU, %", "GiB", "memory")
    names = ("sequence length", "GPUs", "batch", "the best configuration", *of_best, "remarks")
    rows = [_texts(sweep, point) for point in sweep.points]
    shown = [name for name in names if any(row.get(name) for row in rows)]
    return tuple(shown), [tuple(row.get(name, "") for name in shown) for row in rows]


def _texts(sweep: Sweep, point: SweepPoint) -> dict[str, str]:
    """The cells of a point, by heading."""
    place = {"sequence length": str(point.sequence_length), "GPUs": str(point.num_gpus)}
    remarks = {"remarks": ", ".join(sweep.remarks(point))}
    if point.best is None:
        return place | remarks
    choice = point.best.choice
    said = {"batch": str(choice.global_batch_size), "the best configuration": describe(choice)}
    of_search = dict(zip(HEADINGS, cells(point.best, 1), strict=True))
    return of_search | said | {sweep.cost_name: amount(point.cost)} | place | remarks


def sweep_table(sweep: Sweep, *, plain: bool) -> Table:
    """A table with a row for each point of a sweep. `plain`: no lines and no colours."""
    names, rows = sweep_rows(sweep)
    knees = set(map(id, sweep.knees.values()))
    styles = ["bold" if id(point) in knees else "" for point in sweep.points]
    return plain_table(names, rows, plain=plain, left=SWEEP_TEXTS, wraps=SWEEP_TEXTS, styles=styles)


_BILL = tuple(field.name for field in fields(Bill))
FIELDS = (
    "rank", "status", "gain_over_best", *CHOSEN, "transformer_impl", "attention", "sequence_parallel",
    "num_microbatches", "iteration_seconds", "sequences_per_second",
    "iteration_seconds_low", "iteration_seconds_high", "interval_runs", "interval_of", "not_validated", *_BILL, "mfu",
    "bubble", "memory_gib", "spare_gib", "verdict", "is_simulated", "reason", "notes",
)  # fmt: skip


def kept_record(each: Kept, rank: int | None, gain: float | None = None) -> dict:
    """The JSON record of a kept configuration, with times in seconds and the memory of the fullest GPU.

    Args:
        rank: 1 is the best; None: the configuration is beside the ranking.
        gain: the `Outcome.gain` of a configuration beside the ranking.
    """
    estimate, software = each.estimate, each.software
    return {
        "rank": rank,
        "status": "kept",
        "gain_over_best": gain,
        **_chosen(estimate.configuration),
        "schedule": each.choice.schedule,
        "transformer_impl": software and software.transformer_impl,
        "attention": software and software.attention,
        "sequence_parallel": estimate.configuration.sequence_parallel,
        "num_microbatches": estimate.configuration.num_microbatches,
        "iteration_seconds": estimate.seconds,
        "sequences_per_second": each.sequences_per_second,
        **_interval(each),
        **{name: getattr(each.bill, name) for name in _BILL if each.bill is not None},
        "mfu": estimate.mfu,
        "bubble": estimate.bubble,
        "memory_gib": each.memory_gib,
        "spare_gib": estimate.verdict.spare_gib,
        "verdict": estimate.verdict.word,
        "is_simulated": each.is_simulated,
        "notes": list(each.notes),
    }


def _interval(each: Kept) -> dict:
    """The fields on the interval of the time (`interval.LEVEL`) and the published runs behind it, or the reason why it
    has none."""
    if isinstance(each.accuracy, NotValidated):
        return {"not_validated": each.accuracy.reason}
    if not isinstance(each.accuracy, Interval):
        return {}
    low, high = each.accuracy.seconds(each.estimate.seconds)
    return {
        "iteration_seconds_low": low, "iteration_seconds_high": high, "interval_runs": each.accuracy.num_runs,
        "interval_of": each.accuracy.group,
    }  # fmt: skip


def records(outcome: Outcome) -> Iterator[dict]:
    """Yield the records of all choices, the best first. Kept choices have the memory of each rank of the pipeline."""
    for rank, each in outcome.rows:
        memory = [memory.total / GIB for memory in each.estimate.memory]
        yield {**kept_record(each, rank, outcome.gain(each)), "memory_gib_by_rank": memory}
    for each in outcome.rejected:
        yield {"status": "rejected", **_chosen(each.choice), "reason": each.reason}  # a null stands for any value


def write_jsonl(outcome: Outcome, path: Path) -> None:
    """Write all records, one JSON object a line. The file appears when it is complete."""
    write_whole(path, "".join(json.dumps(each) + "\n" for each in records(outcome)))


def write_csv(outcome: Outcome, path: Path) -> None:
    """Write all records as CSV with the columns `FIELDS`. The file appears when it is complete."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, extrasaction="ignore", restval="")
    writer.writeheader()
    for each in records(outcome):
        writer.writerow({**each, "notes": "; ".join(each.get("notes", ()))})
    write_whole(path, text.getvalue())


def _chosen(chosen: Choice | Configuration) -> dict:
    values = {name: getattr(chosen, name) for name in CHOSEN}
    return {name: getattr(value, "value", value) for name, value in values.items()}


def sweep_records(sweep: Sweep) -> list[dict]:
    """The flat JSON records of a sweep's points. A null value is unknown; a rejected point has a `reason`."""
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


_MOST_REASONS = 4


def expectation(each: Kept) -> tuple[str, ...]:
    """Clauses on the interval of a configuration's time, and on its days and cost; empty if neither was requested."""
    found = []
    if isinstance(each.accuracy, NotValidated):
        found.append(f"its time is not validated: {each.accuracy.reason}")
    if isinstance(each.accuracy, Interval):
        low, high = each.accuracy.seconds(each.estimate.seconds)
        found.append(
            f"with a probability of {LEVEL:.0%} it takes {low:.3g} to {high:.3g} s, judged by "
            f"{each.accuracy.num_runs} published runs ({each.accuracy.group})"
        )
    if each.bill is not None:
        found += filter(None, (_training(each, each.bill), _million(each.bill)))
    return tuple(found)


def _training(each: Kept, bill: Bill) -> str | None:
    if bill.days is None:
        return None
    days = f"all tokens take {bill.num_iterations:,} iterations, {bill.days:.3g} days"
    if isinstance(each.accuracy, Interval):
        low, high = each.accuracy.seconds(bill.days)
        days += f" ({low:.3g} to {high:.3g})"
    price = f"{bill.gpu_hours:,.0f} GPU hours"
    return f"{days}, {price}" + ("" if bill.cost is None else f", {money(bill.cost, bill.currency)}")


def _million(bill: Bill) -> str | None:
    if bill.cost_per_million_tokens is None:
        return None
    return f"a million tokens cost {money(bill.cost_per_million_tokens, bill.currency)}"


def unvalidated(kept: Sequence[Kept]) -> tuple[str, ...]:
    """A sentence on how many configurations have no interval, and why; empty if all have one."""
    reasons = Counter(each.accuracy.reason for each in kept if isinstance(each.accuracy, NotValidated))
    if not reasons:
        return ()
    parts = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common(_MOST_REASONS))
    others = reasons.total() - sum(count for _, count in reasons.most_common(_MOST_REASONS))
    rest = f", and others ({others})" if others else ""
    return (f"{reasons.total()} of {len(kept)} times are not validated: {parts}{rest}; docs/planner.md says which are",)
