"""The first stage may share its embedding with another stage than the last: programs, proofs and times know which."""

from dataclasses import replace

import pytest

from megatron.pipeline.check import check
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs

COSTS = Costs(forward=1.0, backward=2.0, reduce_embed=[0.0, 0.0, 5.0, 0.0])


def made(name: str = "flush", **choices: object) -> Schedule:
    return Schedule.preset(name, num_stages=4, tied_embeddings=True, **{"tied_stage": 2, **choices})


def ranks_with(program: Program, kind: Kind) -> list[int]:
    return [rank for rank, row in enumerate(program.rows) if any(each.kind is kind for each in row)]


@pytest.mark.parametrize("name", ["flush", "2bw", "zb-h1"])
def test_its_rank_adds_up_the_gradients(name):
    """And the last stage's does not; the proof misses the instruction on either rank, and refuses one elsewhere."""
    program = made(name).build((4, 4))
    assert ranks_with(program, Kind.REDUCE_EMBED) == [0, 2]
    check(program)
    for rank in (0, 2):
        row = tuple(each for each in program.rows[rank] if each.kind is not Kind.REDUCE_EMBED)
        rows = (*program.rows[:rank], row, *program.rows[rank + 1 :])
        with pytest.raises(ValueError):
            check(replace(program, rows=rows))
    with pytest.raises(ValueError):
        check(replace(program, tied_stage=None))


def test_predictions_read_it():
    """Of the two stages that share it, and of no other."""
    program = made("2bw", predict=True, provisional_microbatches=1).build((4, 4))
    assert ranks_with(program, Kind.REDUCE_PARTIAL_EMBED) == [0, 2]


def test_one_rank_with_both_reduces_nothing():
    """Two stages of a rank are added up there."""
    schedule = made("interleaved", num_virtual_stages=2)
    assert schedule.rank_of_stage[2] == 0 and not ranks_with(schedule.build((4,)), Kind.REDUCE_EMBED)


def test_its_time_counts():
    """The batch ends later by the reduction, which the cost of that stage's rank gives."""
    with_it, without = (simulate(made().build((4,)), each).end for each in (COSTS, replace(COSTS, reduce_embed=0.0)))
    assert with_it == without + 5.0


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"tied_stage": 4}, "tied_stage 4 is none of the 4 stages that could share the first one's"),
        ({"tied_stage": 0}, "tied_stage 0 is none of the 4 stages"),
        ({"tied_embeddings": False}, "give one, with tied_embeddings"),
        ({"name": "l2l"}, "weights on the host are updated where the first and the last stage share an embedding"),
    ],
)
def test_what_cannot_be_is_refused(choices, reason):
    """In one sentence."""
    with pytest.raises(ValueError, match=reason):
        Schedule.preset(**{"name": "flush", "num_stages": 4, "tied_embeddings": True, "tied_stage": 2, **choices})
