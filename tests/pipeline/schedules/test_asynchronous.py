"""FTPipe's order and weights: any graph of stages, proved for any number of batches, with little idle time."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import ProgramError, check, check_periodic
from megatron.pipeline.program.edges import Edge, stages_by_rank
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from tests.draws import draws
from tests.pipeline.runtime.graph_cases import random_shape

PREDICTED = {"weights": "stale-predicted", "recompute": True}
PROVISIONAL = {"weights": "stale-provisional", "recompute": True}
EDGES = (Edge(0, 1), Edge(0, 3), Edge(1, 2), Edge(2, 3))


def stale(num_stages=4, **choices) -> Schedule:
    return Schedule(**{"order": "async", "weights": "stale", "num_stages": num_stages} | choices)


@st.composite
def schedules(draw):
    num_stages = draw(st.integers(2, 8))
    num_ranks = draw(st.integers(1, num_stages))
    seed = draw(st.integers(0, 10_000))
    shape = random_shape(seed, num_stages=num_stages, num_ranks=num_ranks)
    choose = random.Random(seed)
    forward = [choose.uniform(0.5, 1.5) for _ in range(num_stages)]
    return stale(
        num_stages, rank_of_stage=shape.rank_of_stage, edges=shape.edges,
        **draw(st.sampled_from([{"recompute": False}, {"recompute": True}, PREDICTED, PROVISIONAL])),
        work=tuple((each, 2 * each) for each in forward) if draw(st.booleans()) else (),
    )  # fmt: skip


@draws(30)
@given(schedules(), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_every_graph_is_proved_and_cut_where_a_run_may_stop(schedule, sizes):
    """One live version, and another one where there is any ahead of it;
    the segments of a stream are the program's; and so for any number of batches of a size."""
    program = schedule.build(sizes)
    report = check(
        program, max_saved=schedule.max_saved_microbatches(sizes), max_saved_on_rank=schedule.max_saved_on_rank(sizes)
    )
    ahead = Counter(each.stage for row in program.rows for each in row if each.ahead)
    assert report.live_versions == tuple(1 + (stage in ahead) for stage in range(schedule.num_stages))
    assert Program.from_csv(program.to_csv()) == program
    simulate(program, Costs(step=0.1, latency=0.2))
    check_periodic(schedule.build_periodic(sizes[0]))
    stream, rows = schedule.stream(), [[] for _ in program.rows]
    for piece in [*map(stream.start_batch, sizes), stream.drain()]:
        for row, more in zip(rows, piece, strict=True):
            row += more
    assert tuple(map(tuple, rows)) == program.rows


def test_versions_are_those_of_the_paper():
    """Table 1's last row, with batches of 2: a forward as many microbatches behind as its stage is deep, recompute and
    backward at what all batches before have made.
    """
    schedule = stale(edges=EDGES, rank_of_stage=(0, 1, 0, 1), recompute=True)
    program = schedule.build((2, 2, 2), first_batch=5, first_microbatch=10)
    found = {(each.kind, each.stage, each.microbatch): each.version for row in program.rows for each in row}
    for stage, depth in enumerate((3, 2, 1, 0)):
        for number in range(6):
            behind = 5 + max(0, number - depth) // 2
            assert found[Kind.FORWARD, stage, 10 + number] == behind
            assert found[Kind.BACKWARD, stage, 10 + number] == 5 + number // 2
            assert found.get((Kind.RECOMPUTE, stage, 10 + number)) == (5 + number // 2 if depth else None)


def test_each_stage_steps_by_itself_and_the_norm_comes_last():
    """A rank's stages are at different batches; the report waits for the last of them."""
    program = stale(edges=EDGES, rank_of_stage=(0, 1, 0, 1)).build((1,) * 6)
    for rank, row in enumerate(program.rows):
        for version in range(1, 7):
            steps = [at for at, each in enumerate(row) if (each.kind, each.version) == (Kind.STEP, version)]
            (norm,) = (at for at, each in enumerate(row) if (each.kind, each.version) == (Kind.REDUCE_NORM, version))
            assert [row[at].stage for at in steps] == [rank + 2, rank] and norm > steps[-1]
            assert row[norm].stage == rank


def replaced(program, old, new):
    rows = tuple(tuple(new if str(each) == old else each for each in row) for row in program.rows)
    assert rows != program.rows
    return program.with_rows(tuple(tuple(each for each in row if each is not None) for row in rows))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0F4@1", "0F4@4", "stale runs batch 4 here with version 1"),
        ("2R2@2", "2R2@1", "stale computes this of batch 2 with version 2"),
        ("2B2@2", "2B2@0", "stale computes this of batch 2 with version 2"),
        ("2STEP@3", None, "is missing|stands before it|each batch has one|the newest version at this stage is 2"),
        ("2STEP@3", "0STEP@3", "each batch has one, in order|stands before it|has backwards to come"),
        ("0REDUCE_NORM@2", "2REDUCE_NORM@2", "stands at the lowest, stage 0"),
    ],
)
def test_other_weights_are_rejected(old, new, message):
    program = stale(edges=EDGES, rank_of_stage=(0, 1, 0, 1), recompute=True).build((1,) * 6)
    wrong = replaced(program, old, None if new is None else Instruction.parse(new))
    with pytest.raises(ProgramError, match=message):
        check(wrong)


def predicted(batches=(1,) * 6):
    return stale(edges=EDGES, rank_of_stage=(0, 1, 0, 1), **PREDICTED).build(batches)


def test_horizons_are_the_steps_between_a_forward_and_its_backward():
    """Also with accumulation; else the program is that of stale, whose text has none."""
    for batches in ((1,) * 6, (2,) * 4, (3, 1, 2), (9,)):
        program, plain = (
            predicted(batches),
            stale(edges=EDGES, rank_of_stage=(0, 1, 0, 1), recompute=True).build(batches),
        )
        found = [
            (each, other)
            for rows in zip(program.rows, plain.rows, strict=True)
            for each, other in zip(*rows, strict=True)
        ]
        assert all(replace(each, horizon=0) == other for each, other in found)
        assert "+" not in plain.to_csv()
        for each, _ in found:
            if each.kind is Kind.FORWARD:
                assert each.horizon == program.batch_of(each.microbatch) - each.version
                assert not (each.horizon and program.graph.depth(each.stage) == 0)
        assert any(each.horizon for each, _ in found) == (len(batches) > 1)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("0F4@1+3", "0F4@1", "its backward uses version 4, so it has to predict 3 ahead, not 0"),
        ("0F4@1+3", "0F4@1+2", "its backward uses version 4, so it has to predict 3 ahead, not 2"),
        ("0F4@1+3", "0F4@1+4", "its backward uses version 4, so it has to predict 3 ahead, not 4"),
        ("3F2@2", "3F2@2+1", "its backward uses version 2, so it has to predict 0 ahead, not 1"),
        ("0F4@1+3", "0F4@2+2", "stale-predicted runs batch 4 here with version 1"),
    ],
)
def test_another_horizon_is_rejected(old, new, reason):
    """At the instruction, with the reason; each forward off by one, too."""
    program = predicted()
    with pytest.raises(ProgramError) as caught:
        check(replaced(program, old, Instruction.parse(new)))
    assert caught.value.reason == reason
    assert str(program.rows[caught.value.rank][caught.value.position]) == old


def test_every_horizon_that_is_off_is_rejected():
    program = predicted((2, 1, 3, 2))
    for row in program.rows:
        for each in row:
            ahead = [each.horizon - 1, each.horizon + 1] if each.kind is Kind.FORWARD else [1]
            for horizon in ahead if each.horizon or each.kind is not Kind.FORWARD else ahead[1:]:
                with pytest.raises(ProgramError, match="predict"):
                    check(replaced(program, str(each), replace(each, horizon=horizon)))


def test_only_a_policy_that_looks_ahead_has_horizons():
    """Not stale's, not a forward that nobody recomputes, and not an evaluation."""
    program = stale(edges=EDGES, rank_of_stage=(0, 1, 0, 1), recompute=True).build((1,) * 6)
    with pytest.raises(ProgramError, match="weights stale are not predicted ahead"):
        check(replaced(program, "0F4@1", Instruction.parse("0F4@1+3")))
    kept = predicted()
    rows = tuple(tuple(each for each in row if (each.kind, each.stage) != (Kind.RECOMPUTE, 0)) for row in kept.rows)
    with pytest.raises(ProgramError, match=r"0F1@0\+1: predicted weights are gone before its backward"):
        check(replace(kept, rows=rows, not_recomputed=(0, 3)))
    evaluation = stale(edges=EDGES, rank_of_stage=(0, 1, 0, 1), **PREDICTED).build_evaluation(1, version=2)
    check(evaluation)
    with pytest.raises(ProgramError, match="a program that evaluates uses weights as they are"):
        check(replaced(evaluation, "0F0@2", Instruction.parse("0F0@2+1")))


def provisional(batches=(4,) * 3):
    return stale(edges=EDGES, rank_of_stage=(0, 1, 0, 1), **PROVISIONAL).build(batches)


@pytest.mark.parametrize("batches", [(1,) * 6, (2,) * 4, (4,) * 3, (3, 1, 2), (9,)], ids=str)
def test_provisional_steps_take_what_no_step_has_taken(batches):
    """The replay's rule holds: at depth k, microbatch i finds those of the batch of microbatch i - k that come before.
    Else the program is that of stale, and with batches of one microbatch it is that as a whole.
    """
    program = provisional(batches)
    plain = stale(edges=EDGES, rank_of_stage=(0, 1, 0, 1), recompute=True).build(batches)
    numbers = []
    for rows in zip(program.rows, plain.rows, strict=True):
        for each, other in zip(*rows, strict=True):
            assert replace(each, unstepped=0) == other
            if each.kind is Kind.FORWARD:
                behind = max(0, each.microbatch - program.graph.depth(each.stage))
                is_behind = each.version < program.batch_of(each.microbatch)
                assert each.unstepped == is_behind * (behind - sum(batches[: program.batch_of(behind)]))
                numbers.append(each.unstepped)
    assert any(numbers) == (max(batches) > 1 and len(batches) > 1)
    assert max(numbers) < max(batches)


def test_a_row_of_provisional_steps():
    """As it is written: the first forward behind a STEP has nothing to step with."""
    forwards = [str(each) for row in provisional().rows for each in row if (each.kind, each.stage) == (Kind.FORWARD, 0)]
    assert " ".join(forwards) == (
        "0F0@0 0F1@0 0F2@0 0F3@0 0F4@0~1 0F5@0~2 0F6@0~3 0F7@1 0F8@1~1 0F9@1~2 0F10@1~3 0F11@2"
    )


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("0F6@0~3", "0F6@0", "it has to step provisionally with the gradients of 3 microbatches, not 0"),
        ("0F6@0~3", "0F6@0~2", "it has to step provisionally with the gradients of 3 microbatches, not 2"),
        ("0F7@1", "0F7@1~1", "it has to step provisionally with the gradients of 0 microbatches, not 1"),
        ("0F6@0~3", "0F6@0+1", "weights stale-provisional are not predicted ahead"),
        ("0F6@0~3", "0F6@1~3", "stale-provisional runs batch 1 here with version 0"),
        ("0R4@1", "0R4@1~1", "only a forward is stepped provisionally ahead, and R uses weights as they are"),
        ("0B4@1", "0B4@1~1", "only a forward is stepped provisionally ahead, and B uses weights as they are"),
    ],
)
def test_another_provisional_step_is_rejected(old, new, reason):
    kind = Kind(new[1])
    ahead = {"unstepped": 1} if kind is not Kind.FORWARD else {}
    program = provisional()
    with pytest.raises(ProgramError) as caught:
        check(
            replaced(
                program,
                old,
                replace(Instruction.parse(new.split("~")[0]), **ahead) if ahead else Instruction.parse(new),
            )
        )
    assert caught.value.reason == reason
    assert str(program.rows[caught.value.rank][caught.value.position]) == old


def test_every_number_that_is_off_is_rejected():
    program = provisional((2, 1, 3, 2))
    for row in program.rows:
        for each in row:
            numbers = [each.unstepped - 1, each.unstepped + 1] if each.kind is Kind.FORWARD else [1]
            for number in numbers if each.unstepped or each.kind is not Kind.FORWARD else numbers[1:]:
                with pytest.raises(ProgramError, match=r"step(ped)? provisionally"):
                    check(replaced(program, str(each), replace(each, unstepped=number)))


def test_a_forward_that_comes_earlier_finds_less_and_is_rejected():
    """Though its number says what it finds: at its depth there is one, and other stages count on that."""
    program = stale(1 + 1, **PROVISIONAL, rank_of_stage=(0, 0)).build((3,) * 3)
    ((row,), found) = (program.rows, 0)
    for at in range(len(row)):
        each = row[at]
        if each.kind is not Kind.FORWARD or each.stage or not each.unstepped:
            continue
        back = next(place for place in reversed(range(at)) if (row[place].kind, row[place].stage) == (Kind.BACKWARD, 0))
        begin = back - (row[back - 1].kind is Kind.RECOMPUTE)
        moved = [*row[:begin], replace(each, unstepped=each.unstepped - 1), *row[begin:at], *row[at + 1 :]]
        with pytest.raises(ProgramError, match=r"no STEP has taken the gradients .* at depth 1 it has to be"):
            check(program.with_rows((tuple(moved),)))
        found += 1
    assert found == 4 - 2


def test_a_provisional_step_of_other_microbatches_is_rejected():
    """As many, but not the first ones of the batch, which other stages count on."""
    program = stale(1 + 1, **PROVISIONAL, rank_of_stage=(0, 0)).build((3,) * 2)
    check(program)
    exchanged = {1: 2, 2: 1}
    rows = tuple(
        tuple(replace(each, microbatch=exchanged.get(each.microbatch, each.microbatch)) for each in row)
        for row in program.rows
    )
    with pytest.raises(ProgramError, match=r"have to be of microbatches before 2 here, and .* of 2 ") as error:
        check(program.with_rows(rows))
    assert error.value.instruction.ahead


def test_only_a_policy_with_provisional_steps_has_them():
    with pytest.raises(ProgramError, match=r"weights stale-predicted are not stepped provisionally ahead"):
        check(replaced(predicted(), "0F4@1+3", Instruction.parse("0F4@1~1")))
    kept = provisional()
    rows = tuple(tuple(each for each in row if (each.kind, each.stage) != (Kind.RECOMPUTE, 0)) for row in kept.rows)
    with pytest.raises(ProgramError, match=r"0F4@0~1: provisional weights are gone before its backward"):
        check(replace(kept, rows=rows, not_recomputed=(0, 3)))
    evaluation = stale(edges=EDGES, rank_of_stage=(0, 1, 0, 1), **PROVISIONAL).build_evaluation(1, version=2)
    check(evaluation)
    with pytest.raises(ProgramError, match=r"a program that evaluates uses weights as they are"):
        check(replaced(evaluation, "0F0@2", Instruction.parse("0F0@2~1")))


def test_a_step_between_a_recompute_and_its_backward_is_rejected():
    program = stale(edges=EDGES, rank_of_stage=(0, 1, 0, 1), recompute=True).build((2,) * 3)
    row = [each for each in program.rows[0] if str(each) != "2STEP@1"]
    row.insert(row.index(Instruction.parse("2R2@1")) + 1, Instruction.parse("2STEP@1"))
    with pytest.raises(ProgramError, match=r"2F\d@1: version 1 does not exist yet|2R2@1: the newest version .* is 0"):
        check(program.with_rows((tuple(row), program.rows[1])))


@pytest.mark.full
@pytest.mark.parametrize(("num_ranks", "per_rank", "most"), [(4, 1, 1.001), (4, 2, 1.03), (8, 2, 1.03)])
def test_the_busiest_rank_is_hardly_idle(num_ranks, per_rank, most):
    """Random graphs, placements and work: seconds of a microbatch over those that the busiest rank computes."""
    found = []
    for seed in range(12):
        choose, num_stages = random.Random(seed), num_ranks * per_rank
        edges = random_shape(seed, num_stages=num_stages, num_ranks=num_ranks).edges
        places = choose.sample([*range(num_ranks)] * per_rank, num_stages)
        forward = [choose.uniform(0.5, 1.5) for _ in range(num_stages)]
        schedule = stale(
            num_stages, rank_of_stage=tuple(places), edges=edges,
            work=tuple((each, 2 * each) for each in forward),
        )  # fmt: skip
        costs = Costs(forward=forward, backward=[2 * each for each in forward])
        short, long = (simulate(schedule.build((1,) * count), costs).makespan for count in (100, 200))
        busiest = max(3 * sum(forward[stage] for stage in stages) for stages in stages_by_rank(places))
        found.append((long - short) / 100 / busiest)
    assert max(found) <= most, found


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"data_parallel": True, "weights": "stale-provisional", "recompute": True},
            "steps with the gradients that its own replica has so far",
        ),
        ({"norm_decides": True}, "every stage steps before the norm of all gradients"),
        ({"tied_embeddings": True}, "cannot share an embedding"),
        ({"order": "interleaved", "num_virtual_stages": 2}, "interleaved drains in every batch"),
        ({"order": "gpipe"}, "gpipe drains in every batch"),
        ({"order": "merged-1f1b"}, "takes one batch at a time"),
        ({"weights": "2bw"}, "async has stages of a rank at different batches, and 2bw updates them together"),
        ({"weights": "flush"}, "async has stages of a rank at different batches, and under flush every batch drains"),
        ({"balance": True}, "balance"),
        ({"weights": "stale-predicted"}, "predicted weights, which are gone before its backward; add recompute"),
        ({"weights": "stale-provisional"}, "provisional weights, which are gone before its backward; add recompute"),
    ],
)
def test_what_does_not_go_together_is_refused(choices, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**{"order": "async", "weights": "stale", "num_stages": 4} | choices)


def test_one_stage_on_each_rank_may_take_turns_without_a_cycle():
    """1F1B keeps the same distance on a chain."""
    program = Schedule(order="1f1b", weights="stale", num_stages=3, recompute=True).build((2, 2, 2))
    assert set(check(program).live_versions) == {1}


def test_the_engine_wants_an_update_for_each_stage():
    with pytest.raises(ValueError, match="under stale each stage steps by itself; give stages of a graph"):
        PipelineEngine(stale(1), [], None)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_no_transfer_is_waited_for_at_a_border(seed):
    """With a microbatch a batch, transfers of a tenth of a forward hold up the busiest rank no more."""
    choose = random.Random(seed)
    forward = [choose.uniform(0.6, 1.4) for _ in range(8)]
    edges = [Edge(stage, stage + 1) for stage in range(7)] + [Edge(stage, stage + 3) for stage in (0, 3)]
    schedule = stale(
        8, rank_of_stage=choose.sample([*range(4)] * 2, 8), edges=tuple(sorted(edges)),
        work=tuple((each, 2 * each) for each in forward),
    )  # fmt: skip
    alone, with_transfers = (
        simulate(schedule.build((1,) * 90), each).makespan - simulate(schedule.build((1,) * 50), each).makespan
        for each in (
            Costs(forward=forward, backward=[2 * each for each in forward], latency=latency) for latency in (0.0, 0.1)
        )
    )
    assert with_transfers <= 1.001 * alone
