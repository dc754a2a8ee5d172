"""Stages on any ranks: what a preset's placement says, and that programs of such schedules are right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.check.hardware_queues import PROVED, prove_hardware_queues
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules import PRESETS, Schedule
from tests.draws import draws
from tests.pipeline.placed_schedules import PLACED, registered


def build(name: str, num_ranks: int, num_virtual: int = 1, **options) -> Schedule:
    return Schedule.preset(name, num_stages=num_ranks * num_virtual, num_virtual_stages=num_virtual, **options)


def test_a_preset_says_where_its_stages_lie():
    """With one stage on each rank, too; a `rank_of_stage` that is given comes before it."""
    with registered():
        assert build("v", 3, 2).rank_of_stage == (0, 1, 2, 2, 1, 0)
        assert build("shuffled", 4).rank_of_stage == (2, 0, 3, 1)
        assert build("shuffled", 4, rank_of_stage=(3, 2, 1, 0)).rank_of_stage == (3, 2, 1, 0)
        assert build("lopsided", 2, 2).num_virtual_stages == 3
    assert build("flush", 4).rank_of_stage == (0, 1, 2, 3)
    assert build("interleaved", 2, 2).rank_of_stage == (0, 1, 0, 1)


@draws(60)
@given(
    st.sampled_from(sorted(PLACED)),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_programs_are_right(name, num_ranks, num_virtual, more, recompute, tied):
    """Proved for any number of batches, and on devices with a queue for each stream; evaluations as well."""
    with registered():
        preset = PRESETS[name]
        stash = preset.policy.updates_alone
        options = {"recompute": recompute, "tied_embeddings": tied and not stash and num_ranks > 1}
        schedule = build(name, num_ranks, num_virtual if preset.interleaves else 1, data_parallel=True, **options)
        batches = (1,) * 3 if stash else (num_ranks, num_ranks, num_ranks + more)
        program = schedule.build(batches)
        check(program, max_saved=schedule.max_saved_microbatches(batches))
        check_periodic(schedule.build_periodic(batches[-1]))
        check(schedule.build_evaluation(2, version=1))
        queues = {"tensor": 2, "data": 2, "distributed_optimizer": True}
        assert prove_hardware_queues(program, num_queues=99, **queues).verdict == PROVED
        if preset.policy.drains:
            assert prove_hardware_queues(program, num_queues=1, **queues).verdict == PROVED


@pytest.mark.parametrize(
    ("name", "num_virtual", "posts"), [("v", 2, set()), ("shuffled", 1, {1, 2}), ("flush", 1, {0, 3})]
)
def test_who_reduces_a_tied_embedding(name, num_virtual, posts):
    """The ranks of the first and the last stage; none where both lie on one, which needs nobody."""
    with registered():
        rows = build(name, 4, num_virtual, tied_embeddings=True).build((4,)).rows
    found = {rank for rank, row in enumerate(rows) if any(each.kind is Kind.REDUCE_EMBED for each in row)}
    assert found == posts
