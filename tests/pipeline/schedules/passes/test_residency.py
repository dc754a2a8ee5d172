"""Weights come and go with the runs of a row; gradients leave behind each stage's last backward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.program.instruction import HOST_WORDS, Instruction, Kind
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules.passes.residency import add_host_updates, add_residency
from tests.draws import draws
from tests.pipeline.schedules.passes.written import extent, segments, texts

RELAY = "0F0 0F1 1F0 1F1 2F0 2F1 3F0 3B0 3F1 3B1 2B0 2B1 1B0 1B1 0B0 0B1"


def of_rank(num_stages: int, *, batches: tuple[int, ...] = (2,), resident: int = 2, **fields: object) -> Program:
    """What a program on one rank spans."""
    residency = Residency(resident, fields.pop("update", "deferred"))
    return extent("flush", rank_of_stage=(0,) * num_stages, batches=batches, residency=residency, **fields)


def test_a_fetch_stands_behind_what_makes_room():
    """Two of four stages: up, around with the last two, and down; no microbatch number matters."""
    assert texts(add_residency(segments(RELAY), of_rank(4))) == [
        "0FETCH@0 1FETCH@0 0F0 0F1 0FREE@0 2FETCH@0 1F0 1F1 1FREE@0 3FETCH@0 2F0 2F1 3F0 3B0 3F1 3B1 "
        "3FREE@0 1FETCH@0 2B0 2B1 2FREE@0 0FETCH@0 1B0 1B1 1FREE@0 0B0 0B1 0FREE@0"
    ]


def test_one_stage_at_a_time():
    """Then nothing is fetched ahead."""
    assert texts(add_residency(segments("0F0 1F0 1B0 0B0"), of_rank(2, batches=(1,), resident=1))) == [
        "0FETCH@0 0F0 0FREE@0 1FETCH@0 1F0 1B0 1FREE@0 0FETCH@0 0B0 0FREE@0"
    ]


def test_nothing_stays_over_a_border():
    """Each batch fetches its own version, where the first batch of a run is not the program's, too."""
    two = of_rank(1, batches=(1, 1), first_batch=3)
    assert texts(add_residency(segments("0F0 0B0", "0F1 0B1", ""), two)) == [
        "0FETCH@3 0F0 0B0 0FREE@3",
        "0FETCH@4 0F1 0B1 0FREE@4",
        "",
    ]


@draws(60)
@given(st.integers(1, 12), st.integers(1, 14), st.integers(1, 3))
def test_a_batch_fetches_2n_less_k(num_stages: int, resident: int, m: int):
    """However many microbatches it has; no order of use allows fewer, since K of them are there at the turn."""
    up = [f"{stage}F{each}" for stage in range(num_stages - 1) for each in range(m)]
    turn = [f"{num_stages - 1}{kind}{each}" for each in range(m) for kind in "FB"]
    down = [f"{stage}B{each}" for stage in reversed(range(num_stages - 1)) for each in range(m)]
    [segment] = add_residency(
        segments(" ".join(up + turn + down)), of_rank(num_stages, batches=(m,), resident=resident)
    )
    count = [each.kind for each in segment].count(Kind.FETCH)
    assert count == 2 * num_stages - min(resident, num_stages)
    assert [each.kind for each in segment].count(Kind.FREE) == count


def host_words(row: list[Instruction]) -> str:
    """With the chain, without what brings weights."""
    shown = {*HOST_WORDS, Kind.REDUCE_GRAD, Kind.REDUCE_EMBED, Kind.REDUCE_NORM, Kind.STEP, Kind.BACKWARD}
    return " ".join(map(str, (each for each in row if each.kind in shown)))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"update": "deferred"},
            "1B0 1B1 1STORE_GRAD@1 0B0 0B1 0STORE_GRAD@1 0REDUCE_NORM@1 0STEP@1 0UPDATE@1 1UPDATE@1",
        ),
        (
            {"update": "eager", "data_parallel": True},
            "1B0 1B1 1REDUCE_GRAD@1 1STORE_GRAD@1 1UPDATE@1 "
            "0B0 0B1 0REDUCE_GRAD@1 0STORE_GRAD@1 0UPDATE@1 0REDUCE_NORM@1 0STEP@1",
        ),
        (
            {"update": "eager", "tied_embeddings": True},
            "1B0 1B1 1STORE_GRAD@1 0B0 0B1 0STORE_GRAD@1 0REDUCE_EMBED@1 0UPDATE@1 1UPDATE@1 0REDUCE_NORM@1 0STEP@1",
        ),
        (
            {"update": "eager", "global_norm": False},
            "1B0 1B1 1STORE_GRAD@1 1UPDATE@1 0B0 0B1 0STORE_GRAD@1 0UPDATE@1 0STEP@1",
        ),
    ],
)
def test_gradients_leave_behind_the_last_backward(fields: dict, expected: str):
    """They leave behind that of their own stage; updates at once, or behind the step, or behind both ends of tied
    embeddings."""
    row = segments("0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1", "")
    assert host_words(add_host_updates(row, 0, of_rank(2, **fields))[0]) == expected


def test_a_rank_without_an_end_adds_no_embeddings():
    """The first and the last of three ranks do, behind their last backward."""
    three = extent(
        "flush", num_stages=3, batches=(1,), tied_embeddings=True, residency=Residency(2, "eager"),
    )  # fmt: skip
    rows = [add_host_updates(segments(f"{rank}F0 {rank}B0", ""), rank, three)[0] for rank in range(3)]
    assert [host_words(row) for row in rows] == [
        "0B0 0STORE_GRAD@1 0REDUCE_EMBED@1 0UPDATE@1 0REDUCE_NORM@1 0STEP@1",
        "1B0 1STORE_GRAD@1 1UPDATE@1 1REDUCE_NORM@1 1STEP@1",
        "2B0 2STORE_GRAD@1 2REDUCE_EMBED@1 2UPDATE@1 2REDUCE_NORM@1 2STEP@1",
    ]
