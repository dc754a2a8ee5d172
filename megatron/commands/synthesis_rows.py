"""The names and values that `tools/schedule.py synthesize` prints of an answer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.documents.tables import ranges_of

if TYPE_CHECKING:
    from megatron.pipeline.synthesis import Problem, Steady, Synthesis


def rows_of(best: "Synthesis") -> list[tuple[str, str]]:
    """Return the names and values to print about a program whose batches drain."""
    from megatron.pipeline.synthesis.search import bubble

    problem = best.problem
    least = bubble(problem, best.bound)
    return [
        ("time of a batch", f"{best.seconds:g}"),
        ("bubble", f"{best.bubble:.2%}"),
        ("lower bound", f"{best.bound:g} (a bubble of {least:.2%}), from {best.bound_from}"),
        ("above the bound", above(best.seconds, best.bound)),
        *_placed(problem),
        ("ranks hold", ", ".join(f"{each:g}" for each in best.held)),
        *_moves(best),
        ("begun with", best.begun_with),
        ("best registered order", order_of(best, "none keeps the limits")),
        ("rounds", " + ".join(map(str, best.rounds))),
    ]


def steady_rows(best: "Steady") -> list[tuple[str, str]]:
    """Return the names and values to print about a program for 2bw."""
    named = ", ".join(f"{name}: {held:g}" for name, held in best.named.items())
    return [
        ("time of a batch", f"{best.seconds:g}"),
        ("lower bound", f"{best.bound:g}, from {best.bound_from}"),
        ("above the bound", above(best.seconds, best.bound)),
        *_placed(best.problem),
        ("ranks hold", ", ".join(f"{each:g}" for each in best.held)),
        ("least at this period", ", ".join(f"{each:g}" for each in best.least_held)),
        ("registered orders hold", named or "none has the placement"),
        ("rounds", " + ".join(map(str, best.rounds))),
    ]


def _placed(problem: "Problem") -> list[tuple[str, str]]:
    return [("placement", " ".join(map(str, problem.rank_of_stage))), ("recomputed stages", _recomputes(problem))]


def _recomputes(problem: "Problem") -> str:
    """The stages with recomputes, with the number of recomputed microbatches unless all are recomputed."""
    m = problem.num_microbatches
    parts = (f"{each}" + f" ({number} of {m})" * (number < m) for each, number in problem.num_recomputed.items())
    return " ".join(parts) or "none"


def _moves(best: "Synthesis") -> list[tuple[str, str]]:
    """The microbatches that move, by stage."""
    if not best.ways:
        return []
    where = "moves" if best.way is None else {"host": "to the host", "pair": "to the pair rank"}[best.way.name]
    moved = (f"stage {stage}: {ranges_of(each)}" for stage, each in best.moved.items())
    return [(where, "; ".join(moved) or "none is faster")]


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Print names and values below each other."""
    width = max(len(name) for name, _ in rows)
    print(*(f"{name:{width}}  {value}" for name, value in rows), sep="\n")


def order_of(best: "Synthesis", otherwise: str) -> str:
    return otherwise if best.named is None else f"{best.named[0]}: {best.named[1]:g}"


def above(seconds: float, bound: float) -> str:
    return f"{max(0.0, seconds / bound - 1):.2%}"  # sums of the same times in another order differ in their last bits
