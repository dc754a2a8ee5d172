"""Programs with one instruction changed, and what their rejection has to say."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from megatron.pipeline.check import ProgramError, check
from megatron.pipeline.program.instruction import RECEIVES, SENDS, Instruction, Kind, Row
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


def assert_each_is_judged(
    mutants: Iterable[tuple[Program, str]], wrong_with: Callable[[Program], str], **bounds: Sequence[int] | None
) -> None:
    """Accepted are exactly those against which `wrong_with` says nothing, and there are both."""
    verdicts = set()
    for mutant, what in mutants:
        wrong, reason = wrong_with(mutant), ""
        try:
            check(mutant, **bounds)
        except ProgramError as error:
            reason = str(error)
        assert bool(wrong) == bool(reason), f"{what}: {wrong or reason}"
        verdicts.add(not wrong)
    assert verdicts == {True, False}


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


def with_other_members(program: Program) -> Iterator[tuple[Program, str]]:
    """As many of everything, of other microbatches: in each batch two that are exchanged in the forwards of one stage,
    in all that follows there, or everywhere.
    """
    for batch in range(program.first_batch, program.first_batch + len(program.batches)):
        for pair in combinations(program.microbatches_of(batch), 2):
            what = f"{pair[0]} and {pair[1]} exchanged"
            yield program.with_rows(tuple(tuple(_exchanged(each, *pair) for each in row) for row in program.rows)), what
            for stage, rank in enumerate(program.rank_of_stage):
                for is_forward in (True, False):
                    row = tuple(
                        _exchanged(each, *pair)
                        if each.stage == stage
                        and each.kind.is_computation
                        and (each.kind is Kind.FORWARD) == is_forward
                        else each
                        for each in program.rows[rank]
                    )
                    changed = with_row(program, rank, _in_the_order_of_channels(row))
                    yield changed, f"{what} in the {'forwards' if is_forward else 'backwards'} of stage {stage}"


def in_halves(program: Program) -> Program:
    """Each B as an I, and a W right behind it."""
    parts = {Kind.BACKWARD: (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)}
    return program.with_rows(
        tuple(
            tuple(replace(each, kind=kind) for each in row for kind in parts.get(each.kind, (each.kind,)))
            for row in program.rows
        )
    )


def _exchanged(each: Instruction, one: int, other: int) -> Instruction:
    return replace(each, microbatch={one: other, other: one}.get(each.microbatch, each.microbatch))


def _in_the_order_of_channels(row: Row) -> list[Instruction]:
    """The row with all receives first, and each send as soon as may be, in the order that its channel has had."""
    channels: dict[tuple, list[Instruction]] = {}
    for each in row:
        if each.kind in SENDS:
            channels.setdefault((each.kind, each.stage, each.peer), []).append(each)
    result, made = [each for each in row if each.kind in RECEIVES], set()
    for each in row:
        if each.kind in SENDS | RECEIVES:
            continue
        result.append(each)
        made.add((each.kind.row.makes, each.stage, each.microbatch))
        for sends in channels.values():
            while sends and (sends[0].kind.row.sends, sends[0].stage, sends[0].microbatch) in made:
                result.append(sends.pop(0))
    return result


def assert_placed(error: ProgramError, program: Program, what: str) -> None:
    """The error names a rank, a position in its row and the instruction there, and draws an arrow."""
    assert 0 <= error.rank < len(program.rows), what
    row = program.rows[error.rank]
    assert 0 <= error.position <= len(row), what
    assert error.instruction == (row[error.position] if error.position < len(row) else None), what
    assert f"rank {error.rank}, position {error.position}" in str(error), what
    assert str(error).rstrip().endswith("^"), what
