"""Programs whose stages are copies: accepted are those that compute what one process computes, and no others."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import ProgramError, check
from megatron.pipeline.program.copies import Copy
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules.completion import completed
from tests.draws import draws
from tests.pipeline.check.copied import (
    bare_programs,
    bounds_of,
    changed,
    given_away,
    others_of,
    programs,
    sent_elsewhere,
    taken_over,
)
from tests.pipeline.check.examples import broken, moved_later
from tests.pipeline.check.mutations import (
    assert_each_is_judged,
    assert_every_mutation_is_rejected,
    assert_judged,
    assert_rejected,
)
from tests.pipeline.check.oracle import verdict


@pytest.mark.full
@draws(200)
@given(programs())
def test_every_order_computes_what_one_process_computes(program: Program):
    """Whoever takes what: the rows are accepted, with the peaks counted along them, and the oracle has the weights."""
    bounds = bounds_of(program)
    assert verdict(program, bounds) == ""
    assert list(check(program, max_saved=bounds).peak_saved_microbatches) == bounds


@pytest.mark.full
@draws(200)
@given(st.data())
def test_a_broken_program_is_rejected(data: st.DataObject):
    """Dropping, doubling or re-versioning any instruction is found, and placed."""
    program = data.draw(programs(most_batches=2))
    mutant, what = data.draw(broken(program))
    assert verdict(mutant, bounds_of(program))
    assert_rejected(mutant, what)


@draws(400)
@given(st.data())
def test_a_change_is_judged_as_the_oracle_judges_it(data: st.DataObject):
    """An instruction later in its row, in the row of another copy, or exchanged with another copy."""
    program = data.draw(programs(most_batches=2))
    mutant, what = data.draw(changed(program))
    bounds = bounds_of(program)
    assert_judged(mutant, bounds, verdict(mutant, bounds), what)


@pytest.mark.full
@draws(100)
@given(st.data())
def test_a_copy_takes_no_other_microbatch(data: st.DataObject):
    """Even where it computes the whole of it, and all transfers follow: the samples are another copy's."""
    program = data.draw(
        programs(most_batches=2).filter(lambda each: any(map(lambda s: others_of(each, s), range(each.num_stages))))
    )
    stage = data.draw(st.sampled_from([each for each in range(program.num_stages) if others_of(program, each)]))
    other = data.draw(st.sampled_from(others_of(program, stage)))
    index = data.draw(st.sampled_from(program.indexes_taken(stage)))
    mutant = taken_over(program, stage, other, program.first_microbatch + index)
    assert verdict(mutant, [999] * program.num_stages)
    with pytest.raises(
        ProgramError,
        match=r"another copy of stage|does not take this microbatch|does not say which stage|its peer is stage",
    ):
        check(mutant)


@draws(60)
@given(st.data())
def test_a_program_is_for_its_shares(data: st.DataObject):
    """The same rows with two microbatches exchanged between the copies of a stage are wrong."""
    program = data.draw(
        programs(most_batches=2).filter(lambda each: any(map(lambda s: others_of(each, s), range(each.num_stages))))
    )
    stage = data.draw(st.sampled_from([each for each in range(program.num_stages) if others_of(program, each)]))
    other = data.draw(st.sampled_from(others_of(program, stage)))
    copies = list(program.copies)
    mine, its = (data.draw(st.sampled_from(copies[each].positions)) for each in (stage, other))
    for each, old, new in (stage, mine, its), (other, its, mine):
        positions = {*copies[each].positions} - {old} | {new}
        copies[each] = Copy(copies[each].stage, tuple(sorted(positions)))
    mutant = replace(program, copies=tuple(copies))
    assert verdict(mutant, [999] * program.num_stages)
    with pytest.raises(ValueError):
        check(mutant)


def lost_rank(weights: str = "2bw") -> Program:
    """Two replicas of two stages of which one rank is lost: the other copy of the last stage takes all microbatches."""
    return completed(Program.from_csv(LOST.format(weights=weights)))


LOST = """\
# weights: {weights}
# batches: 4 4
# copies: 0:0,2 0:1,3 1:0-3
# tied_embeddings: yes
0F0,0F2,0B0,0B2,0F4,0F6,0B4,0B6
1F1,1F3,1B1,1B3,1F5,1F7,1B5,1B7
2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3,2F4,2B4,2F5,2B5,2F6,2B6,2F7,2B7
"""


@pytest.mark.parametrize("weights", ["flush", "2bw"])
def test_every_single_mutation_is_rejected(weights: str):
    """Not a sample: each instruction dropped, doubled and re-versioned in turn."""
    assert_every_mutation_is_rejected(lost_rank(weights))


@pytest.mark.parametrize("weights", ["flush", "2bw"])
def test_neighbours_exchanged_are_judged_as_the_oracle_judges_them(weights: str):
    program = lost_rank(weights)
    bounds = bounds_of(program)
    assert_each_is_judged(moved_later(program, reach=1), lambda mutant: verdict(mutant, bounds), max_saved=bounds)


@pytest.mark.parametrize("way", [given_away, sent_elsewhere])
def test_what_goes_to_another_copy_is_rejected(way):
    """Each word of a microbatch in the other copy's row, and each transfer with the other copy."""
    program, count = lost_rank(), 0
    for mutant, what in way(program):
        assert verdict(mutant, bounds_of(program)), what
        assert_rejected(mutant, what)
        count += 1
    assert count >= 16


@draws(40)
@given(bare_programs(equal=True))
def test_rows_alone_are_completed_as_they_say(program: Program):
    """Through the text, too: what is read back is the same program, with its edges and its reductions found."""
    text = "".join(line for line in program.to_csv().splitlines(keepends=True) if "edges" not in line)
    assert Program.from_csv(text) == program
    assert check(completed(program)).num_microbatches == program.num_microbatches
