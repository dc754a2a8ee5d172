"""Another execution of what threads launch, simple and slow: every rank of the job, any thread next, no shortcuts.

And the programs that it is compared on.
"""

import random
from collections.abc import Sequence
from itertools import product

import pytest

from megatron.pipeline.check import ProgramError, check
from megatron.pipeline.check.compact import compact
from megatron.pipeline.check.device_operations import (
    AWAIT,
    BEGIN,
    DATA,
    END,
    HOST_WAIT,
    JOB,
    LAUNCH,
    MEET,
    NONE,
    POST,
    SAME_PLACE,
    TENSOR,
    RankOperations,
    lower,
)
from megatron.pipeline.check.hardware_queues import _Job, prove_hardware_queues
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule

MANY = 64  # more hardware queues than any rank of these tests has streams
_TOLD_APART_BY = {SAME_PLACE: (1, 2), TENSOR: (2,), DATA: (1,), JOB: ()}


def build(name: str, num_ranks: int, num_microbatches: int, *, num_batches: int = 3, **flags) -> Program:
    """A proved program of a preset with replicas."""
    num_stages = num_ranks * flags.get("num_virtual_stages", 1)
    schedule = Schedule.preset(name, num_stages=num_stages, **{"data_parallel": True} | flags)
    program = schedule.build((num_microbatches,) * num_batches)
    check(program)
    return program


def refused(program: Program, **job) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        prove_hardware_queues(program, **job)
    return caught.value


def lowered(
    program: Program, *, tensor: int = 1, data: int = 1, distributed_optimizer: bool = False
) -> list[RankOperations]:
    """What each pipeline rank's threads do."""
    compacted = compact(program)
    return [
        lower(compacted, rank, tensor=tensor, data=data, distributed_optimizer=distributed_optimizer)
        for rank in range(program.num_ranks)
    ]


def ends(ranks: Sequence[RankOperations], *, tensor: int, data: int, one_queue: bool, seed: int) -> bool:
    """Whether an execution in which a random thread or queue goes on by one step comes to its end."""
    places = list(product(range(len(ranks)), range(tensor), range(data)))
    steps = {(place, thread): list(row) for place in places for thread, row in enumerate(ranks[place[0]].steps)}
    queues: dict[tuple, list[int]] = {}
    complete, issued, facts = set(), set(), {}
    members: dict[tuple, list[tuple]] = {}
    for place in places:
        for operation, joint in enumerate(ranks[place[0]].joint):
            if joint is not None:
                members.setdefault(key(joint, place), []).append((place, operation))

    def issue(place, queue) -> bool:
        operations, operation = ranks[place[0]], queues[place, queue][0]
        for needed in (operations.before[operation], operations.after[operation]):
            if needed != NONE and (place, needed) not in complete:
                return False
        del queues[place, queue][0]
        issued.add((place, operation))
        joint = operations.joint[operation]
        group = [(place, operation)] if joint is None else members[key(joint, place)]
        if issued.issuperset(group):
            complete.update(group)
        return True

    def go_on(place, thread) -> bool:
        action, argument = steps[place, thread][0]
        if action == LAUNCH:
            queue = 0 if one_queue else ranks[place[0]].stream[argument]
            queues.setdefault((place, queue), []).append(argument)
        elif action in (POST, END):
            fact = ("posted", place, argument) if action == POST else ("done", place, thread)
            facts[fact] = facts.get(fact, 0) + 1
        elif (
            (action == HOST_WAIT and (place, argument) not in complete)
            or (action == BEGIN and facts.get(("posted", place, thread), 0) < argument)
            or (action == AWAIT and facts.get(("done", place, argument[0]), 0) < argument[1])
        ):
            return False
        elif action == MEET:
            meeting = facts.setdefault(("met", argument, place[1:]), set())
            meeting.add(place)
            if len(meeting) < 2:
                return False
        del steps[place, thread][0]
        return True

    chance = random.Random(seed)
    weights = {each: chance.choice((1, 1, 50)) for each in steps}  # some threads are much faster than others
    while True:
        hosts = [each for each in steps if steps[each]]
        hosts.sort(key=lambda each: chance.random() ** (1 / weights[each]), reverse=True)
        devices = [each for each in queues if queues[each]]
        chance.shuffle(devices)
        moves = [(go_on, each) for each in hosts] + [(issue, each) for each in devices]
        if chance.random() < 0.5:
            moves = moves[len(hosts) :] + moves[: len(hosts)]
        if not any(move(*each) for move, each in moves):
            return not hosts and not devices


def key(joint: tuple, place: tuple) -> tuple:
    who, which, _ = joint
    return which, *(place[axis] for axis in _TOLD_APART_BY[who])


def count_deadlocks(program: Program, *, tensor: int = 1, data: int = 1, num_queues: int, **options) -> tuple[int, int]:
    """The number of interleavings of `prove_hardware_queues` that deadlock, and the number of all of them."""
    job = _Job(program, tensor, data, options.get("distributed_optimizer", False))
    shares = [each.num_streams > num_queues for each in job.ranks]
    ends = [job.execution(shares, is_early).run() for is_early in job.interleavings(shares)]
    return ends.count(False), len(ends)
