"""Proof: the program runs to its end, even where a send completes only once its receive is posted.

The proof is the execution that finds the graph of who waits for whom (`megatron.pipeline.graph`). Whether an
instruction can run is monotone in what has been posted, every order of execution ends in the same state, and one
execution stands for all. Where it ends before the rows, the ranks that are left wait for one another, and the error
names the circle.
"""

from megatron.pipeline.check.compact import CompactProgram
from megatron.pipeline.graph.deadlock import explain_deadlock
from megatron.pipeline.graph.row_graph import RowExecution, graph_of


def prove_progress(compact: CompactProgram) -> None:
    """Execute the program; prove that every rank reaches the end of its row.

    Args:
        compact: a program whose computations, transfers and updates are proved.

    Raises:
        ProgramError: naming who waits for whom.
    """
    graph_of(
        compact.program,
        refusal=lambda execution: compact.error(*explain_deadlock(execution)),
        moves=compact.awaited_moves,
    )


def run(execution: RowExecution, compact: CompactProgram, ends: list[int]) -> None:
    """Execute each row up to position `ends[rank]`, so that no rank goes beyond before all have come there.

    Raises:
        ProgramError: a rank cannot come there.
    """
    if execution.reach(ends) != ends:
        raise compact.error(*explain_deadlock(execution))
