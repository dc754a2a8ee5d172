"""What a row holds at most, in any unit, at the worst timing of its moves."""

from collections.abc import Callable

from megatron.pipeline.check.memory import Held
from megatron.pipeline.program.instruction import COMPUTATIONS, MOVES, SWAPS, Instruction, Row
from megatron.pipeline.program.lane_order import MoveOrder, awaited_in_lanes


def most_held(row: Row, rank_of_stage: tuple[int, ...], change: Callable[[Instruction], tuple[float, float]]) -> float:
    """Return the most that a row may hold.

    Args:
        row: the row of a proved program.
        rank_of_stage: the rank of each stage.
        change: for a computation, what it takes from its start on and gives back at its end; for a move, what it adds
            (or, if less than 0, frees) and 0.
    """
    order, held = MoveOrder(), Held()
    lanes = awaited_in_lanes(row, rank_of_stage) if any(each.kind in SWAPS for each in row) else {}
    peak, num_moves, number_at = 0.0, 0, []
    for position, each in enumerate(row):
        complete = max((number_at[other] for other in lanes.get(position, ())), default=order.awaited(each))
        if each.kind in COMPUTATIONS:
            held.complete(complete)
            takes, gives = change(each)
            held.own += takes
            peak = max(peak, held.most)
            held.own -= gives
        elif each.kind in MOVES | SWAPS:
            held.request(change(each)[0], num_moves)
            num_moves += 1
            peak = max(peak, held.most)
        number_at.append(num_moves)
    return peak
