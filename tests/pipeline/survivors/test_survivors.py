"""The programs of ranks that are left: proved, timed as they are simulated, within memory; and what is refused."""

from pathlib import Path

import pytest
from hypothesis import given, settings

from megatron.pipeline.check import ProgramError, check
from megatron.pipeline.program.edges import Edge
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import ProgramSchedule, Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.survivors import ReplicaRank, without
from megatron.pipeline.survivors.sharing import Sharing
from tests.pipeline.survivors.jobs import ACCEPTED, Job, jobs, schedule_of

GOLDEN = Path(__file__).parents[1] / "golden"
DRAINED = tuple(name for name in ACCEPTED if name != "2bw")


def survive(job: Job):
    return without(job.schedule, job.num_microbatches, num_replicas=job.num_replicas, lost=job.lost, costs=job.costs)


@pytest.mark.full
@settings(deadline=None, max_examples=60)
@given(jobs(presets=DRAINED))
def test_every_computation_is_done_once_by_a_rank_that_is_left(job: Job):
    """The checker proves the program for any number of batches; the time is the simulation's and keeps the bound; the
    rows are a replica's computations, d times; no rank holds more than the fullest one before."""
    left = survive(job)
    program, size = left.schedule.program, job.num_microbatches * job.num_replicas
    check(left.schedule.build((size, size)))
    sharing = Sharing(job.schedule, job.num_microbatches, job.num_replicas, job.lost)
    assert left.seconds == simulate(program, sharing.costs(job.costs)).makespan >= left.bound - 1e-9
    own = [each for row in job.schedule.build((job.num_microbatches,)).rows for each in row if each.kind.is_computation]
    expected = sorted(
        (each.kind, each.stage, each.microbatch * job.num_replicas + replica)
        for each in own
        for replica in range(job.num_replicas)
    )
    done = [each for row in program.rows for each in row if each.kind.is_computation]
    assert sorted((each.kind, program.copies[each.stage].stage, each.microbatch) for each in done) == expected
    assert not job.lost & {*left.ranks} and len(left.ranks) == program.num_ranks
    assert max(left.held) <= max(left.held_undisturbed)


@settings(deadline=None, max_examples=15)
@given(jobs(presets=("2bw",), most=2, most_lost=1))
def test_2bw_goes_on_without_a_drain(job: Job):
    """Its batches follow one another, with predictions, too, and the steady time keeps its bound."""
    left = survive(job)
    assert left.schedule.weights == job.schedule.weights and not left.schedule.drains_between_periods
    assert left.seconds >= left.bound - 1e-9


@pytest.mark.parametrize("name", ["flush", "gpipe", "zb-h1", "interleaved"])
def test_it_makes_no_difference_which_replica_has_lost_the_rank(name: str):
    """The rows of a loss are those of another replica's, with other numbers; so are time, bound and memory."""
    schedule = schedule_of(name, 2)
    for rank in range(2):
        found = [without(schedule, 4, num_replicas=3, lost=[ReplicaRank(replica, rank)]) for replica in range(3)]
        assert len({(each.seconds, each.bound, each.held) for each in found}) == 1
        shapes = {
            tuple(sorted(tuple((each.kind, each.microbatch // 3) for each in row if each.kind.is_computation)
                         for row in left.schedule.program.rows))
            for left in found
        }  # fmt: skip
        assert len(shapes) == 1


def test_the_same_job_gives_the_same_program():
    """All survivors make the program by themselves, and have to come to the same one."""
    found = {
        without(schedule_of("zb-h1", 3), 4, num_replicas=3, lost=[ReplicaRank(2, 1)]).schedule.sha256 for _ in range(2)
    }
    assert len(found) == 1


def test_a_file_is_a_schedule_too():
    """The rows of a preset, as a file: the same times; under 2bw, too, and with steps of several batches."""
    for name, sizes in (("flush", (3,)), ("2bw", (3, 3, 3, 3))):
        preset = Schedule.preset(name, num_stages=2, data_parallel=True)
        file = ProgramSchedule.of(Program.from_csv(preset.build(sizes).to_csv()))
        one, other = (without(each, 3, num_replicas=2, lost=[ReplicaRank(0, 1)]) for each in (preset, file))
        assert (one.seconds, one.undisturbed, one.bound) == (other.seconds, other.undisturbed, other.bound)


@pytest.mark.parametrize("edges", ["0>1 0>2 1>3 2>3", "0>1 0>3:F 1>2 2>3"])
@pytest.mark.parametrize("placed", [None, (0, 1, 1, 0)])
def test_graphs_lose_ranks_too(edges: str, placed: tuple[int, ...] | None):
    """A stage with two makers, and an edge without gradients, whose way back is no part of the bound."""
    given = tuple(map(Edge.parse, edges.split()))
    schedule = Schedule.preset("flush", num_stages=4, edges=given, rank_of_stage=placed, data_parallel=True)
    costs = Costs(forward=(1, 2, 3, 1), backward=(2, 1, 2, 2), latency=(0, 1, 0, 0.5))
    for rank in range(schedule.num_ranks):
        left = without(schedule, 4, num_replicas=2, lost=[ReplicaRank(0, rank)], costs=costs)
        assert left.bound <= left.seconds and max(left.held) <= max(left.held_undisturbed)
        between = {(left.schedule.copies[each.source].stage, left.schedule.copies[each.target].stage, each.gradient)
                   for each in left.schedule.graph.edges}  # fmt: skip
        assert between == {(each.source, each.target, each.gradient) for each in given}


def test_a_rank_may_be_given_more_room():
    """zb-h1's first ranks are faster with more room; with too little no program is made, and the error says so."""
    schedule = schedule_of("zb-h1", 4)
    at = {held: without(schedule, 8, num_replicas=4, lost=[ReplicaRank(0, 0)], most_held=held) for held in (4, 6)}
    assert at[6].seconds < at[4].seconds and at[6].bound < at[4].bound
    with pytest.raises(ValueError, match="cannot compute and hold 0 microbatches"):
        without(schedule, 8, num_replicas=4, lost=[ReplicaRank(0, 0)], most_held=0)


def test_lost_ranks_of_several_replicas():
    """All but one rank of each stage may be lost."""
    lost = [ReplicaRank(0, 0), ReplicaRank(1, 0), ReplicaRank(1, 1), ReplicaRank(2, 1)]
    left = without(schedule_of("flush", 2), 2, num_replicas=3, lost=lost)
    assert left.ranks == (ReplicaRank(2, 0), ReplicaRank(0, 1))
    assert left.seconds >= left.bound >= 18


@pytest.mark.parametrize("num_read", [None, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_predictions_read_the_microbatches_of_all_replicas(num_read: int | None, tied: bool):
    """Copies keep the gradients of what the replicas' predictions read, together and each once. A program in which one
    keeps fewer is refused."""
    schedule = schedule_of(
        "2bw", 3, predict=True, reduce_partial=True, provisional_microbatches=num_read, tied_embeddings=tied
    )
    size, num_replicas = 4, 3
    left = without(schedule, size, num_replicas=num_replicas, lost=[ReplicaRank(0, 0), ReplicaRank(2, 1)])
    program = left.schedule.build((size * num_replicas,) * 3)
    for stage in range(3):
        of_replica = num_read or size - (2 - stage)
        kept: list[int] = []
        for rank, row in enumerate(program.rows):
            if left.ranks[rank].rank == stage:
                [hold] = [at for at, each in enumerate(row) if (each.kind, each.version) == (Kind.HOLD, 2)]
                batch = range(size * num_replicas, 2 * size * num_replicas)
                done = [each.microbatch for each in row[:hold] if each.kind is Kind.BACKWARD]
                kept += [each for each in done if each in batch]
        assert sorted(kept) == list(batch[: of_replica * num_replicas])
    rank, hold = next(
        (rank, at) for rank, row in enumerate(program.rows) for at, each in enumerate(row) if each.kind is Kind.HOLD
    )
    row = program.rows[rank]
    last = max(at for at in range(hold) if row[at].kind is Kind.BACKWARD)
    early = (*row[:last], row[hold], *row[last:hold], *row[hold + 1 :])
    with pytest.raises(ProgramError, match=r"it reads .* of batch 0, and"):
        check(program.with_rows((*program.rows[:rank], early, *program.rows[rank + 1 :])))


@pytest.mark.parametrize(
    ("change", "lost", "word"),
    [
        ({"name": "l2l"}, ["0.0"], "keeps weights on the host"),
        ({"name": "pipedream"}, ["0.0"], "updates after each microbatch"),
        ({"optimistic": True}, ["0.0"], "do not wait for their norm"),
        ({"name": "2bw", "predict": True}, ["0.0"], "predicts weights from the gradients of each replica alone"),
        ({}, ["0.1", "1.1"], "every replica has lost rank 1, so nobody holds the weights of stage 1"),
        ({}, ["2.0"], r"there is no rank 2.0: the job has 2 replicas of 2 ranks, 0.0 to 1.1"),
        ({}, ["x"], "'x' is no replica and pipeline rank"),
    ],
)
def test_refusals(change: dict, lost: list[str], word: str):
    """In one sentence, with the reason and what to do."""
    name = change.get("name", "flush")
    schedule = Schedule.preset(**{"name": "flush", "num_stages": 2, **change})
    with pytest.raises(ValueError, match=word):
        without(schedule, 1 if name == "pipedream" else 2, num_replicas=2, lost=map(ReplicaRank.parse, lost))


def test_copies_cannot_lose_a_rank_again():
    left = without(schedule_of("flush", 2), 2, num_replicas=3, lost=[ReplicaRank(0, 1)])
    with pytest.raises(ValueError, match="has copies of stages already; begin with the schedule of one replica"):
        without(left.schedule, 6, num_replicas=2, lost=[ReplicaRank(0, 0)])


def test_costs_of_another_model_are_refused():
    for costs in (Costs(forward=(1, 2, 3)), Costs(latency=(1, 1))):
        with pytest.raises(ValueError, match="give one for all, or one for each of"):
            without(schedule_of("flush", 2), 2, num_replicas=2, lost=[ReplicaRank(0, 0)], costs=costs)


def test_costs_follow_their_stages():
    """A slow stage is slow in all of its copies, and a slow edge in each edge between copies."""
    sharing = Sharing(schedule_of("flush", 3), 2, 2, frozenset([ReplicaRank(0, 1)]))
    costs = sharing.costs(Costs(forward=(1, 2, 3), latency=(5, 7)))
    assert costs.forward == (1, 1, 2, 3, 3)
    assert [str(each) for each in sharing.extent.graph.edges] == ["0>2", "1>2", "2>3", "2>4"]
    assert costs.latency == (5, 5, 7, 7)


@pytest.mark.full
@pytest.mark.parametrize("name", ["zb-h1", "flush"])
def test_one_of_32_ranks_of_a_stage_is_lost(name: str):
    """At most 5% slower, where the 31 that are left have 3.2% more to do each."""
    left = without(schedule_of(name, 4), 62, num_replicas=32, lost=[ReplicaRank(5, 0)])
    assert 1.03 <= left.bound / left.undisturbed <= left.slowdown <= 1.05


def test_the_peers_take_the_lost_microbatches_in_turn():
    """Microbatches 1, 4, 7 and 10 of rank 1.0 go to replicas 2 and 0 in turn, at that rank only."""
    sharing = Sharing(schedule_of("flush", 2), 4, 3, frozenset([ReplicaRank(1, 0)]))
    first, second, *others = [copy.positions for copy in sharing.extent.copies]
    assert (first, second) == ((0, 3, 4, 6, 9, 10), (1, 2, 5, 7, 8, 11))
    assert others == [(0, 3, 6, 9), (1, 4, 7, 10), (2, 5, 8, 11)]


def test_the_golden_file():
    """Three pipelines of four ranks, 6 microbatches each, as in the figures of ReCycle (SOSP 2024); rank 1.2 is lost.

    Ranks 0.2 and 2.2 take three of its microbatches each, with 9 of 3 units, and start behind two forwards.
    """
    left = without(schedule_of("flush", 4), 6, num_replicas=3, lost=[ReplicaRank(1, 2)])
    golden = Program.from_csv((GOLDEN / "without_p4_d3_m6.csv").read_text())
    assert left.schedule.program == golden
    check(golden)
    taken = {position for copy in golden.copies if copy.stage == 2 for position in copy.positions if position % 3 == 1}
    assert taken == {1, 4, 7, 10, 13, 16} and [len(copy.positions) for copy in golden.copies if copy.stage == 2] == [
        9,
        9,
    ]
    assert (left.undisturbed, left.bound, left.seconds) == (27, 33, 33)
