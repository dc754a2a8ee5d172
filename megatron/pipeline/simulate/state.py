"""What the parts of a simulation share: the program, the times that are known, and the ranks that can go on."""

from megatron.pipeline.program.program import Program

UNKNOWN = -1.0  # a time that is not known yet; times are never negative


class SimulationError(ValueError):
    """A program cannot be executed to its end."""


class SimulationState:
    """The state of one simulation.

    Attributes:
        program, rows: what is executed.
        starts, ends: by rank and position, `UNKNOWN` until they are known.
        runnable: ranks to be looked at again.
    """

    __slots__ = ("ends", "program", "rows", "runnable", "starts")

    def __init__(self, program: Program) -> None:
        self.program, self.rows = program, program.rows
        self.starts = [[UNKNOWN] * len(row) for row in program.rows]
        self.ends = [[UNKNOWN] * len(row) for row in program.rows]
        self.runnable = list(range(len(program.rows) - 1, -1, -1))

    def error(self, rank: int, position: int, reason: str) -> SimulationError:
        return SimulationError(f"rank {rank}, position {position}, {self.rows[rank][position]}: {reason}")
