"""Programs for the tests of the simulator, and of what is derived from its timelines."""

from dataclasses import replace

from megatron.pipeline.program.instruction import TRANSFERS, Instruction
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import FLUSH
from megatron.pipeline.schedules import Schedule

F, B = 1.0, 2.0


def build(name, num_stages, batches, **flags):
    return Schedule.preset(name, num_stages=num_stages, **flags).build(tuple(batches))


def program(*rows, batches=(1,), stages=None):
    """A program from the text of its rows."""
    parsed = tuple(tuple(map(Instruction.parse, row.split())) for row in rows)
    return Program(tuple(range(stages or len(rows))), tuple(batches), FLUSH, rows=parsed)


def without_transfers(program):
    rows = tuple(tuple(each for each in row if each.kind not in TRANSFERS) for row in program.rows)
    return replace(program, rows=rows)
