"""Bad programs are rejected: one instruction dropped, duplicated, re-versioned or exchanged with another."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import PROVISIONAL
from megatron.pipeline.schedules import Schedule
from tests.draws import draws
from tests.pipeline.check.examples import broken, cases, moved_later, saved_bounds, swapped, with_row
from tests.pipeline.check.mutations import (
    assert_each_is_judged,
    assert_every_mutation_is_rejected,
    assert_judged,
    assert_rejected,
    in_halves,
    with_other_members,
)
from tests.pipeline.check.oracle import verdict

SMALL = {"max_stages": 4, "more": 2, "max_batches": 3}


@draws(400)
@given(st.data())
def test_a_broken_program_is_rejected(data: st.DataObject):
    """Dropping, duplicating or re-versioning any instruction of any program is found, and placed."""
    _, program = data.draw(cases(**SMALL))
    mutant, what = data.draw(broken(program))
    assert_rejected(mutant, what)


@draws(400)
@given(st.data())
def test_a_swap_is_judged_as_the_oracle_judges_it(data: st.DataObject):
    """Two instructions exchanged: accepted are exactly the programs that compute the definition within the bound."""
    schedule, program = data.draw(cases(**SMALL))
    mutant, what = data.draw(swapped(program))
    bounds = saved_bounds(schedule, program.batches)
    wrong = verdict(mutant, bounds)
    assert_judged(mutant, bounds, wrong, what)


def test_kept_gradients_wait_for_no_reduction():
    """HOLD behind a reduction that completes later: the rank goes on, as the executor does, and sends its gradient."""
    schedule = Schedule(
        order="1f1b", weights=PROVISIONAL, num_stages=3, tied_embeddings=True, data_parallel=True,
        provisional_microbatches=1, reduce_partial=True,
    )  # fmt: skip
    program = schedule.build((3,))
    row = [*program.rows[2]]
    sent, reduced = (
        next(position for position, each in enumerate(row) if each.kind is kind)
        for kind in (Kind.SEND_B, Kind.REDUCE_PARTIAL_EMBED)
    )
    row[sent], row[reduced] = row[reduced], row[sent]
    assert row[sent + 1].kind is Kind.HOLD
    bounds = saved_bounds(schedule, program.batches)
    mutant = with_row(program, 2, row)
    assert verdict(mutant, bounds) == ""
    check(mutant, max_saved=bounds)


PREDICTIONS = {
    "stage": {},
    "uniform": {"provisional_microbatches": 1},
    "reduced": {"provisional_microbatches": 1, "reduce_partial": True},
}  # of 2bw-provisional
NAMES = [
    "gpipe", "flush", "2bw", "pipedream", "interleaved", "zb-h1", "2bw-zb-h1", "zb-h2", "interleaved-zb", "zbv",
    "v-half", "v-min", *PREDICTIONS, "flush, optimistic", "zbv, optimistic",
]  # fmt: skip
USUAL = {"flush", "2bw", "pipedream", "interleaved", "2bw-zb-h1", "zbv", "reduced", "zbv, optimistic"}
EACH = [pytest.param(name, marks=() if name in USUAL else pytest.mark.full) for name in NAMES]


@pytest.mark.sample(3, "reduced")
@pytest.mark.parametrize("name", EACH)
def test_every_single_mutation_of_a_program_is_rejected(name: str):
    """Not a sample: each instruction of a program with a full chain is dropped, doubled and re-versioned."""
    assert_every_mutation_is_rejected(full_program(name))


def test_every_single_mutation_of_an_evaluation_is_rejected():
    """The same for forwards only."""
    program = full_schedule("2bw").build_evaluation(4, version=3, first_microbatch=11)
    check(program)
    assert_every_mutation_is_rejected(program)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", EACH)
def test_every_adjacent_swap_is_judged_as_the_oracle_judges_it(name: str):
    """Not a sample either: each pair of neighbours in every row."""
    assert_judged_as_the_oracle(name, moved_later(full_program(name), reach=1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["flush", "2bw-zb-h1", "zbv", *PREDICTIONS])
def test_other_members_are_judged_as_the_oracle_judges_them(name: str):
    """As many forwards, backwards and transfers before everything that counts them, and of other microbatches."""
    assert_judged_as_the_oracle(name, with_other_members(full_program(name)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["reduced", "2bw-zb-h1", "stage", "uniform"])
def test_what_stands_between_two_halves_is_judged_as_the_oracle_judges_them(name: str):
    """Each W, and each word that reads gradients, up to six places later: between I and W there is a part of them."""
    words = {Kind.BACKWARD_WEIGHT, Kind.HOLD, Kind.PREDICT, Kind.REDUCE_PARTIAL_EMBED}
    assert_judged_as_the_oracle(name, moved_later(in_halves(full_program(name)), reach=6, kinds=words))


def assert_judged_as_the_oracle(name: str, mutants: Iterable[tuple[Program, str]]) -> None:
    bounds = saved_bounds(full_schedule(name), full_program(name).batches)
    assert_each_is_judged(mutants, lambda mutant: verdict(mutant, bounds), max_saved=bounds)


IN_GROUPS = ("interleaved", "interleaved-zb", "zbv", "v-half", "v-min")  # two stages on each rank


def full_schedule(name: str) -> Schedule:
    flags = {} if name == "pipedream" else {"tied_embeddings": True}
    name, _, optimistic = name.partition(", ")
    flags |= {"optimistic": bool(optimistic)}
    if name in PREDICTIONS:
        flags |= {"num_stages": 3, "recompute": True, "data_parallel": True, **PREDICTIONS[name]}
        return Schedule(order="1f1b", weights=PROVISIONAL, **flags)
    if name in IN_GROUPS:
        return Schedule.preset(name, num_stages=4, num_virtual_stages=2, recompute=True, data_parallel=True, **flags)
    if name == "2bw-zb-h1":
        return Schedule(order="zb-h1", weights="2bw", num_stages=3, recompute=True, data_parallel=True, **flags)
    return Schedule.preset(name, num_stages=3, recompute=True, data_parallel=True, **flags)


def full_program(name: str) -> Program:
    batches = {"pipedream": (1,) * 7} | dict.fromkeys(IN_GROUPS, (4, 2))
    return full_schedule(name).build(batches.get(name.partition(", ")[0], (3, 4, 5)))
