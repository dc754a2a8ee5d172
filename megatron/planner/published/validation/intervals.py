"""The validation's rows as residuals, from which predictions get their intervals, and whether these hold."""

from collections import Counter
from collections.abc import Sequence
from datetime import date

from megatron.planner.intervals import LEVEL, Interval, NotValidated, Residual, Residuals, interval_of, kind_of
from megatron.planner.intervals.interval import without_run, without_source
from megatron.planner.published.validation.errors import RowError
from megatron.planner.published.validation.report import ValidationOutcome
from megatron.planner.time.calibration import Calibration

_WHOLE = "iteration"  # single stages say nothing of what an iteration adds


def residuals_of(rows: Sequence[RowError], calibration: Calibration, *, entries: str, command: str) -> Residuals:
    """Of the rows whose iteration was measured. `entries`: the name of their file. `command`: that read it."""
    return Residuals(
        calibration=calibration.name,
        constants=dict(calibration.constants),
        entries=entries,
        command=command,
        date=date.today().isoformat(),
        runs=tuple(_residual(row) for row in rows if _WHOLE in row.errors),
    )


def _residual(row: RowError) -> Residual:
    entry, estimate = row.entry, row.prediction.estimate
    kind = kind_of(
        entry.configuration, entry.model, entry.cluster, entry.software, under_pressure=estimate.under_pressure
    )
    return Residual(id=entry.id, source=entry.source, ratio=round(1 / (1 + row.errors[_WHOLE]), 5), kind=kind)


def kinds_of(runs: Sequence[Residual]) -> list[tuple[str, int, Interval | NotValidated]]:
    """Each kind in words, with how many runs are of it and the interval that it gets."""
    counted = Counter(run.kind for run in runs)
    return [(str(kind), count, interval_of(kind, runs)) for kind, count in counted.most_common()]


def interval_coverage(runs: Sequence[Residual]) -> list[ValidationOutcome]:
    """How many runs lie in the interval that the others give, and that those of other sources give."""
    outcomes = []
    for how, found in (("each run", without_run(runs)), ("each source", without_source(runs))):
        if found.num_runs:
            outcomes.append(
                ValidationOutcome(
                    test=f"intervals of {LEVEL:.0%}, {how} left out",
                    found=f"{found.num_inside} of {found.num_runs} inside ({found.share:.0%})"
                    + (f"; {found.num_without} of too few runs" if found.num_without else ""),
                    numbers={"num_runs": found.num_runs, "num_inside": found.num_inside, "share": found.share},
                )
            )
    return outcomes
