"""Losses that differ only in the names of replicas have one program: the renamed one is proved, and takes as long."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline.check import ProgramError
from megatron.pipeline.program.edges import Edge
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.survivors import ReplicaRank, Survivors, without
from megatron.pipeline.survivors.losses import double_losses, single_losses
from megatron.pipeline.survivors.renaming import distinct, renamed
from megatron.pipeline.survivors.sharing import Sharing
from tests.pipeline.survivors.jobs import ACCEPTED, Job, jobs, schedule_of

DRAINED = tuple(name for name in ACCEPTED if name != "2bw")


def survive(job: Job) -> Survivors:
    return without(job.schedule, job.num_microbatches, num_replicas=job.num_replicas, lost=job.lost)


def done_by(left: Survivors, replicas: tuple[int, ...]) -> dict[ReplicaRank, list[tuple]]:
    """What each rank computes, in order: kind, stage of the model and microbatch, with the names of `replicas`."""
    program, size = left.schedule.program, len(replicas)
    return {
        ReplicaRank(replicas[own.replica], own.rank): [
            (each.kind, program.copies[each.stage].stage, each.microbatch // size, replicas[each.microbatch % size])
            for each in row
            if each.kind.is_computation
        ]
        for own, row in zip(left.ranks, program.rows, strict=True)
    }


def assert_is_the_same_job(found: Survivors, other: Survivors, replicas: tuple[int, ...]) -> None:
    """`other` is `found` with the names of `replicas`: proved for any number of batches, as fast, as full."""
    assert other.schedule.proofs, "raises ProgramError if a proof fails"
    assert sorted(other.schedule.max_saved_on_rank(())) == sorted(found.schedule.max_saved_on_rank(()))
    assert simulate(other.schedule.program).makespan == simulate(found.schedule.program).makespan
    unchanged = tuple(range(len(replicas)))
    assert done_by(other, unchanged) == done_by(found, replicas)
    assert {*other.lost} == {ReplicaRank(replicas[each.replica], each.rank) for each in found.lost}


@pytest.mark.full
@settings(deadline=None, max_examples=25)
@given(jobs(presets=DRAINED), st.data())
def test_a_renamed_program_is_proved_and_as_fast(job: Job, data: st.DataObject):
    found, replicas = survive(job), tuple(data.draw(st.permutations(range(job.num_replicas))))
    assert_is_the_same_job(found, renamed(found, replicas), replicas)


@settings(deadline=None, max_examples=8)
@given(jobs(presets=("2bw",), most=2, most_lost=1), st.data())
def test_a_renamed_program_goes_on_without_a_drain(job: Job, data: st.DataObject):
    """Under 2bw, whose batches follow one another."""
    found, replicas = survive(job), tuple(data.draw(st.permutations(range(job.num_replicas))))
    assert_is_the_same_job(found, other := renamed(found, replicas), replicas)
    assert not other.schedule.drains_between_periods


def test_a_graph_is_renamed_too():
    """With a stage that has two makers, and ranks of several stages."""
    edges = tuple(map(Edge.parse, ["0>1", "0>3:F", "1>2", "2>3"]))
    schedule = Schedule.preset("flush", num_stages=4, edges=edges, rank_of_stage=(0, 1, 1, 0), data_parallel=True)
    found = without(schedule, 4, num_replicas=3, lost=[ReplicaRank(1, 0)])
    assert_is_the_same_job(found, renamed(found, (2, 0, 1)), (2, 0, 1))


def test_a_wrong_renaming_is_found_out():
    """The proof of a program in which two microbatches have changed places at one stage fails."""
    found = without(schedule_of("flush", 2), 2, num_replicas=3, lost=[ReplicaRank(0, 1)])
    other = renamed(found, (1, 0, 2))
    program = other.schedule.program
    rows = (tuple(reversed(program.rows[0])), *program.rows[1:])
    object.__setattr__(other.schedule, "program", program.with_rows(rows))
    with pytest.raises(ProgramError):
        _ = other.schedule.proofs


@given(st.integers(1, 5), st.data())
def test_what_stands_for_a_loss(num_replicas: int, data: st.DataObject):
    """Named anew, the distinct loss is the loss; and all that are alike have the same one."""
    ranks = st.builds(ReplicaRank, st.integers(0, num_replicas - 1), st.integers(0, 3))
    lost = data.draw(st.frozensets(ranks, max_size=6))
    known, replicas = distinct(lost, num_replicas)
    assert sorted(replicas) == list(range(num_replicas))
    assert {ReplicaRank(replicas[each.replica], each.rank) for each in known} == lost
    other = data.draw(st.permutations(range(num_replicas)))
    assert distinct([ReplicaRank(other[each.replica], each.rank) for each in lost], num_replicas)[0] == known


def test_all_losses_of_one_and_two_ranks_have_a_distinct_one():
    every = [ReplicaRank(replica, rank) for replica in range(3) for rank in range(3)]
    known = {distinct(lost, 3)[0] for number in (1, 2) for lost in combinations(every, number)}
    assert known == {*single_losses(3), *double_losses(3)}


def assert_equal(one: Survivors, other: Survivors) -> None:
    """To the letter."""
    assert one.schedule.program.to_csv() == other.schedule.program.to_csv()
    assert one.schedule == other.schedule and one.schedule.name == other.schedule.name
    assert {**vars(one), "schedule": 0} == {**vars(other), "schedule": 0}


@pytest.mark.full
@pytest.mark.parametrize("name", ["flush", "zb-h1", "2bw"])
def test_every_loss_has_the_program_of_its_own_search(name: str):
    """Of one, two and three ranks of six: what is looked up is what a search at the loss would have found."""
    schedule, found = schedule_of(name, 2), {}
    every = [ReplicaRank(replica, rank) for replica in range(3) for rank in range(2)]
    for number in (1,) if name == "2bw" else (1, 2, 3):
        for lost in combinations(every, number):
            known, replicas = distinct(lost, 3)
            if {(0, 0), (1, 0), (2, 0)} <= {*known} or {(0, 1), (1, 1), (2, 1)} <= {*known}:
                continue
            if known not in found:
                found[known] = without(schedule, 2, num_replicas=3, lost=known)
            assert_equal(renamed(found[known], replicas), without(schedule, 2, num_replicas=3, lost=lost))
    assert len(found) < 15


@pytest.mark.full
@settings(deadline=None, max_examples=20)
@given(jobs(presets=DRAINED, most_lost=4))
def test_the_search_goes_by_no_names(job: Job):
    """Any loss of any job, stages with several makers and ranks of several stages aside."""
    known, replicas = distinct(job.lost, job.num_replicas)
    assert_equal(renamed(survive(replace(job, lost=frozenset(known))), replicas), survive(job))


def test_shares_stay_even():
    """The peers of the lost rank have as many microbatches each with other names."""
    found = without(schedule_of("flush", 2), 4, num_replicas=4, lost=[ReplicaRank(0, 1)])
    other = renamed(found, (2, 3, 0, 1))
    sharing = Sharing(schedule_of("flush", 2), 4, 4, frozenset(other.lost))
    counts = [len(copy.positions) for copy in other.schedule.copies]
    assert counts == [len(copy.positions) for copy in sharing.extent.copies]
