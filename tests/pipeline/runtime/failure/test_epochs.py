"""Groups of ranks that compute layers together are lost together and come back together, whatever the log's order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.runtime.failure.epochs import decided, of_whole_groups
from megatron.pipeline.runtime.failure.heartbeats import Member
from tests.draws import draws


def member(rank: int, start: int = 0) -> Member:
    return Member(rank, f"{start}.{rank}", "host", "127.0.0.1", 1, 1)


def arrived(rank: int, admits: list[Member] | None = None) -> dict:
    asking = None if admits is None else [list(each) for each in admits]
    return {"kind": "arrived", "token": member(rank).token, "note": f"of {rank}", "admits": asking}


def lost(rank: int) -> dict:
    return {"kind": "lost", "token": member(rank).token, "reason": f"why {rank}"}


WITH = "rank {}, with which it computes its layers, is lost"


@pytest.mark.parametrize(
    ("log", "ranks", "reasons"),
    [
        ([arrived(0), arrived(1), arrived(2)], None, None),
        ([arrived(0), lost(2), arrived(1)], [0, 1], {2: "why 2", 3: WITH.format(2)}),  # nobody waits for rank 3
        ([arrived(3), arrived(0), lost(2), arrived(1)], [0, 1], {2: "why 2", 3: WITH.format(2)}),
        ([lost(2), lost(3), arrived(0), arrived(1)], [0, 1], {2: "why 2", 3: "why 3"}),
        ([arrived(0), arrived(1), lost(2), lost(3)], [0, 1], {2: "why 2", 3: WITH.format(2)}),  # decided before
        ([lost(1), lost(2)], [], {0: WITH.format(1), 1: "why 1", 2: "why 2", 3: WITH.format(2)}),
    ],
)
def test_a_group_is_lost_with_each_of_its_ranks(log, ranks, reasons):
    record = decided([member(rank) for rank in range(4)], log, group_size=2)
    if ranks is None:
        assert record is None
        return
    assert [each.rank for each in record["members"]] == ranks and record["lost"] == reasons
    assert record["notes"] == {rank: f"of {rank}" for rank in ranks}


def test_only_whole_groups_are_taken_in():
    """Two processes of a group that different ranks have heard are a group; one alone waits, and so does one whose
    neighbour is of another group."""
    there = [member(0), member(1)]
    for admits, joined in (
        (([member(2, 1)], [member(3, 1)]), [2, 3]),
        (([member(2, 1)], []), []),
        (([member(3, 1), member(4, 1)], [member(3, 1)]), []),
        (([member(2, 1), member(3, 1), member(4, 1)], []), [2, 3]),
        (([member(2, 1), member(3, 1)], None), []),
    ):
        log = [arrived(rank, each) for rank, each in enumerate(admits)]
        record = decided(there, log, group_size=2)
        assert record["joined"] == joined and [each.rank for each in record["members"]] == [0, 1, *joined]


@given(
    group_size=st.sampled_from([1, 2, 3, 4]),
    num_groups=st.integers(1, 4),
    lines=st.lists(st.tuples(st.sampled_from(["arrived", "lost", "suspected"]), st.integers(0, 15)), max_size=60),
    asking=st.sets(st.integers(0, 15)),
)
@draws(400)
def test_who_is_in_an_epoch_follows_from_the_log(group_size, num_groups, lines, asking):
    """Groups are in it as wholes, or not at all. A rank that is left out has a reason, and a group that is left out has
    a lost rank. One line more changes nothing of what is decided."""
    world = group_size * num_groups
    members = [member(rank) for rank in range(0, world, 1)]
    new = [member(rank, 1) for rank in sorted(asking)]
    log = [
        {"kind": kind, "token": member(rank).token, "reason": "why", "note": "", "admits": [list(each) for each in new]}
        for kind, rank in lines
        if rank < world
    ]
    records = [decided(members, log[:number], group_size=group_size) for number in range(len(log) + 1)]
    first = next((number for number, record in enumerate(records) if record is not None), None)
    if first is None:
        assert {each.rank // group_size for each in members} != {
            rank // group_size for kind, rank in lines if kind == "lost" and rank < world
        }
        return
    record = records[first]
    assert all(each == record for each in records[first:])
    before, ranks = {each.rank for each in members}, {each.rank for each in record["members"]}
    assert len(of_whole_groups(record["members"], group_size)) == len(record["members"])
    assert set(record["lost"]) == {each.rank for each in members if each not in record["members"]}
    found = {line["token"] for line in log[:first] if line["kind"] == "lost"}
    for group in {rank // group_size for rank in record["lost"]}:
        assert found.intersection(member(group * group_size + each).token for each in range(group_size))
    assert set(record["joined"]) <= {each.rank for each in new}
    assert ranks - before <= set(record["joined"])
