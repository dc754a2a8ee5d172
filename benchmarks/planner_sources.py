"""The planner's errors on published runs, source by source, with constants that were fitted without the source.

    python benchmarks/planner_sources.py benchmarks/published/*.json measurements.json

A source is a paper, or the table of one software. The calibration's runs of the source are left out, the constants are
fitted again to the others, and the source's runs are predicted. The output has, by source,

    errors      of whole iterations (predicted over measured time, less 1), and of forwards and backwards of stages
    regret      the least measured time among the planner's first three choices over the least of all, less 1: in each
                table of a source with at least four runs, and over a whole source by GPU seconds for an operation
    intervals   of 80%: the number of the source's runs in the interval from the other sources, and the interval's width
    memory      the error of the most memory, for runs that reported it

and with --rows each run.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.common.results import parser_of
from megatron.planner.published.entries import Entry, load_entries
from megatron.planner.published.interval import Interval, interval_of
from megatron.planner.published.prediction import fit_questions, questions
from megatron.planner.published.residuals import Residual, source_of
from megatron.planner.published.validation import RowError, choices, residuals_of
from megatron.planner.time.calibration import DEFAULT_NAME, load_calibration

FEWEST = 4
"""The least number of configurations among which a choice is judged."""


def predicted(entries: Sequence[Entry], calibration) -> list[RowError]:
    """Predict each run with constants that were fitted without the run's source."""
    asked = questions(entries)
    fitted = {name: asked[name] for name in calibration.entries if name in asked}
    constants, rows = {}, []
    for question in asked.values():
        source = source_of(question.entry.source)
        if source not in constants:
            others = {name: each for name, each in fitted.items() if source_of(each.entry.source) != source}
            is_fitted = len(others) < len(fitted)
            constants[source] = (
                (fit_questions(others).constants if others else None) if is_fitted else calibration.fitted
            )
        if constants[source] is not None:
            left_out = question.entry.id in fitted
            rows.append(RowError(prediction=question.predict(constants[source]), left_out=left_out))
    return rows


def _by_source(rows: Sequence[RowError]) -> dict[str, list[RowError]]:
    found = defaultdict(list)
    for row in rows:
        found[source_of(row.entry.source)].append(row)
    return found


def error_table(rows: Sequence[RowError], titles: dict[str, Sequence[RowError]]) -> Table:
    table = Table("source", "runs", "mean", "median", "signed median", "largest", box=None)
    for title, group in (*_by_source(rows).items(), *titles.items()):
        for part in ("iteration", "forward", "backward"):
            errors = [row.errors[part] for row in group if part in row.errors]
            if errors:
                name = title if part == "iteration" else f"{title}: {part}s of stages"
                sizes = list(map(abs, errors))
                table.add_row(name, str(len(errors)), *(f"{100 * each:.1f}%" for each in (
                    mean(sizes), median(sizes), median(errors), max(errors, key=abs))))  # fmt: skip
    return table


def regret_table(rows: Sequence[RowError]) -> Table:
    table = Table("choice", "runs", "regret", "of the first three", box=None)
    for each in choices(rows):
        if each.num_runs >= FEWEST:
            table.add_row(
                each.title, str(each.num_runs), f"{100 * each.regret:.1f}%", f"{100 * each.regret_of_top:.1f}%"
            )
    for source, group in _by_source(rows).items():
        whole = [(_cost(row, row.prediction.estimate.seconds), _cost(row, row.entry.seconds))
                 for row in group if row.entry.seconds is not None]  # fmt: skip
        if len(whole) >= FEWEST:
            best, ranked = min(cost for _, cost in whole), [cost for _, cost in sorted(whole)]
            first, top = ranked[0] / best - 1, min(ranked[:3]) / best - 1
            table.add_row(
                f"{source}, by time for an operation", str(len(whole)), f"{100 * first:.1f}%", f"{100 * top:.1f}%"
            )
    return table


def _cost(row: RowError, seconds: float) -> float:
    """The GPU seconds for one operation of the model."""
    each = row.entry
    operations = each.model.operations(each.configuration.global_batch_size)
    return seconds * each.configuration.num_gpus / operations


def interval_table(runs: Sequence[Residual]) -> tuple[Table, list[float]]:
    """The table of coverage by source, and the widths (high over low, less 1) of the intervals from all runs."""
    table = Table("source left out", "inside", "of", "no interval", box=None)
    counted = defaultdict(lambda: [0, 0, 0])
    for run in runs:
        source = source_of(run.source)
        found = interval_of(run.kind, [other for other in runs if source_of(other.source) != source])
        for name in (source, "all"):
            inside, of, none = counted[name]
            held = isinstance(found, Interval)
            counted[name] = [inside + (held and found.low <= run.ratio <= found.high), of + held, none + (not held)]
    for name in sorted(counted, key=lambda each: each == "all"):
        table.add_row(name, *map(str, counted[name]))
    known = [interval_of(run.kind, runs) for run in runs]
    return table, [each.high / each.low - 1 for each in known if isinstance(each, Interval)]


def memory_table(rows: Sequence[RowError]) -> Table:
    table = Table("most memory of a GPU", "runs", "mean", "signed median", "largest", box=None)
    for source, group in _by_source(rows).items():
        errors = [row.prediction.peak_error for row in group if row.prediction.peak_error is not None]
        if errors:
            cells = mean(map(abs, errors)), median(errors), max(errors, key=abs)
            table.add_row(source, str(len(errors)), *(f"{100 * each:.1f}%" for each in cells))
    return table


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("entries", nargs="+", type=Path, help="measured runs")
    parser.add_argument("--calibrated-on", default=DEFAULT_NAME, metavar="NAME", help="calibration, or its file")
    parser.add_argument("--rows", action="store_true", help="also print each run")
    options = parser.parse_args()
    calibration = load_calibration(options.calibrated_on)
    files = {file: [each for each in load_entries(file) if isinstance(each, Entry)] for file in options.entries}
    rows = predicted([entry for entries in files.values() for entry in entries], calibration)
    console = Console(width=160)
    if options.rows:
        for row in rows:
            console.print(row.entry.id, {name: f"{100 * each:+.1f}%" for name, each in row.errors.items()})
    titles = {
        file.name: [row for row in rows if any(row.entry is each for each in entries)]
        for file, entries in files.items()
    }
    console.print(error_table(rows, titles), "", regret_table(rows), "")
    residuals = residuals_of(rows, calibration, entries="", command="").runs
    table, widths = interval_table(residuals)
    console.print(
        table, "", f"width of intervals (high over low, less 1): median {median(widths):.4f} of {len(widths)}", ""
    )
    console.print(memory_table(rows))


if __name__ == "__main__":
    main()
