"""The intervals of what a calibration, or a profile, predicts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.planner.intervals.interval import LEVEL, Interval, NotValidated, interval_of
from megatron.planner.intervals.kind import Kind, kind_of
from megatron.planner.intervals.residuals import Residual, load_others, load_residuals, read_residuals
from megatron.planner.job.cluster import Cluster
from megatron.planner.job.estimate import Estimate
from megatron.planner.job.software import Software
from megatron.planner.memory.architecture import Architecture


class Intervals:
    """Tells the interval of an estimate, from these runs; without runs, for what `reason` none has one."""

    def __init__(self, runs: Sequence[Residual] = (), *, reason: str = "") -> None:
        self._runs, self._reason = runs, reason
        self._known: dict[Kind, Interval | NotValidated] = {}

    @classmethod
    def of_calibration(
        cls, name: str, constants: Mapping[str, float], residuals: str | Path | None = None
    ) -> "Intervals":
        """For what these constants predict. `residuals`: their file; None: those that come along, if there are any.

        Raises ValueError where the file is none, or is of other constants.
        """
        known = load_residuals(name) if residuals is None else read_residuals(residuals)
        if known is not None and known.constants == constants:
            others = load_others(name) if residuals is None else ()
            return cls([*known.runs, *(run for each in others if each.constants == constants for run in each.runs)])
        if residuals is not None:
            raise ValueError(
                f"{residuals} was written with other constants than those of {name}; write it again with validate "
                f"--calibrated-on {name} --write-residuals"
            )
        return cls(reason=f"the constants of {name} were not held against published runs")

    @classmethod
    def of_profile(cls) -> "Intervals":
        """For what a machine's own profile predicts."""
        return cls(
            reason="no published run has a profile (docs/profiling.md says how near this project's own runs came)"
        )

    def of(
        self, estimate: Estimate, model: Architecture, cluster: Cluster, software: Software
    ) -> Interval | NotValidated:
        """The interval of an estimate of this model."""
        if self._reason:
            return NotValidated(self._reason)
        pressed = estimate.under_pressure
        kind = kind_of(estimate.configuration, model, cluster, software, under_pressure=pressed)
        if kind not in self._known:
            self._known[kind] = interval_of(kind, self._runs)
        return self._known[kind]


def interval_record(accuracy: Interval | NotValidated, seconds: float) -> dict:
    """For programs: the interval of a predicted time, and what it is from; or why there is none."""
    if isinstance(accuracy, NotValidated):
        return {"interval": None, "not_validated": accuracy.reason}
    low, high = accuracy.seconds(seconds)
    found = {
        "level": LEVEL, "low_seconds": low, "high_seconds": high, "num_runs": accuracy.num_runs,
        "runs": accuracy.group,
    }  # fmt: skip
    return {"interval": found, "not_validated": None}


def interval_text(accuracy: Interval | NotValidated, seconds: float) -> str:
    """For a cell of a table: "39.9-48.9", or that it is not validated."""
    if isinstance(accuracy, NotValidated):
        return "not validated"
    low, high = accuracy.seconds(seconds)
    return f"{_number(low)}-{_number(high)}"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
