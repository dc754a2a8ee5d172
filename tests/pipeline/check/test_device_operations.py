"""What a row is lowered to, operation by operation, and what its threads wait for."""

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
from megatron.pipeline.check.device_queues import Execution
from megatron.pipeline.check.hardware_queues import _launches_alone
from megatron.pipeline.program import Program
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


TWO_STAGES = written(
    "0F0@0 0SEND_F0 0RECV_B0 0B0@0 0REDUCE_GRAD@1 0REDUCE_NORM@1 0STEP@1",
    "1RECV_F0 1F0@0 1B0@0 1SEND_B0 1REDUCE_GRAD@1 1REDUCE_NORM@1 1STEP@1",
    data_parallel=True,
)


def test_the_main_thread_computes_sends_and_steps():
    """Transfers after what compute was given, computations after their receive; STEP after the chain, on the host and
    on the device.
    """
    assert told(TWO_STAGES, 0, MAIN, data=2) == [
        "0 compute",
        "1 activations 0-1* < 0",
        "2 gradients 1-0* < 0",
        "3 compute < 2",
        f"post {CHAIN}",
        f"post {CHAIN}",
        f"await {(CHAIN, 2)}",
        "10 compute < 9",
    ]
    assert told(TWO_STAGES, 1, MAIN)[:4] == [
        "0 activations 0-1*",
        "1 compute < 0",
        "2 compute",
        "3 gradients 1-0* < 2",
    ]


def test_the_chain_follows_compute_and_its_host_reads_twice():
    """Each call after what compute was given when it was posted; the norm of the rank and of the job are read."""
    assert told(TWO_STAGES, 0, CHAIN, data=2) == [
        "begin 1",
        "4 chain < 3",
        "5 chain's data group* < 4",
        "6 chain < 5",
        "end",
        "begin 2",
        "7 chain < 3",
        "host waits for 7",
        "8 chain's world group* < 7",
        "9 chain < 8",
        "host waits for 9",
        "end",
    ]


def test_tensor_parallelism_and_the_distributed_optimizer_add_collectives():
    """Around every computation, in the norm, and after the step."""
    job = {"tensor": 2, "data": 2, "distributed_optimizer": True}
    assert told(TWO_STAGES, 0, MAIN, **job)[:5] == [
        "0 compute",
        "1 tensor group* < 0",
        "2 compute < 1",
        "3 activations 0-1* < 2",
        "4 gradients 1-0* < 2",
    ]
    assert told(TWO_STAGES, 0, CHAIN, **job)[6:11] == [
        "11 chain < 7",
        "12 chain's tensor group* < 11",
        "13 chain < 12",
        "host waits for 13",
        "14 chain's world group* < 13",
    ]
    assert told(TWO_STAGES, 0, MAIN, **job)[-3:] == [
        "16 compute < 15",
        "17 optimizer's data group* < 16",
        "18 compute < 17",
    ]


def test_one_rank_alone_reduces_nothing():
    """No group has a second member: kernels of the chain, and one read."""
    program = written("0F0@0 0B0@0 0REDUCE_NORM@1 0STEP@1")
    assert told(program, 0, CHAIN) == ["begin 1", "2 chain < 1", "host waits for 2", "end"]


def test_a_reduction_after_its_step_has_a_thread_of_its_own():
    """PipeDream's norm: nobody waits for it."""
    program = Schedule.preset("pipedream", num_stages=2).build((1, 1))
    assert told(program, 1, LATE_CHAIN)[:6] == [
        "begin 1",
        "5 late chain < 4",
        "host waits for 5",
        "6 chain's world group* < 5",
        "7 late chain < 6",
        "host waits for 7",
    ]
    assert not any(line.startswith("await") for line in told(program, 1, MAIN))


def test_hosts_meet_before_a_move():
    """An eviction is packed after the forward that it takes from; both hosts have come before its transfer."""
    program = Schedule.preset("bpipe", num_stages=4).build((4,))
    evictor, acceptor = told(program, 0, MOVES), told(program, 3, MOVES)
    first = int(evictor[1].split()[0])
    assert evictor[:8] == [
        "begin 1",
        f"{first} moves < {first - 2}",
        f"host waits for {first}",
        "meet ('moves [0, 3]', 1)",
        f"{first + 1} link of the moves* < {first}",
        f"{first + 2} moves < {first + 1}",
        f"host waits for {first + 2}",
        "end",
    ]
    assert acceptor[3] == evictor[3]
    assert f"await {(MOVES, 1)}" in told(program, 0, MAIN)


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
    assert Execution(ranks, tensor=1, data=1, shares=[True, True], is_early=None).run() == ends


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
