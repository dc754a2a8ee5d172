"""What programs ask of memory, read off their rows."""

import pytest

from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.schedules import Schedule
from megatron.planner import demand_of


def demand(name: str, *, num_microbatches: int, **choices):
    """The demand of two batches, proved."""
    schedule = Schedule.preset(name, **choices)
    program = schedule.build([num_microbatches] * 2)
    return demand_of(program, check(program))


def test_versions_and_gradient_buffers():
    """flush holds one weight version and one gradient buffer, 2bw two of each."""
    flush = demand("flush", num_stages=4, num_microbatches=8)
    assert flush.live_versions == flush.gradient_buffers == (1, 1, 1, 1)
    without_flush = demand("2bw", num_stages=4, num_microbatches=8)
    assert without_flush.live_versions == without_flush.gradient_buffers == (2, 2, 2, 2)


def test_stashing_keeps_versions_and_one_gradient_buffer():
    """pipedream keeps p-s versions on stage s, but steps before it needs another buffer."""
    schedule = Schedule.preset("pipedream", num_stages=4)
    periodic = schedule.build_periodic(1)
    found = demand_of(periodic.unroll(1), check_periodic(periodic))
    assert found.live_versions == (4, 3, 2, 1)
    assert found.gradient_buffers == (1, 1, 1, 1)


def test_balanced_pairs():
    """Under bpipe with 8 stages the first three evict, their pairs accept, and nobody saves more than 5."""
    found = demand("bpipe", num_stages=8, num_microbatches=16)
    assert found.evicts == (True,) * 3 + (False,) * 5
    assert found.accepts == (False,) * 5 + (True,) * 3
    assert max(found.saved_on_rank) == 5
    assert found.own_microbatches == (8, 7, 6, 5, 4, 3, 2, 1)


def test_stages_of_interleaved_ranks():
    """Ranks with several stages know them, and save no more over all than each stage by itself allows."""
    found = demand("interleaved", num_stages=8, num_virtual_stages=2, num_microbatches=8)
    assert found.stages_of(1) == (1, 5)
    for rank in range(4):
        assert found.saved_on_rank[rank] <= sum(found.saved_microbatches[stage] for stage in found.stages_of(rank))


@pytest.mark.parametrize("name", ["flush", "2bw"])
def test_receives_wait_in_buffers(name):
    """Only ranks with a neighbour receive, and each posts few receives ahead."""
    found = demand(name, num_stages=4, num_microbatches=8)
    assert all(1 <= count <= 3 for count in found.receives_ahead)
    assert demand(name, num_stages=1, num_microbatches=8).receives_ahead == (0,)
