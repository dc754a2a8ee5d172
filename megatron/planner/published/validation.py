"""Compares the planner with published results: the error of each run, choices in tables, facts about memory, intervals.

A run is predicted by constants that were not fitted to it. If the calibration was fitted to it, the constants are
fitted again to the other runs, without runs of the same degrees and microbatch, which are too similar.

Facts about memory say which configurations of a model ran, and which did not:

    {"model": "96B", "t": 1, "p": 16, "d": 2, "micro_batch": 1, "recompute": "layer", "bpipe": false, "fits": true,
     "strength": "stated"}

`strength`: stated, or implied by what the authors did not list. The model's shape, batch, GPU and software are those of
the first entry, if possible a measured one, whose model has this name.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from megatron.documents.faults import Boolean, place, sentence
from megatron.documents.files import read_document
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.estimate import Verdict
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.planner import Planner
from megatron.planner.published.entries import Entry
from megatron.planner.published.entry_parts import Count
from megatron.planner.published.interval import Interval, NotValidated, interval_of
from megatron.planner.published.prediction import Prediction, fit_questions, questions
from megatron.planner.published.residuals import Residual, Residuals, kind_of
from megatron.planner.time.calibration import Calibration

FEWEST_OTHERS = 8
"""The fewest other runs to fit to: twice the constants. With fewer, a fit matches its runs and predicts no others."""
TOP = 3
_FEWEST_OF_TABLE = 3


@dataclass(frozen=True, kw_only=True)
class RowError:
    """The error of a run. `left_out`: the constants were fitted again without the run; else it was never fitted to."""

    prediction: Prediction
    left_out: bool

    @property
    def entry(self) -> Entry:
        return self.prediction.entry

    @property
    def errors(self) -> dict[str, float]:
        """Predicted over measured time, less 1."""
        return self.prediction.errors

    @property
    def worst(self) -> float:
        """The largest of the errors, with its sign."""
        return max(self.errors.values(), key=abs)


def row_errors(entries: Sequence[Entry], calibration: Calibration) -> list[RowError]:
    """The errors of all entries whose time was measured and whose configuration can run. A fitted run is left out if
    too few others remain to fit to. Raises ValueError if two entries have the same id."""
    asked = questions(entries)
    fitted = {name: asked[name] for name in calibration.entries if name in asked}
    rows = []
    for name, question in asked.items():
        constants = calibration.fitted
        if name in fitted:  # the refit begins at the common start, so that nothing of this run is in the constants
            others = {key: each for key, each in fitted.items() if _shape(each.entry) != _shape(question.entry)}
            if len(others) < FEWEST_OTHERS:
                continue
            constants = fit_questions(others).constants
        rows.append(RowError(prediction=question.predict(constants), left_out=name in fitted))
    return rows


def _shape(entry: Entry) -> tuple:
    each = entry.configuration
    return entry.model, each.degrees, each.virtual, each.micro_batch_size


@dataclass(frozen=True, kw_only=True)
class TableChoice:
    """The choice in one table: a model on a number of GPUs, with one batch size.

    Attributes:
        title: source, model and GPUs.
        chosen, best: ids of the run that is predicted to be fastest, and of the one that was.
        regret: measured time of the chosen run over that of the best, less 1.
        regret_of_top: the same for the fastest of the first `TOP`, which a user would try.
    """

    title: str
    source: str
    num_runs: int
    chosen: str
    best: str
    regret: float
    regret_of_top: float


def choices(rows: Sequence[RowError]) -> list[TableChoice]:
    """The choice in each table of at least three runs. Only runs whose whole iteration was measured count."""
    tables: dict[tuple, list[RowError]] = {}
    for row in rows:
        if row.entry.seconds is not None:
            tables.setdefault(_table(row.entry), []).append(row)
    return [_choice(table) for table in tables.values() if len(table) >= _FEWEST_OF_TABLE]


def _choice(table: Sequence[RowError]) -> TableChoice:
    predicted = sorted(table, key=lambda row: row.prediction.estimate.seconds)
    best = min(table, key=lambda row: row.entry.seconds).entry
    top = min(row.entry.seconds for row in predicted[:TOP])
    name = best.model_name or f"{best.model.num_layers} layers of {best.model.hidden_size}"
    return TableChoice(
        title=f"{best.source}: {name} on {best.configuration.num_gpus} GPUs",
        source=best.source,
        num_runs=len(table),
        chosen=predicted[0].entry.id,
        best=best.id,
        regret=predicted[0].entry.seconds / best.seconds - 1,
        regret_of_top=top / best.seconds - 1,
    )


def _table(entry: Entry) -> tuple:
    each, shape = entry.configuration, entry.model
    size = (shape.num_layers, shape.hidden_size, shape.sequence_length)
    return entry.source, size, each.num_gpus, each.global_batch_size, entry.cluster.gpu


class Fact(BaseModel):
    """Whether a configuration ran; see the module."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    t: Count
    p: Count
    d: Count
    micro_batch: Count
    recompute: RecomputeScope
    bpipe: Boolean = False
    fits: Boolean
    strength: str = "stated"

    def __str__(self) -> str:
        schedule = ", bpipe" if self.bpipe else ""
        return (
            f"{self.model} t={self.t} p={self.p} d={self.d} microbatch {self.micro_batch}, recompute "
            f"{self.recompute.value}{schedule}"
        )


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A fact and what the memory model says about it."""

    fact: Fact
    verdict: Verdict

    @property
    def is_right(self) -> bool:
        return self.verdict.fits == self.fact.fits


def load_facts(path: str | Path) -> list[Fact]:
    """The facts of a file. Raises ValueError naming the file and the fault."""
    try:
        return TypeAdapter(list[Fact]).validate_python(read_document(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = f"fact {place(*first['loc'])}" if first["loc"] else "the file"
        raise ValueError(f"{path}: {sentence(first, Fact.model_fields, where=where)}") from error


def judge_facts(facts: Sequence[Fact], entries: Sequence[Entry]) -> list[Judged]:
    """Judge facts by the memory model. Raises ValueError for a model without an entry, or a wrong configuration."""
    planners: dict[str, tuple[Planner, int]] = {}
    judged = []
    for fact in facts:
        if fact.model not in planners:
            planners[fact.model] = _planner(fact.model, entries)
        planner, batch = planners[fact.model]
        try:
            configuration = _configuration(fact, batch)
            memory = planner.memory(configuration)
        except ValueError as error:
            raise ValueError(f"fact {fact}: {error}") from error
        judged.append(Judged(fact=fact, verdict=planner.judge(configuration, memory)))
    return judged


def _configuration(fact: Fact, batch: int) -> Configuration:
    return Configuration(
        tensor=fact.t, pipeline=fact.p, data=fact.d, micro_batch_size=fact.micro_batch, global_batch_size=batch,
        recompute=fact.recompute, schedule="bpipe" if fact.bpipe else "flush", sequence_parallel=fact.t > 1,
        distributed_optimizer=True,
    )  # fmt: skip


def _planner(name: str, entries: Sequence[Entry]) -> tuple[Planner, int]:
    known = [entry for entry in entries if name in entry.model_name.split()]
    if not known:
        raise ValueError(f"no entry has a model called {name}; give entries that name its shape")
    entry = next((each for each in known if each.seconds is not None), known[0])  # measured entries give the batch
    planner = Planner(entry.model, entry.cluster, software=entry.software)
    return planner, entry.configuration.global_batch_size


def residuals_of(rows: Sequence[RowError], calibration: Calibration, *, entries: str, command: str) -> Residuals:
    """The residuals of the rows whose iteration was measured. `entries`: the name of their file. `command`: the command
    that read it."""
    return Residuals(
        calibration=calibration.name,
        constants=dict(calibration.constants),
        entries=entries,
        command=command,
        date=date.today().isoformat(),
        runs=tuple(_residual(row) for row in rows if "iteration" in row.errors),
    )


def _residual(row: RowError) -> Residual:
    entry, estimate = row.entry, row.prediction.estimate
    kind = kind_of(
        entry.configuration, entry.model, entry.cluster, entry.software, under_pressure=estimate.under_pressure
    )
    return Residual(id=entry.id, source=entry.source, ratio=round(1 / (1 + row.errors["iteration"]), 5), kind=kind)


def kinds_of(runs: Sequence[Residual]) -> list[tuple[str, int, Interval | NotValidated]]:
    """Each kind in words, with the number of its runs and its interval."""
    counted = Counter(run.kind for run in runs)
    return [(str(kind), count, interval_of(kind, runs)) for kind, count in counted.most_common()]
