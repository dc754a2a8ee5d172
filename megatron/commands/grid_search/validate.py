"""Compare the planner with published results: a table of errors, beside the errors that it should not exceed.

    python tools/grid_search.py validate --entries measurements.json --feasibility facts.json

Constants that were fitted to a run do not predict that run. So to predict a run that they were fitted to, the constants
are fitted again without all runs of its degrees and microbatch size. All other runs are predicted with the constants as
they are. The error of a run is its predicted time or MFU over the published one, less 1.

--write-residuals keeps measured over predicted times, from which `estimate` and `search` take their intervals.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron.commands.grid_search import note_unread
from megatron.documents.command_line import add_flags
from megatron.documents.tables import print_table
from megatron.planner.published.entries import Entry, load_entries
from megatron.planner.published.interval import Interval, NotValidated
from megatron.planner.published.prediction import is_timed, predict
from megatron.planner.published.validation import (
    FEWEST_OTHERS,
    RowError,
    choices,
    judge_facts,
    kinds_of,
    load_facts,
    residuals_of,
    row_errors,
)
from megatron.planner.published.validation_report import interval_coverage, validate
from megatron.planner.time.calibration import DEFAULT_NAME, Calibration, load_calibration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(
        parser,
        ("--entries", str, "FILE", "measured runs", {"required": True}),
        ("--feasibility", str, "FILE", "facts about what fits"),
        ("--calibrated-on", str, "NAME", "calibration, or its file (default: %(default)s)", {"default": DEFAULT_NAME}),
        ("--rows", None, None, "also print the error of every run, and the interval of every kind of run"),
        ("--write-residuals", Path, "FILE", "measured over predicted times by run"),
        ("--json", None, None, "one JSON object"),
    )


def run(options: argparse.Namespace) -> int:
    calibration = load_calibration(options.calibrated_on)
    read = load_entries(options.entries)
    entries = [entry for entry in read if isinstance(entry, Entry)]
    note_unread(entries)
    facts = load_facts(options.feasibility) if options.feasibility else []
    rows = row_errors(entries, calibration)
    throughputs = _throughputs([entry for entry in entries if entry.chosen is not None], calibration)
    ranked = [entry for entry in entries if entry.id in throughputs]
    outcomes = validate(rows, judge_facts(facts, entries), choices(rows), ranked, lambda entry: throughputs[entry.id])
    residuals = residuals_of(rows, calibration, entries=Path(options.entries).name, command=_command(options))
    outcomes += interval_coverage(residuals.runs)
    if options.write_residuals:
        residuals.save(options.write_residuals)
        print(f"wrote {options.write_residuals}: {len(residuals.runs)} runs", file=sys.stderr)
    if options.json:
        document = {"calibration": calibration.name, "tests": [asdict(each) for each in outcomes]}
        print(json.dumps(document | {"runs": [_run(row) for row in rows]}))
        return 0
    marks = {None: "", True: "yes", False: "NO"}
    cells = [(each.test, each.bar, each.found, marks[each.reached]) for each in outcomes]
    print_table(("test", "bar", "found", "reached"), cells)
    if options.rows:
        print()
        print_table(("run", "error", "left out", "pressure"), [_cells(row) for row in rows], right=(1,))
        print()
        kinds = [_kind_cells(*each) for each in kinds_of(residuals.runs)]
        print_table(("runs", "kind", "measured/predicted, 80%", "from", "runs of"), kinds, right=(0, 3))
    print(f"\n{len(read) - len(entries)} of {len(read)} entries cannot be predicted; `estimate` says why")
    together = {entry.id for entry in entries if is_timed(entry)} & set(calibration.entries)
    alone = len(together - {row.entry.id for row in rows})
    if alone:
        print(
            f"{alone} of the runs that were fitted are not held against a prediction: that takes {FEWEST_OTHERS} others"
        )
    return 0


def _command(options: argparse.Namespace) -> str:
    """The command that writes the residuals again, without folders, which differ from machine to machine."""
    calibrated = "" if options.calibrated_on == DEFAULT_NAME else f" --calibrated-on {options.calibrated_on}"
    return f"grid_search validate --entries {Path(options.entries).name}{calibrated} --write-residuals FILE"


def _throughputs(entries: Sequence[Entry], calibration: Calibration) -> dict[str, float]:
    """Predicted sequences per second of the entries that can run, by id."""
    found = {}
    for entry in entries:
        try:
            seconds = predict(entry, calibration.fitted).estimate.seconds
        except ValueError:
            continue  # `estimate` says why
        found[entry.id] = entry.configuration.global_batch_size / seconds
    return found


def _run(row: RowError) -> dict:
    return {
        "id": row.entry.id, "errors": row.prediction.published_errors, "time_errors": row.errors,
        "left_out": row.left_out, "under_pressure": row.prediction.estimate.under_pressure,
    }  # fmt: skip


def _kind_cells(kind: str, count: int, found: Interval | NotValidated) -> tuple[str, ...]:
    if isinstance(found, NotValidated):
        return str(count), kind, "too few", "", ""
    return str(count), kind, f"{found.low:.2f} to {found.high:.2f}", str(found.num_runs), found.group


def _cells(row: RowError) -> tuple[str, ...]:
    errors = ", ".join(f"{name} {100 * error:+.1f}%" for name, error in row.prediction.published_errors.items())
    return (
        row.entry.id,
        errors,
        "yes" if row.left_out else "",
        "flagged" if row.prediction.estimate.under_pressure else "",
    )
