"""FIFO hardware queues: which programs run to their end however their streams share them, and which do not."""

import dataclasses
import time
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import ProgramError, check
from megatron.pipeline.check.device_queues import QueueExecution
from megatron.pipeline.check.hardware_queues import (
    NOT_PROVED,
    PROVED,
    launches_beside,
    may_deadlock,
    num_streams,
    prove_hardware_queues,
)
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.program import Program
from tests.draws import draws
from tests.pipeline.check.examples import cases, written
from tests.pipeline.check.queue_oracle import MANY, build, count_deadlocks, ends, lowered, refused


def without_norm(program: Program) -> Program:
    """The program with a chain of REDUCE_GRAD and STEP."""
    rows = tuple(tuple(each for each in row if each.kind is not Kind.REDUCE_NORM) for row in program.rows)
    return dataclasses.replace(program, rows=rows, global_norm=False)


def runs(program: Program, early: tuple[bool, ...], *, shares: bool) -> bool:
    """Whether one stage at t = d = 2 runs to its end, where the ranks launch their reductions early or late."""
    ranks = lowered(program, tensor=2, data=2)
    is_early = dict(zip(product((0, 1), (0, 1)), early, strict=True))
    return QueueExecution(
        ranks, tensor=2, data=2, shares=[shares], is_early=lambda place: is_early[place.tensor, place.data]
    ).run()


# --- 2bw

SHARDED = {"distributed_optimizer": True}


def test_two_of_sixteen_interleavings_of_gradient_reductions_deadlock():
    """One stage, t = d = 2, one queue, 2bw: where ranks on a diagonal reduce first and the others compute first."""
    program = without_norm(build("2bw", 1, 4))
    assert count_deadlocks(program, tensor=2, data=2, num_queues=1) == (2, 16)
    for early in product((False, True), repeat=4):
        is_diagonal = early in ((True, False, False, True), (False, True, True, False))
        assert runs(program, early, shares=True) == (not is_diagonal)


@pytest.mark.parametrize(
    ("num_ranks", "tensor", "data", "options", "found"),
    [
        *((1, 2, 2, {}, (12, 16)), (1, 2, 1, {}, (2, 4)), (2, 1, 1, {}, (2, 4)), (2, 1, 2, {}, (12, 16))),
        *((1, 1, 2, {}, (0, 4)), (1, 1, 2, SHARDED, (2, 4)), (1, 2, 2, SHARDED, (14, 16))),
    ],
)
def test_the_norm_deadlocks_more_of_them(num_ranks, tensor, data, options, found):
    """The norm is reduced over tensor ranks and stages, so with the whole chain two tensor ranks, or two stages, are
    enough. Only replicas alone have nothing to wait for in their computations, but for the distributed optimizer's
    all-gather in STEP, which is a collective of the main thread.
    """
    program = build("2bw", num_ranks, 4)
    assert count_deadlocks(program, tensor=tensor, data=data, num_queues=1, **options) == found
    assert check(program).versioned


@pytest.mark.parametrize("job", list(product((1, 2), (1, 2), (1, 2), (False, True))), ids=str)
@pytest.mark.parametrize("name", ["flush", "2bw", "pipedream"])
def test_what_may_deadlock_does(name, job):
    """The rule that needs no search says of small jobs what the search finds."""
    num_ranks, tensor, data, distributed_optimizer = job
    degrees = {"tensor": tensor, "data": data, "distributed_optimizer": distributed_optimizer}
    num_microbatches, num_batches = (1, 8) if name == "pipedream" else (4, 3)
    program = build(name, num_ranks, num_microbatches, num_batches=num_batches)
    num_deadlocks, _ = count_deadlocks(program, num_queues=1, **degrees)
    assert may_deadlock(program, **degrees) == (num_deadlocks > 0)


def test_a_deadlock_is_told():
    """Rank, operation, stream, what is at the head of the queue, and who has not joined."""
    error = refused(build("2bw", 2, 4), num_queues=1)
    assert "deadlock with one hardware queue for 6 streams: rank 0 (tensor 0, data 0) has 0SEND_F5" in error.reason
    assert "at the head of a queue, which waits for 1REDUCE_NORM@1 (chain's world group), which rank 0" in error.reason
    assert str(error.instruction) == "0SEND_F5" and str(error).splitlines()[1].startswith("rank 0: ...")


def test_fewer_queues_than_streams_may_all_be_one():
    """Which streams share is the driver's choice: 10 queues for 11 streams are refused, 11 are proved."""
    program = build("2bw", 4, 8)
    error = refused(program, tensor=2, data=2, num_queues=10)
    assert "with 10 hardware queues for 11 streams, any of which may share one" in error.reason
    assert prove_hardware_queues(program, tensor=2, data=2, num_queues=11).verdict == PROVED


def test_nothing_found_is_not_a_proof():
    """Replicas of one stage: no search found a deadlock, and the report does not say proved."""
    report = prove_hardware_queues(build("2bw", 1, 4), data=2, num_queues=1)
    assert (report.verdict, report.num_interleavings) == (NOT_PROVED, 4)


# --- the other schedules


@st.composite
def drained_programs(draw: st.DrawFn) -> Program:
    name, p = draw(st.sampled_from(["gpipe", "flush", "interleaved"])), draw(st.integers(1, 5))
    flags = {"tied_embeddings": draw(st.booleans()), "recompute": draw(st.booleans())}
    m = draw(st.integers(1, 9))
    if name == "interleaved":
        flags["num_virtual_stages"] = draw(st.integers(2, 3))
        m = p * draw(st.integers(1, 3))
    if name == "flush":
        flags["extra_warmup"] = draw(st.booleans())
    return build(name, p, m, num_batches=2, **flags)


@draws(40)
@given(drained_programs(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6))
def test_schedules_that_drain_need_one_queue(program, tensor, data, seed):
    """gpipe, flush and interleaved: the main thread waits while the chain launches, so one queue is proved, receives
    that are posted ahead included; and random executions of all ranks agree.
    """
    report = prove_hardware_queues(program, tensor=tensor, data=data, num_queues=1, distributed_optimizer=data > 1)
    assert report.verdict == PROVED
    assert not launches_beside(program)
    if program.num_instructions * tensor * data < 300:
        ranks = lowered(program, tensor=tensor, data=data, distributed_optimizer=data > 1)
        assert ends(ranks, tensor=tensor, data=data, one_queue=True, seed=seed)


@draws(40)
@given(cases(max_stages=5, max_batches=3), st.booleans(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6))
def test_every_schedule_runs_on_separate_queues(case, balance, tensor, data, seed):
    """gpipe, flush, 2bw, pipedream and interleaved, with and without balance, at any degrees; and random executions of
    all ranks agree.
    """
    schedule, program = case
    if balance and schedule.order == "1f1b" and not schedule.weights.updates_alone:
        balanced = dataclasses.replace(schedule, balance=True)
        if all(map(balanced.accepts, program.batches)):  # smaller batches than what is in flight are not balanced
            schedule, program = balanced, balanced.build(program.batches)
    data = data if program.data_parallel else 1
    report = prove_hardware_queues(program, tensor=tensor, data=data, num_queues=MANY, distributed_optimizer=data > 1)
    assert (report.verdict, report.num_interleavings) == (PROVED, 1)
    if program.num_instructions * tensor * data < 300:
        ranks = lowered(program, tensor=tensor, data=data, distributed_optimizer=data > 1)
        assert ends(ranks, tensor=tensor, data=data, one_queue=False, seed=seed)


@pytest.mark.parametrize(("name", "num_stages", "tensor"), [("2bw", 2, 2), ("bpipe", 4, 1)])
def test_random_executions_find_the_deadlock_too(name, num_stages, tensor):
    """In one queue: among executions with random speeds, which know nothing of early and late, some deadlock."""
    ranks = lowered(build(name, num_stages, num_stages), tensor=tensor)
    found = [ends(ranks, tensor=tensor, data=1, one_queue=True, seed=seed) for seed in range(40)]
    assert not all(found)


@pytest.mark.parametrize("name", ["2bw", "pipedream", "bpipe"])
def test_schedules_that_launch_beside_computations(name):
    """2bw and pipedream have reductions there, bpipe moves."""
    assert launches_beside(build(name, 4, 1 if name == "pipedream" else 8, num_batches=6, data_parallel=False))


# --- programs of one's own


AHEAD = (  # both gradients are asked for before the second activation is sent
    "0F0@0 0SEND_F0 0F1@0 0RECV_B0 0RECV_B1 0SEND_F1 0B0@0 0B1@0 0REDUCE_NORM@1 0STEP@1",
    "1RECV_F0 1F0@0 1RECV_F1 1F1@0 1B0@0 1SEND_B0 1B1@0 1SEND_B1 1REDUCE_NORM@1 1STEP@1",
)


def test_receives_too_far_ahead_need_separate_queues():
    """A program that `check` accepts and one thread launches: a receive that stands behind another one of its link
    blocks the send that both wait for.
    """
    program = written(*AHEAD, batches=(2,))
    check(program)
    assert "0RECV_B1 (gradients 1-0) at the head of a queue" in refused(program, num_queues=1).reason
    assert prove_hardware_queues(program, num_queues=MANY).verdict == PROVED


def test_a_true_deadlock_is_refused_on_any_queues():
    """Each stage waits for the other's tensor first."""
    first, second = AHEAD
    first = first.replace("0RECV_B0 0RECV_B1 0SEND_F1 0B0@0", "0RECV_B0 0B0@0 0SEND_F1 0RECV_B1")
    program = written(first, second, batches=(2,))
    with pytest.raises(ProgramError):
        check(program)
    for num_queues in (1, MANY):
        assert "0B0@0 (arrivals) at the head" in refused(program, num_queues=num_queues).reason


def test_a_chain_that_never_comes_is_told():
    """A rank that has not posted its norm holds up the others' STEP; the hosts that wait are named."""
    first, second = (row.replace(" 1REDUCE_NORM@1", "") for row in AHEAD)
    program = written(first, second, batches=(2,))
    reason = refused(program, num_queues=MANY).reason
    assert "chain's world group" in reason and "deadlock even with a hardware queue for each" in reason


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"num_queues": 0}, "cannot have 0 hardware queues"),
        ({"num_queues": 1, "tensor": 0}, "tensor parallel degree cannot be 0"),
        ({"num_queues": 1, "data": 2}, "no REDUCE_GRAD for 2 data parallel replicas"),
    ],
)
def test_what_cannot_be_asked(job, message):
    """Degrees and queues below 1, and replicas that reduce no gradients, are refused."""
    with pytest.raises(ValueError, match=message):
        prove_hardware_queues(build("flush", 2, 2, data_parallel=False), **job)


def test_a_compute_only_program_is_refused():
    """It does not say where its transfers stand."""
    program = written("0F0 0B0", "1F0 1B0")
    with pytest.raises(ValueError, match="does not say what is launched"):
        prove_hardware_queues(program, num_queues=1)


# --- streams, and time


@pytest.mark.parametrize(
    ("rank", "tensor", "data", "options", "expected"),
    [
        (0, 1, 1, {}, 6),  # compute, activations, gradients, arrivals, chain, world
        (1, 1, 1, {}, 8),  # two links more
        (1, 2, 1, {}, 10),  # the tensor group of computations, and of the chain
        (1, 2, 2, {}, 11),  # the data group of the chain
        (1, 2, 2, {"distributed_optimizer": True}, 12),
    ],
)
def test_streams_are_counted(rank, tensor, data, options, expected):
    """Every communicator has one, beside compute's, the arrivals' and the chain's."""
    program = build("2bw", 4, 4)
    assert num_streams(program, tensor=tensor, data=data, **options)[rank] == expected
    report = prove_hardware_queues(program, tensor=tensor, data=data, num_queues=MANY, **options)
    assert report.num_streams[rank] == expected


@pytest.mark.alone
def test_large_jobs_take_a_moment():
    """p = 8, t = d = 2, m = 16, proved and refuted; and in the number of tensor and data ranks it does not grow."""
    program = build("2bw", 8, 16)
    start = time.process_time()
    assert prove_hardware_queues(program, tensor=2, data=2, num_queues=MANY).verdict == PROVED
    assert prove_hardware_queues(program, tensor=8, data=512, num_queues=MANY).verdict == PROVED
    refused(program, tensor=2, data=2, num_queues=1)
    refused(program, tensor=8, data=512, num_queues=1)
    assert time.process_time() - start < 2
