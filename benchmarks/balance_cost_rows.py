"""What `balance_cost.py` makes of its measurements: rows with the simulator's prediction, and tables of them.

A row is plain data, one line of a table and one object of the JSON file. Times are in seconds; `measured` and
`reference` (`flush` in the same pair) have one entry a turn.
"""

import statistics
from unittest.mock import patch

from balance_cost_ranks import WITHOUT, BalanceContender, BalanceJob
from emulated_rows import COMMON

from benchmarks.common.tables import Row, show_table, spread
from megatron.pipeline.simulate import Costs, simulate


def predicted_seconds(job: BalanceJob, contender: BalanceContender, num_microbatches: int) -> float:
    """Seconds of a batch by the simulator."""
    program = contender.schedule(job.num_stages).build((num_microbatches,))
    costs = Costs(forward=job.forward, backward=job.backward, evict=job.transfer)
    with patch("megatron.pipeline.program.move_order.MoveOrder", contender.moves):
        return simulate(program, costs).makespan


def predicted_rows(scope: str, job: BalanceJob) -> list[Row]:
    rows = []
    for m, contenders in job.entries.items():
        seconds = {each.name: predicted_seconds(job, each, m) for each in contenders}
        rows += [
            {
                "scope": scope,
                "stages": job.num_stages,
                "microbatches": m,
                "contender": each.name,
                "transfer_over_forward": job.transfer / job.forward,
                "predicted": seconds[each.name],
                "predicted_added": seconds[each.name] / seconds[WITHOUT.name] - 1,
            }
            for each in contenders
        ]
    return rows


def rows_of(predicted: list[Row], result: dict) -> list[Row]:
    """The predictions with what was measured beside each."""
    turns = {(each["num_microbatches"], each["contender"]): each for each in result["turns"]}
    rows = []
    for row in predicted:
        found = turns.get((row["microbatches"], row["contender"]))
        if found is None:
            continue
        reference = turns[row["microbatches"], WITHOUT.name]["seconds"]
        added = [own / other - 1 for own, other in zip(found["seconds"], reference, strict=False)]
        measured = {
            "measured": found["seconds"],
            "reference": reference[: len(added)],
            "added": added,
            "apart": statistics.median(added) - row["predicted_added"],
            "busy": statistics.median(found["busy"]),
            "saved": found["saved_peak"],
            "executed_is_program": found["executed_is_program"],
        }
        rows.append(row | measured)
    return rows


def is_reference(row: Row) -> bool:
    return row["contender"] == WITHOUT.name


PREDICTED = {
    "scope": lambda row: row["scope"],
    "transfer/f": lambda row: f"{row['transfer_over_forward']:.2f}",
    "p": COMMON["p"],
    "m": COMMON["m"],
    "": lambda row: row["contender"],
    "predicted ms": lambda row: f"{1e3 * row['predicted']:.0f}",
    "predicted %": lambda row: "" if is_reference(row) else f"{100 * row['predicted_added']:.2f}",
}
COLUMNS = PREDICTED | {
    "ms a batch": lambda row: spread([1e3 * seconds for seconds in row["measured"]], 0),
    "added %": lambda row: "" if is_reference(row) else spread([100 * each for each in row["added"]], 2),
    "points apart": lambda row: "" if is_reference(row) else f"{100 * row['apart']:.2f}",
    "busy %": lambda row: f"{100 * row['busy']:.0f}",
    "saved microbatches": lambda row: " ".join(map(str, row["saved"])),
}


def show_predicted(rows: list[Row]) -> None:
    show_table("predicted by the simulator", PREDICTED, rows, left=("", "scope"))


def show(rows: list[Row]) -> None:
    show_table("what moving saved activations adds to flush", COLUMNS, rows, left=("", "scope"))
