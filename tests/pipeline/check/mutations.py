"""Programs with one instruction changed, and what their rejection has to say."""

import pytest

from megatron.pipeline.check import ProgramError, check
from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.program.program import Program
from tests.pipeline.check.examples import with_row


def assert_every_mutation_is_rejected(program: Program) -> None:
    """Each of its instructions is dropped, doubled and re-versioned in turn."""
    for rank, row in enumerate(program.rows):
        for position, instruction in enumerate(row):
            for changed in replacements(instruction):
                mutant = with_row(program, rank, [*row[:position], *changed, *row[position + 1 :]])
                assert_rejected(mutant, f"{instruction} -> {changed}")


def assert_judged(program: Program, bounds: list[int], wrong: str, what: str) -> None:
    """It is rejected where the oracle says that something is wrong, and accepted where it says nothing."""
    if wrong:
        assert_rejected(program, f"{what}: {wrong}", bounds)
    else:
        check(program, max_saved=bounds)


def assert_rejected(program: Program, what: str, bounds: list[int] | None = None) -> None:
    with pytest.raises(ProgramError) as caught:
        check(program, max_saved=bounds)
    assert_placed(caught.value, program, what)


def replacements(instruction: Instruction) -> list[list[Instruction]]:
    """What a single mutation puts in the place of an instruction."""
    changed = [[], [instruction, instruction]]
    if instruction.version is not None:
        versions = [version for version in (instruction.version - 1, instruction.version + 1) if version >= 0]
        changed += [
            [Instruction(instruction.kind, instruction.stage, instruction.microbatch, version)] for version in versions
        ]
    return changed


def accepts(program: Program, bounds: list[int]) -> bool:
    try:
        check(program, max_saved=bounds)
    except ProgramError:
        return False
    return True


def assert_placed(error: ProgramError, program: Program, what: str) -> None:
    """The error names a rank, a position in its row and the instruction there, and draws an arrow."""
    assert 0 <= error.rank < len(program.rows), what
    row = program.rows[error.rank]
    assert 0 <= error.position <= len(row), what
    assert error.instruction == (row[error.position] if error.position < len(row) else None), what
    assert f"rank {error.rank}, position {error.position}" in str(error), what
    assert str(error).rstrip().endswith("^"), what
