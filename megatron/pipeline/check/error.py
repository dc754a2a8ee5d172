"""How a program that is wrong is shown to the person who wrote it.

A reason alone does not help someone who looks at ten thousand instructions. So an error names the rank, the position in
its row and the instruction, and draws that neighbourhood of the row with an arrow:

    rank 1, position 9, 1B1@0: the gradient of its output has not been received: no 1RECV_B1 stands before it
    rank 1: ... 1SEND_F3  1B0@0  1SEND_B0  1F4@0  1B1@0  1SEND_B1  1RECV_F5  1F5@0 ...
                                                  ^^^^^
"""

from collections.abc import Sequence

from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.program.program import Program

_AROUND = 4  # instructions drawn on each side


class ProgramError(ValueError):
    """A program breaks one of the claims that `check` proves.

    Attributes:
        rank: pipeline rank whose row is at fault.
        position: index of the instruction in that row; the row's length where something is missing at its end.
        instruction: the instruction there, None at the end of the row.
        reason: what is wrong, in one sentence.
    """

    def __init__(self, rank: int, position: int, instruction: Instruction | None, reason: str, rendering: str) -> None:
        where = "end of the row" if instruction is None else str(instruction)
        super().__init__(f"rank {rank}, position {position}, {where}: {reason}\n{rendering}")
        self.rank = rank
        self.position = position
        self.instruction = instruction
        self.reason = reason


def error_at(program: Program, rank: int, position: int, reason: str) -> ProgramError:
    """The error for the instruction at `position` of row `rank`; past the end something is missing there."""
    row = program.rows[rank]
    instruction = row[position] if position < len(row) else None
    return ProgramError(rank, position, instruction, reason, render(row, position, rank=rank))


def render(row: Sequence[Instruction], position: int, *, rank: int) -> str:
    """Draw the neighbourhood of `position` in a row, with an arrow under it."""
    first, last = max(0, position - _AROUND), min(len(row), position + _AROUND + 1)
    head = f"rank {rank}: " + ("... " if first else "")
    words = [str(instruction) for instruction in row[first:last]]
    if position >= len(row):
        words.append("(end)")
    marked = min(position - first, len(words) - 1)
    indent = len(head) + sum(len(word) + 2 for word in words[:marked])
    tail = " ..." if last < len(row) else ""
    return f"{head}{'  '.join(words)}{tail}\n{' ' * indent}{'^' * len(words[marked])}"
