"""FIFO hardware queues where activations move: proved with a queue for each stream, and not with one for all."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import ProgramError, check
from megatron.pipeline.check.device_operations import (
    AWAIT,
    BEGIN,
    HOST_WAIT,
    LAUNCH,
    MAIN,
    MEET,
    MOVES,
    NONE,
    RankOperations,
)
from megatron.pipeline.check.device_queues import QueueExecution
from megatron.pipeline.check.hardware_queues import PROVED, prove_hardware_queues
from megatron.pipeline.program.instruction import MOVES as MOVE_WORDS
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.program import Program
from tests.draws import draws
from tests.pipeline.check.examples import with_row
from tests.pipeline.check.queue_oracle import MANY, build, count_deadlocks, ends, lowered, refused


@pytest.mark.parametrize("name", ["flush", "2bw"])
def test_moves_need_queues_of_their_own(name):
    """Moved activations deadlock in one queue in every interleaving, and never with a queue for each stream. Hosts only
    launch, so the circle is on the devices: the evictor's move waits for the acceptor's, which stands behind a forward
    that waits for the evictor's forward, which stands behind the evictor's move.
    """
    program = build(name, 4, 8, balance=True)
    num_deadlocks, num_looked_at = count_deadlocks(program, num_queues=1)
    assert num_deadlocks == num_looked_at
    error = refused(program, num_queues=1)
    assert str(error.instruction) == "0EVICT1" and "its moves thread" not in error.reason
    first, *others = error.reason.split("streams: ")[1].split("; ")
    assert first.endswith("waits for 0EVICT1 (link of the moves), which rank 3 (tensor 0, data 0) has not joined")
    assert [each[:6] for each in others] == ["rank 3", "rank 2", "rank 1"]
    assert others[0].endswith("3F3@0 (arrivals) at the head of a queue, which waits for 3RECV_F3 (activations 2-3), "
                              "which rank 2 (tensor 0, data 0) has not joined")  # fmt: skip
    assert prove_hardware_queues(program, num_queues=MANY).verdict == PROVED


def test_which_interleavings_of_moves_deadlock():
    """One batch in one queue ends in one of four interleavings: where both ends launch moves as early as they can. The
    acceptor requests all of them before its first forward, and would block that one, but its host meets the
    evictor's first. In the second batch it deadlocks there, too: the acceptor's norm is launched before a move.
    """
    ranks, two_batches = (lowered(build("bpipe", 4, 8, num_batches=count)) for count in (1, 2))
    assert [moves_end(ranks, *early) for early in product((False, True), repeat=2)] == [False, False, False, True]
    assert not moves_end(two_batches, True, True)
    for operations in ranks:
        steps = operations.steps[MOVES]
        steps[:] = [step for step in steps if step[0] != MEET]
    assert not moves_end(ranks, True, True)


def moves_end(ranks: list[RankOperations], evictor_is_early: bool, acceptor_is_early: bool) -> bool:
    """Whether four stages, of which the first evicts to the last, come to their end in one queue."""
    is_early = {0: evictor_is_early, 3: acceptor_is_early}
    execution = QueueExecution(
        ranks, tensor=1, data=1, shares=[True] * 4, is_early=lambda place: is_early.get(place.pipeline, False)
    )
    return execution.run()


def test_an_acceptor_that_never_comes_is_told():
    """Where hosts wait: for the chain, for the thread of the moves, for the other host, for what is not requested."""
    program = build("bpipe", 4, 4, num_batches=1)
    row = [each for each in program.rows[3] if each.kind not in MOVE_WORDS]
    late = with_row(program, 3, row + [each for each in program.rows[3] if each.kind in MOVE_WORDS])
    with pytest.raises(ProgramError):
        check(late)
    reason = refused(late, num_queues=MANY).reason
    assert "rank 0 (tensor 0, data 0) has its main thread wait for its moves thread; " in reason
    assert "has its moves thread wait for the host of rank 3 (tensor 0, data 0); " in reason
    assert "rank 3 (tensor 0, data 0) has its moves thread wait until its main thread has posted more; " in reason


def wait_for_readers(ranks: list[RankOperations], program: Program) -> None:
    """Have moves wait for all that may have read from the buffers they are given: each that takes one comes after the
    last backward of a loaded microbatch that is launched before the computing thread waits for the move.
    """
    for operations, row in zip(ranks, program.rows, strict=True):
        loaded = {(each.stage, each.microbatch) for each in row if each.kind is Kind.LOAD}
        readers = {
            at
            for at, each in enumerate(row)
            if each.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and (each.stage, each.microbatch) in loaded
        }
        kinds = [each.kind for each in row if each.kind in MOVE_WORDS]
        last, number, readers_of = NONE, 0, {}
        for action, argument in operations.steps[MAIN]:
            if action == AWAIT and argument[0] == MOVES:
                readers_of.update(dict.fromkeys(range(number, argument[1]), last))
                number = max(number, argument[1])
            elif action == LAUNCH and operations.position[argument] in readers:
                last = argument
        readers_of.update(dict.fromkeys(range(number, len(kinds)), last))
        steps = operations.steps[MOVES]
        for number in reversed(range(len(kinds))):
            if kinds[number] is not Kind.RETURN and readers_of[number] != NONE:
                steps.insert(steps.index((BEGIN, number + 1)) + 1, (HOST_WAIT, readers_of[number]))


@st.composite
def balanced_programs(draw: st.DrawFn) -> Program:
    name, p = draw(st.sampled_from(["flush", "2bw", "interleaved"])), draw(st.integers(2, 7))
    flags = {"recompute": draw(st.booleans()), "balance": True}
    m = draw(st.integers(p, 2 * p))
    if name == "interleaved":
        flags["num_virtual_stages"] = draw(st.integers(2, 3))
        m = p * draw(st.integers(1, 2))
    if name == "flush":
        flags["extra_warmup"] = draw(st.booleans())
    return build(name, p, m, num_batches=2, **flags)


@draws(30)
@given(balanced_programs(), st.integers(1, 2), st.integers(1, 2), st.integers(0, 10**6))
def test_all_moves_run_on_separate_queues(program, tensor, data, seed):
    """Wherever activations move, at any degrees, also where a move is given a buffer late; and random executions of
    all ranks agree.
    """
    assert prove_hardware_queues(program, tensor=tensor, data=data, num_queues=MANY).verdict == PROVED
    ranks = lowered(program, tensor=tensor, data=data)
    wait_for_readers(ranks, program)
    assert QueueExecution(ranks, tensor=1, data=1, shares=[False] * len(ranks), is_early=None).run()
    if program.num_instructions * tensor * data < 500:
        assert ends(ranks, tensor=tensor, data=data, one_queue=False, seed=seed)
