"""The order relay: each stage on the whole batch before the rank's next one, for any ranks, stages and batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import ProgramError, check, check_periodic
from megatron.pipeline.program.instruction import COMPUTATIONS, Instruction
from megatron.pipeline.schedules import Schedule
from tests.draws import draws
from tests.pipeline.check.examples import with_row


def schedule(p: int, v: int, **choices: object) -> Schedule:
    order = choices.pop("order", "relay")
    return Schedule(order=order, weights="flush", num_stages=p * v, num_virtual_stages=v, **choices)


def computations(chosen: Schedule, m: int) -> list[str]:
    """The computations of each rank, without versions."""
    rows = chosen.build((m,)).rows
    return [
        " ".join(f"{each.stage}{each.kind.value}{each.microbatch}" for each in row if each.kind in COMPUTATIONS)
        for row in rows
    ]


def test_one_rank():
    """Up, stage by stage; forwards and backwards of the last one in turn; down again."""
    assert computations(schedule(1, 3), 2) == ["0F0 0F1 1F0 1F1 2F0 2B0 2F1 2B1 1B0 1B1 0B0 0B1"]


def test_recompute_is_for_all_stages_but_the_last():
    """There each backward follows its forward; the others have kept an input."""
    assert computations(schedule(1, 2, recompute=True), 2) == ["0F0 0F1 1F0 1B0 1F1 1B1 0R0 0B0 0R1 0B1"]
    assert schedule(2, 2, recompute=True).build((3,)).not_recomputed == (3,)
    assert schedule(2, 2).build((3,)).not_recomputed == ()


@draws(60)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6))
def test_it_is_interleaved_with_the_batch_as_one_group(p: int, v: int, more: int):
    """Where Megatron's rule takes such a group."""
    m = p + more
    assert computations(schedule(p, v), m) == computations(
        schedule(p, v, order="interleaved", microbatch_group_size=m), m
    )


@draws(100)
@given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 9),
    st.fixed_dictionaries({name: st.booleans() for name in ("recompute", "data_parallel", "tied_embeddings")}),
)
def test_any_batch_is_proved(p: int, v: int, m: int, choices: dict[str, bool]):
    """Smaller than the pipeline, too; for every number of batches, and each stage saves as many as it says."""
    relay = schedule(p, v, **choices)
    bounds = relay.max_saved_microbatches((m,))
    for report in (
        check(relay.build((m,)), max_saved=bounds, max_saved_on_rank=relay.max_saved_on_rank((m,))),
        check_periodic(relay.build_periodic(m), max_saved=bounds),
    ):
        assert report.peak_saved_microbatches == bounds
    ahead = [p - r if v == 1 else 2 * (p - r) - 1 for r in range(p)]
    assert bounds == (m,) * (p * (v - 1)) + tuple(min(m, each) for each in ahead)


def test_a_recompute_is_needed_where_the_program_says_so():
    """One that is missing, and one on a stage that needs none."""
    program = schedule(1, 2, recompute=True).build((2,))
    row = list(program.rows[0])
    missing = row.index(Instruction.parse("0R1@0"))
    with pytest.raises(ProgramError, match="have not been recomputed") as caught:
        check(with_row(program, 0, row[:missing] + row[missing + 1 :]))
    assert caught.value.position == missing
    needless = row.index(Instruction.parse("1B0@0"))
    with pytest.raises(ProgramError, match="recomputes nothing at this stage") as caught:
        check(with_row(program, 0, [*row[:needless], Instruction.parse("1R0@0"), *row[needless:]]))
    assert caught.value.position == needless


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"microbatch_group_size": 4}, "relay takes a whole batch as one group"),
        ({"rank_of_stage": (0, 1, 1, 0)}, "relay takes stages that are dealt out in turn"),
        ({"weights": "2bw"}, "relay drains in every batch"),
        ({"balance": True}, "relay saves a whole batch at every stage"),
        ({"extra_warmup": True}, "relay has no warm-up"),
    ],
)
def test_refusals(choices: dict, message: str):
    """What does not go with it."""
    with pytest.raises(ValueError, match=message):
        Schedule(**{"order": "relay", "weights": "flush", "num_stages": 4, "num_virtual_stages": 2} | choices)
