"""A frozen prefix: programs whose first stages compute forwards only."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import ProgramError, check, check_periodic
from megatron.pipeline.program.edges import Edge
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import weight_policy
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import SimulationError, simulate
from megatron.pipeline.simulate.costs import Costs
from tests.draws import draws
from tests.pipeline.check.mutations import assert_every_mutation_is_rejected

PRESETS = ("gpipe", "flush", "2bw")


def placement(num_stages: int, num_frozen: int, together: bool) -> tuple[int, ...]:
    """Each stage on a rank of its own; `together`: but the last frozen one and the first behind it on the same."""
    return tuple(stage - (together and stage >= num_frozen) for stage in range(num_stages))


@st.composite
def frozen_schedules(draw: st.DrawFn) -> Schedule:
    num_stages = draw(st.integers(2, 7))
    num_frozen = draw(st.integers(1, num_stages - 1))
    return Schedule.preset(
        draw(st.sampled_from(PRESETS)),
        num_stages=num_stages,
        num_frozen=num_frozen,
        rank_of_stage=placement(num_stages, num_frozen, draw(st.booleans())),
        recompute=draw(st.booleans()),
        data_parallel=draw(st.booleans()),
    )


@draws(60)
@given(frozen_schedules(), st.data())
def test_programs_are_proved(schedule: Schedule, data: st.DataObject):
    """For any p, number of frozen stages and m: nothing is saved in front, and nothing of gradients happens there."""
    fewest = schedule.num_stages - schedule.num_frozen if schedule.weights.delay else 1
    batches = tuple(data.draw(st.lists(st.integers(fewest, fewest + 5), min_size=1, max_size=4)))
    program = schedule.build(batches, first_batch=data.draw(st.integers(0, 3)))
    bounds = schedule.max_saved_microbatches(batches), schedule.max_saved_on_rank(batches)
    report = check(program, max_saved=bounds[0], max_saved_on_rank=bounds[1])
    assert report.peak_saved_microbatches[: schedule.num_frozen] == (0,) * schedule.num_frozen
    assert report.live_versions[: schedule.num_frozen] == (1,) * schedule.num_frozen
    frozen = [each for row in program.rows for each in row if each.stage < schedule.num_frozen]
    assert {each.kind for each in frozen if each.microbatch is not None} <= {Kind.FORWARD, Kind.SEND_F, Kind.RECV_F}
    for rank, row in enumerate(program.rows):
        if program.is_frozen(rank):
            assert not {Kind.REDUCE_GRAD, Kind.REDUCE_EMBED} & {each.kind for each in row}
    check_periodic(schedule.build_periodic(batches[0]))
    assert Program.from_csv(program.to_csv()) == program
    simulate(program, Costs(forward_bytes=1.0, bandwidth=4.0, latency=0.1))


@st.composite
def frozen_relays(draw: st.DrawFn) -> Schedule:
    num_ranks, num_virtual_stages = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    return Schedule.preset(
        "l2l",
        num_stages=num_ranks * num_virtual_stages,
        num_virtual_stages=num_virtual_stages,
        num_frozen=draw(st.integers(1, num_ranks * (num_virtual_stages - 1))),
        residency=Residency(
            draw(st.integers(1, 3)),
            draw(st.sampled_from(["eager", "deferred"])),
            draw(st.sampled_from(["device", "host"])),
        ),
        data_parallel=draw(st.booleans()),
    )


@draws(40)
@given(frozen_relays(), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 3))
def test_a_relay_fetches_its_frozen_stages_alone(schedule: Schedule, batches: list[int], first_batch: int):
    """A frozen stage is fetched once a batch and computes forwards; nothing of it is saved, stored or updated."""
    program = schedule.build(tuple(batches), first_batch=first_batch)
    bounds = schedule.max_saved_microbatches(batches), schedule.max_saved_on_rank(batches)
    report = check(program, max_saved=bounds[0], max_saved_on_rank=bounds[1])
    assert report.peak_saved_microbatches[: schedule.num_frozen] == (0,) * schedule.num_frozen
    of_rank = {Kind.REDUCE_NORM, Kind.STEP}  # written at the lowest stage of the rank
    for stage in range(schedule.num_frozen):
        kinds = [each.kind for row in program.rows for each in row if each.stage == stage and each.kind not in of_rank]
        assert set(kinds) <= {Kind.FETCH, Kind.FREE, Kind.FORWARD, Kind.SEND_F, Kind.RECV_F}
        assert kinds.count(Kind.FETCH) == kinds.count(Kind.FREE) == len(batches)
        assert kinds.count(Kind.FORWARD) == sum(batches)
    if schedule.num_ranks == 1:
        left = schedule.num_stages - schedule.num_frozen
        num_fetched = schedule.num_stages + left - min(schedule.residency.stages, left)
        assert [each.kind for each in program.rows[0]].count(Kind.FETCH) == len(batches) * num_fetched
    check_periodic(schedule.build_periodic(batches[0]))
    assert Program.from_csv(program.to_csv()) == program
    simulate(program, Costs(forward_bytes=1.0, bandwidth=4.0, latency=0.1, fetch=1.0, store=0.5, update=2.0))


def test_every_single_mutation_of_a_relay_is_rejected():
    schedule = Schedule.preset("l2l", num_stages=4, num_virtual_stages=2, num_frozen=2, data_parallel=True)
    assert_every_mutation_is_rejected(schedule.build((3, 2)))


def test_a_relay_trains_a_stage_on_each_rank():
    with pytest.raises(ValueError, match="trained stage on each of 2 ranks, and 3 of 4 stages are frozen; freeze 2 at"):
        Schedule.preset("l2l", num_stages=4, num_virtual_stages=2, num_frozen=3)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("together", [False, True])
def test_every_single_mutation_is_rejected(name: str, together: bool):
    assert_every_mutation_is_rejected(_schedule(name, together, recompute=True).build((4, 3)))


def _schedule(name: str = "flush", together: bool = False, **choices) -> Schedule:
    return Schedule.preset(
        name, num_stages=4, num_frozen=2, rank_of_stage=placement(4, 2, together), data_parallel=True, **choices
    )


def test_what_a_frozen_stage_cannot_have_is_refused():
    """A backward, and a gradient over the border."""
    program = _schedule().build((4,))
    for rank, wrong, reason in (
        (1, Instruction(Kind.BACKWARD, 1, 0, 0), "stage 1 gets no gradients, so it has forwards only"),
        (2, Instruction(Kind.SEND_B, 2, 0), "stage 2 has no neighbour that takes that gradient"),
        (0, Instruction(Kind.REDUCE_GRAD, 0, version=1), "the chain of stage 0 has no REDUCE_GRAD"),
    ):
        rows = [list(row) for row in program.rows]
        rows[rank].append(wrong)
        with pytest.raises(ProgramError, match=reason):
            check(program.with_rows(tuple(map(tuple, rows))))


def test_a_batch_does_not_wait_for_the_prefix_to_fill_again():
    """The active stages drain after each batch; what is in front of them has gone on meanwhile."""
    active = Schedule.preset("flush", num_stages=2)
    costs = Costs(forward=1.0, backward=2.0)
    alone = simulate(active.build((4,) * 5), costs).makespan
    assert simulate(_schedule().build((4,) * 5), costs).makespan == pytest.approx(alone + 2.0)


def test_a_prefix_does_not_run_away():
    """With a slow end, the first stage has at most p-s+1 tensors unread, whatever the number of microbatches."""
    schedule = _schedule()
    timeline = simulate(schedule.build((64,)), Costs(forward=[0.01, 0.01, 1.0, 1.0], backward=1.0))
    starts = {
        (span.instruction.kind, span.instruction.stage, span.instruction.microbatch): span.start
        for span in timeline.spans
    }
    for stage in (0, 1):
        most = schedule.graph.most_unread(stage)
        assert most == schedule.num_stages - stage + 1
        for microbatch in range(most + 2, 64):
            posted = starts[Kind.FORWARD, stage + 1, microbatch - most - 2]
            assert starts[Kind.FORWARD, stage, microbatch] >= posted - 1e-9


@pytest.mark.parametrize("late", [3, 4])
def test_waiting_for_what_is_unread_may_be_a_deadlock(late: int):
    """The norm of a batch is posted behind some forwards of the next one. The last stage waits for it before it posts
    the receives of these, of which so many may be unread.
    """
    schedule = Schedule.preset("flush", num_stages=2, num_frozen=1)
    assert schedule.graph.most_unread(0) == 3
    program = schedule.build((4, 8))
    row = list(program.rows[0])
    norm = next(each for each in row if each.kind is Kind.REDUCE_NORM)
    row.remove(norm)
    sends = [position for position, each in enumerate(row) if each.kind is Kind.SEND_F]
    row.insert(sends[4 + late - 1] + 1, norm)
    mutant = program.with_rows((tuple(row), program.rows[1]))
    if late == 3:
        check(mutant)
        simulate(mutant, Costs())
    else:
        with pytest.raises(
            ProgramError, match="rank 0 waits at 0SEND_F7, with 3 sent and unread, for 1RECV_F4 of rank 1"
        ):
            check(mutant)
        with pytest.raises(SimulationError):
            simulate(mutant, Costs())


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"order": "interleaved", "num_virtual_stages": 2}, "interleaved has several trained stages on each rank"),
        ({"weights": "stash"}, "is for trained stages, each of which steps by itself"),
        (
            {"residency": Residency(), "recompute": True},
            "weights on the host come and go .* only in a relay, and the",
        ),
        ({"weights": "2bw-provisional"}, "predict only for trained stages"),
        ({"tied_embeddings": True}, "would freeze the head with the input"),
        ({"num_frozen": 4}, "4 of 4 stages cannot be frozen: one has to be trained; give 0 to 3"),
        (
            {"edges": (Edge(0, 1, gradient=False), Edge(0, 2, gradient=False), Edge(1, 2, gradient=False), Edge(2, 3))},
            "a graph of stages states for each edge whether gradients travel over it",
        ),
        ({"rank_of_stage": (0, 0, 1, 2)}, "give each rank one frozen stage, one trained stage"),
    ],
)
def test_what_does_not_go_with_a_frozen_prefix_is_refused(choices, reason):
    with pytest.raises(ValueError, match=reason):
        Schedule(**{"order": "1f1b", "weights": "flush", "num_stages": 4, "num_frozen": 2, **choices})


def test_reports_come_a_batch_late_where_a_rank_is_frozen():
    assert _schedule().report_lag == 1 and _schedule("2bw").report_lag == 1
    assert Schedule.preset("flush", num_stages=2, num_frozen=1, rank_of_stage=(0, 0)).report_lag == 0
    assert replace(_schedule(), num_frozen=0, edges=()).report_lag == weight_policy("flush").report_lag(4)
