"""What a search would have chosen among the configurations of a table, and what that would have cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.planner.published.entries import Entry
from megatron.planner.published.validation.errors import RowError

_FEWEST = 3
TOP = 3


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
    """The choice in every table of three runs and more. Runs count that were measured as whole iterations."""
    tables: dict[tuple, list[RowError]] = {}
    for row in rows:
        if row.entry.seconds is not None:
            tables.setdefault(_table(row.entry), []).append(row)
    return [_choice(table) for table in tables.values() if len(table) >= _FEWEST]


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
