"""Bad programs with weights on the host are rejected, and what is judged agrees with a machine that runs them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule
from tests.draws import draws
from tests.pipeline.check.examples import broken, moved_later, swapped, with_row
from tests.pipeline.check.hosted import both_verdicts, hosted, hosted_bounds, hosted_cases
from tests.pipeline.check.mutations import (
    assert_each_is_judged,
    assert_every_mutation_is_rejected,
    assert_judged,
    assert_rejected,
)


def bounds_of(schedule: Schedule, batches: tuple[int, ...]) -> list[int] | None:
    """Of saved microbatches; where inputs wait on the host, boundaries have a bound of their own."""
    return None if schedule.residency.stash == "host" else hosted_bounds(schedule, batches)


@pytest.mark.full
@draws(60)
@given(hosted_cases(max_ranks=4, max_virtual=5))
def test_what_is_built_is_right(case: tuple[Schedule, Program]):
    """By the oracle and by the checker, for every number of batches, with the memory of the relay."""
    schedule, program = case
    bounds = hosted_bounds(schedule, program.batches)
    assert not both_verdicts(program, bounds)
    assert list(check(program, max_saved=bounds).peak_saved_microbatches) == bounds
    check_periodic(schedule.build_periodic(program.batches[0]))
    assert Program.from_csv(program.to_csv()) == program


@draws(200)
@given(st.data())
def test_a_broken_program_is_rejected(data: st.DataObject):
    """Any instruction dropped, doubled anywhere, or with another version."""
    _, program = data.draw(STASHED)
    mutant, what = data.draw(broken(program))
    assert_rejected(mutant, what)


@draws(250)
@given(st.data())
def test_a_swap_is_judged_as_the_oracle_judges_it(data: st.DataObject):
    """Two instructions exchanged: accepted are exactly the programs that run right, early and late."""
    schedule, program = data.draw(STASHED)
    mutant, what = data.draw(swapped(program))
    bounds = bounds_of(schedule, program.batches)
    assert_judged(mutant, bounds, both_verdicts(mutant, bounds), what)


STASHED = st.sampled_from(("device", "host")).flatmap(lambda stash: hosted_cases(stash=stash))
FULL = {
    "one rank, eager": hosted(1, 4, update="eager", data_parallel=True, tied_embeddings=True),
    "two ranks, deferred": hosted(2, 2, resident=1, data_parallel=True, tied_embeddings=True),
    "one rank, deferred": hosted(1, 3, tied_embeddings=True),
    "one rank, stashed": hosted(1, 4, update="eager", stash="host"),
    "two ranks, eager": hosted(2, 3, update="eager", data_parallel=True, tied_embeddings=True),
    "two ranks, stashed": hosted(2, 3, stash="host"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FULL)
def test_every_single_mutation_is_rejected(name: str):
    """Not a sample: each instruction is dropped, doubled and re-versioned; of an evaluation, too."""
    for program in (FULL[name].build((2, 1)), FULL[name].build_evaluation(2, version=3)):
        assert_every_mutation_is_rejected(program)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FULL)
def test_every_near_swap_is_judged_as_the_oracle_judges_it(name: str):
    """Not a sample either: each word is moved to each of the next four places."""
    program = FULL[name].build((2, 1))
    bounds = bounds_of(FULL[name], program.batches)
    mutants = moved_later(program, reach=4)
    assert_each_is_judged(mutants, lambda mutant: both_verdicts(mutant, bounds), max_saved=bounds)


@pytest.mark.parametrize("data_parallel", [False, True])
def test_every_place_of_the_embeddings_sum_is_judged_as_the_oracle_judges_it(data_parallel: bool):
    """On the last rank, from before its first computation to the end: too early for its gradients, too early for what
    waits behind it in the chain, right, or too late.
    """
    schedule = hosted(2, 4, tied_embeddings=True, data_parallel=data_parallel)
    program = schedule.build((2,))
    bounds, row = hosted_bounds(schedule, program.batches), list(program.rows[1])
    word = row.pop(row.index(Instruction.parse("1REDUCE_EMBED@1")))
    verdicts = []
    for position in range(len(row) + 1):
        mutant = with_row(program, 1, [*row[:position], word, *row[position:]])
        wrong = both_verdicts(mutant, bounds)
        assert_judged(mutant, bounds, wrong, str(position))
        verdicts.append(wrong)
    assert "" in verdicts and ("deadlock" in verdicts) == data_parallel
