"""Every choice of a search as a flat record, and files of them: JSON lines and CSV, kept and rejected."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from megatron.documents.writing import write_whole
from megatron.planner.intervals import Interval, NotValidated
from megatron.planner.memory.memory import GIB
from megatron.planner.search.bill import Bill
from megatron.planner.search.outcome import Choice, Kept, Outcome, Rejected
from megatron.planner.search.sweep import Sweep

_BILL = tuple(field.name for field in fields(Bill))
CHOICES = tuple(field.name for field in fields(Choice))
FIELDS = (
    "rank", "status", "gain_over_best", *CHOICES, "transformer_impl", "attention", "sequence_parallel",
    "num_microbatches", "iteration_seconds", "sequences_per_second",
    "iteration_seconds_low", "iteration_seconds_high", "interval_runs", "interval_of", "not_validated", *_BILL, "mfu",
    "bubble", "memory_gib", "spare_gib", "verdict", "is_simulated", "reason", "notes",
)  # fmt: skip


def kept_record(each: Kept, rank: int | None, gain: float | None = None) -> dict:
    """`rank` 1 is the best; None: it stands beside the ranking, and `gain` is what `Outcome` says. Times in seconds,
    memory of the fullest GPU."""
    estimate, software = each.estimate, each.software
    return {
        "rank": rank,
        "status": "kept",
        "gain_over_best": gain,
        **_choice(each.choice),
        "transformer_impl": software and software.transformer_impl,
        "attention": software and software.attention,
        "context": estimate.configuration.context,
        "expert": estimate.configuration.expert,
        "single_gradient_buffer": estimate.configuration.single_gradient_buffer,
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
    """The interval of its time (`interval.LEVEL`), and which published runs it is from; or why there is none."""
    if isinstance(each.accuracy, NotValidated):
        return {"not_validated": each.accuracy.reason}
    if not isinstance(each.accuracy, Interval):
        return {}
    low, high = each.accuracy.seconds(each.estimate.seconds)
    return {
        "iteration_seconds_low": low, "iteration_seconds_high": high, "interval_runs": each.accuracy.num_runs,
        "interval_of": each.accuracy.group,
    }  # fmt: skip


def rejected_record(each: Rejected) -> dict:
    """A choice that is null stands for every value."""
    return {"status": "rejected", **_choice(each.choice), "reason": each.reason}


def records(outcome: Outcome) -> Iterator[dict]:
    """All of them, the best first; kept ones with the memory of each rank of the pipeline."""
    for rank, each in outcome.rows:
        memory = [memory.total / GIB for memory in each.estimate.memory]
        yield {**kept_record(each, rank, outcome.gain(each)), "memory_gib_by_rank": memory}
    for each in outcome.rejected:
        yield rejected_record(each)


def write_jsonl(outcome: Outcome, path: Path) -> None:
    """A JSON object a line; the file appears when it is whole."""
    write_whole(path, "".join(json.dumps(each) + "\n" for each in records(outcome)))


def write_csv(outcome: Outcome, path: Path) -> None:
    """A table with the columns `FIELDS`; the file appears when it is whole."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, extrasaction="ignore", restval="")
    writer.writeheader()
    for each in records(outcome):
        writer.writerow({**each, "notes": "; ".join(each.get("notes", ()))})
    write_whole(path, text.getvalue())


def _choice(choice: Choice) -> dict:
    values = {name: getattr(choice, name) for name in CHOICES}
    return {**values, "recompute": None if choice.recompute is None else choice.recompute.value}


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
