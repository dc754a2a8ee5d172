"""What a row is lowered to, operation by operation, and what its threads wait for."""

import dataclasses

import pytest

from megatron.pipeline.check.compact import compact
from megatron.pipeline.check.device_operations import (
    AWAIT,
    BEGIN,
    CHAIN,
    END,
    HOST_WAIT,
    LATE_CHAIN,
    LAUNCH,
    MAIN,
    MEET,
    MOVES,
    NONE,
    POST,
    RankOperations,
    lower,
)
from megatron.pipeline.check.device_queues import QueueExecution
from megatron.pipeline.check.hardware_queues import _launches_alone
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.lane_order import awaited_moves
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule
from tests.pipeline.check.examples import written

WORDS = {HOST_WAIT: "host waits for", BEGIN: "begin", END: "end", POST: "post", AWAIT: "await", MEET: "meet"}


def told(program: Program, rank: int, thread: int, **job) -> list[str]:
    """What a thread does: `5 stream < 3`: it launches operation 5 on a stream, after operation 3; `*`: a collective."""
    operations = lower(compact(program), rank, **{"tensor": 1, "data": 1, "distributed_optimizer": False} | job)
    lines = []
    for action, argument in operations.steps[thread]:
        if action == LAUNCH:
            after = operations.after[argument]
            line = f"{argument} {operations.stream_names[operations.stream[argument]]}"
            lines.append(line + "*" * (operations.joint[argument] is not None) + f" < {after}" * (after != NONE))
        else:
            lines.append(WORDS[action] + (f" {argument}" if argument is not None else ""))
    return lines


def listed(text: str) -> list[str]:
    return text.split("; ")


TWO_STAGES = written(
    "0F0@0 0SEND_F0 0RECV_B0 0B0@0 0REDUCE_GRAD@1 0REDUCE_NORM@1 0STEP@1",
    "1RECV_F0 1F0@0 1B0@0 1SEND_B0 1REDUCE_GRAD@1 1REDUCE_NORM@1 1STEP@1",
    data_parallel=True,
)


def test_the_main_thread_computes_sends_and_steps():
    """Transfers after what compute was given; computations after the stream of arrivals, which waits for the receive;
    STEP after the chain, on the host and on the device.
    """
    assert told(TWO_STAGES, 0, MAIN, data=2) == listed(
        f"0 compute; 1 activations 0-1* < 0; 2 gradients 1-0* < 0; 3 arrivals < 2; 4 compute < 3; post {CHAIN}; "
        f"post {CHAIN}; await {(CHAIN, 2)}; 11 compute < 10"
    )
    assert told(TWO_STAGES, 1, MAIN)[:5] == listed(
        "0 activations 0-1*; 1 arrivals < 0; 2 compute < 1; 3 compute; 4 gradients 1-0* < 3"
    )


def test_the_chain_follows_compute_and_its_host_reads_twice():
    """Each call after what compute was given when it was posted; the norm of the rank and of the job are read."""
    assert told(TWO_STAGES, 0, CHAIN, data=2) == listed(
        "begin 1; 5 chain < 4; 6 chain's data group* < 5; 7 chain < 6; end; begin 2; 8 chain < 4; host waits for 8; "
        "9 chain's world group* < 8; 10 chain < 9; host waits for 10; end"
    )


def test_tensor_parallelism_and_the_distributed_optimizer_add_collectives():
    """Around every computation, in the norm, and after the step."""
    job = {"tensor": 2, "data": 2, "distributed_optimizer": True}
    assert told(TWO_STAGES, 0, MAIN, **job)[:9] == listed(
        "0 compute; 1 tensor group* < 0; 2 compute < 1; 3 activations 0-1* < 2; 4 gradients 1-0* < 2; 5 arrivals < 4; "
        "6 compute < 5; 7 tensor group* < 6; 8 compute < 7"
    )
    assert told(TWO_STAGES, 0, CHAIN, **job)[6:11] == listed(
        "12 chain < 8; 13 chain's tensor group* < 12; 14 chain < 13; host waits for 14; 15 chain's world group* < 14"
    )
    assert told(TWO_STAGES, 0, MAIN, **job)[-3:] == [
        "17 compute < 16",
        "18 optimizer's data group* < 17",
        "19 compute < 18",
    ]


def test_a_prediction_waits_for_its_part_of_the_chain_and_gathers():
    """PREDICT after the partial reductions, with the collectives that STEP has elsewhere, and one for the norm of the
    shards of a mean; STEP gathers nothing."""
    program = Schedule.preset(
        "2bw", num_stages=2, predict=True, provisional_microbatches=1, reduce_partial=True, data_parallel=True,
        tied_embeddings=True,
    ).build((3,))  # fmt: skip
    job = {"tensor": 2, "data": 2, "distributed_optimizer": True}
    operations = lower(compact(program), 1, **job)
    row = program.rows[1]
    streams = {
        kind: [
            operations.stream_names[stream]
            for stream, position in zip(operations.stream, operations.position, strict=True)
            if row[position].kind is kind
        ]
        for kind in (Kind.HOLD, Kind.REDUCE_PARTIAL, Kind.REDUCE_PARTIAL_EMBED, Kind.PREDICT, Kind.STEP)
    }
    chain, data = "chain", "chain's data group"
    assert streams == {
        Kind.HOLD: ["compute"],
        Kind.REDUCE_PARTIAL: [chain, data, chain],
        Kind.REDUCE_PARTIAL_EMBED: [chain, data, chain, "chain's embedding group", chain],
        Kind.PREDICT: ["compute", "tensor group", "compute", *["optimizer's data group", "compute"] * 2],
        Kind.STEP: ["compute"],
    }
    steps = operations.steps[MAIN]
    awaited = [argument for action, argument in steps if action == AWAIT]
    assert awaited == [(CHAIN, 2), (CHAIN, 5)], "PREDICT after its two calls, STEP after all five"


def test_one_rank_alone_reduces_nothing():
    """No group has a second member: kernels of the chain, and one read."""
    program = written("0F0@0 0B0@0 0REDUCE_NORM@1 0STEP@1")
    assert told(program, 0, CHAIN) == listed("begin 1; 2 chain < 1; host waits for 2; end")


def test_a_reduction_after_its_step_has_a_thread_of_its_own():
    """PipeDream's norm: nobody waits for it."""
    program = Schedule.preset("pipedream", num_stages=2).build((1, 1))
    assert told(program, 1, LATE_CHAIN)[:6] == listed(
        "begin 1; 6 late chain < 5; host waits for 6; 7 chain's world group* < 6; 8 late chain < 7; host waits for 8"
    )
    assert not any(line.startswith("await") for line in told(program, 1, MAIN))


MEETING = "meet ('moves [0, 3]', {})"

MOVES_OF_FOUR = written(  # of BPipe's first batch, with one move less
    "0F0@0 0SEND_F0 0F1@0 0EVICT1 0SEND_F1 0F2@0 0RECV_B0 0F3@0 0B0@0 0LOAD1 0EVICT2 0RECV_B1 0B1@0 0LOAD2 0R2@0",
    "1RECV_F0 1F0@0",
    "2RECV_F0 2F0@0",
    "3ACCEPT1 3F0@0 3RETURN1 3ACCEPT2 3RETURN2",
    batches=(4,),
)


def test_an_evictor_launches_its_moves_and_goes_on():
    """No host waits for a device. An eviction is packed after the forward that it takes from; both hosts have come
    before a transfer; what is loaded into a buffer comes after the backward that has read from it.
    """
    assert told(MOVES_OF_FOUR, 0, MOVES) == listed(
        f"begin 1; 3 moves < 2; {MEETING.format(1)}; 4 link of the moves* < 3; 5 moves < 4; end; begin 2; "
        f"{MEETING.format(2)}; 12 link of the moves* < 5; 13 moves < 12; end; begin 3; 14 moves < 11; "
        f"{MEETING.format(3)}; 15 link of the moves* < 14; 16 moves < 15; end; begin 4; 21 moves < 20; "
        f"{MEETING.format(4)}; 22 link of the moves* < 21; 23 moves < 22; end"
    )


def test_a_computation_waits_for_its_moves_twice():
    """The host until they have been launched, compute until they have ended: F3 for the eviction that stands before F2,
    B1 and R2 for their load; F2 and B0 for none.
    """
    assert told(MOVES_OF_FOUR, 0, MAIN) == listed(
        f"0 compute; 1 activations 0-1* < 0; 2 compute; post {MOVES}; 6 activations 0-1* < 2; 7 compute; "
        f"8 gradients 1-0* < 7; await {(MOVES, 1)}; 9 compute < 5; 10 arrivals < 8; 11 compute < 10; post {MOVES}; "
        f"post {MOVES}; 17 gradients 1-0* < 11; await {(MOVES, 2)}; 18 compute < 13; 19 arrivals < 17; "
        f"20 compute < 19; post {MOVES}; await {(MOVES, 4)}; 24 compute < 23"
    )


def test_an_acceptor_waits_for_nothing_but_its_partner():
    """Neither its computations for moves nor its moves for computations."""
    assert told(MOVES_OF_FOUR, 3, MOVES) == listed(
        f"begin 1; {MEETING.format(1)}; 0 link of the moves*; 1 moves < 0; end; begin 2; {MEETING.format(2)}; "
        f"3 link of the moves* < 1; 4 moves < 3; end; begin 3; {MEETING.format(3)}; 5 link of the moves* < 4; "
        f"6 moves < 5; end; begin 4; {MEETING.format(4)}; 7 link of the moves* < 6; 8 moves < 7; end"
    )
    assert told(MOVES_OF_FOUR, 3, MAIN) == [f"post {MOVES}", "2 compute", *[f"post {MOVES}"] * 3]


def test_a_buffer_that_was_read_is_taken_after_its_reader():
    """By an ACCEPT, too, where a rank has stages of both kinds; a RETURN takes none."""
    program = written("0F0@0 0EVICT0 0LOAD0 0B0@0 2ACCEPT0 2RETURN0", "3ACCEPT0 3RETURN0", rank_of_stage=(0, 1, 0, 1))
    lines = [line for line in told(program, 0, MOVES) if line[0].isdigit()]
    assert told(program, 0, MAIN)[-3] == "6 compute < 5"  # B0, after its LOAD
    assert lines == listed(
        "1 moves < 0; 2 link of the moves* < 1; 3 moves < 2; 4 link of the moves* < 3; 5 moves < 4; 7 moves < 6; "
        "8 link of the moves* < 7; 9 moves < 8; 10 link of the moves* < 9; 11 moves < 10"
    )


def test_forwards_need_their_input_before_moves_and_backwards_after():
    """As the executor asks for them; compute is given both waits."""
    program = written(
        "0F0@0", "1F0@0 1EVICT0 1F1@0 1RECV_F2 1F2@0 1LOAD0 1RECV_B0 1B0@0", "2ACCEPT0 2RETURN0", "3F0@0", batches=(3,)
    )
    assert told(program, 1, MAIN) == listed(
        f"0 compute; post {MOVES}; 4 compute; 5 activations 0-1* < 4; 6 arrivals < 5; 7 compute < 6; "
        f"await {(MOVES, 1)}; 8 compute < 3; post {MOVES}; 11 gradients 2-1* < 8; await {(MOVES, 2)}; 12 compute < 10; "
        "13 arrivals < 11; 14 compute < 13"
    )


@pytest.mark.parametrize(("name", "num_stages"), [("bpipe", 4), ("bpipe", 7), ("2bw", 6), ("interleaved", 8)])
def test_the_device_does_what_moves_mean(name, num_stages):
    """Whatever is launched how: what compute is given for a computation comes after the moves that `MoveOrder` tells,
    and an eviction after the forward before it.
    """
    options = {"num_virtual_stages": 2} if name == "interleaved" else {}
    schedule = Schedule.preset(name, num_stages=num_stages, balance=True, **options)
    program = schedule.build((8, 8))
    assert any(program.num_evictions)
    for rank, row in enumerate(program.rows):
        operations = lower(compact(program), rank, tensor=2, data=1, distributed_optimizer=False)
        links = [each for each, joint in enumerate(operations.joint) if joint and joint[1][0].startswith("moves")]
        last = {}  # position -> its last operation on compute
        for each, stream in enumerate(operations.stream):
            if operations.stream_names[stream] == "compute":
                last[operations.position[each]] = each
        for position, count in awaited_moves(row).items():
            assert set(links[:count]) <= ends_before(operations, last[position])
        for link in links:
            instruction = row[operations.position[link]]
            if instruction.kind is Kind.EVICT:
                made = dataclasses.replace(instruction, kind=Kind.FORWARD)
                at = next(at for at, each in enumerate(row) if dataclasses.replace(each, version=None) == made)
                assert last[at] in ends_before(operations, link)


def ends_before(operations: RankOperations, operation: int) -> set[int]:
    """All that has ended when an operation begins."""
    found, open_ends = set(), [operation]
    while open_ends:
        each = open_ends.pop()
        needed = {operations.before[each], operations.after[each]} - found - {NONE}
        found |= needed
        open_ends += needed
    return found


# --- how threads are executed


def threads(**steps) -> RankOperations:
    """A rank that launches nothing."""
    operations = RankOperations()
    for name, each in steps.items():
        operations.steps[{"main": MAIN, "chain": CHAIN, "moves": MOVES}[name]].extend(each)
    return operations


@pytest.mark.parametrize(
    ("partner", "ends"), [([(MEET, ("pair", 1))], True), ([(MEET, ("pair", 2))], False), ([], False)]
)
def test_a_host_waits_for_its_partner(partner, ends):
    """A meeting takes two."""
    ranks = [threads(moves=[(MEET, ("pair", 1))]), threads(moves=partner)]
    assert QueueExecution(ranks, tensor=1, data=1, shares=[True, True], is_early=None).run() == ends


@pytest.mark.parametrize(
    ("steps", "alone"),
    [
        ([(POST, CHAIN), (AWAIT, (CHAIN, 1)), (LAUNCH, 0)], True),
        ([(POST, CHAIN), (LAUNCH, 0), (AWAIT, (CHAIN, 1))], False),
        ([(POST, CHAIN), (POST, CHAIN), (AWAIT, (CHAIN, 1)), (LAUNCH, 0)], False),  # the second call still runs
        ([(POST, CHAIN), (POST, MOVES), (AWAIT, (CHAIN, 1)), (AWAIT, (MOVES, 1))], False),  # two beside each other
        ([(LAUNCH, 0), (POST, CHAIN)], True),
    ],
)
def test_one_thread_at_a_time(steps, alone):
    """A rank launches alone where it waits for all that it has posted before it launches, or posts elsewhere."""
    assert _launches_alone(threads(main=steps)) == alone
