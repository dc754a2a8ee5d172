"""Proof: the job runs to its end on devices whose hardware queues are FIFO.

Problem: a GPU takes work from a number of hardware queues (CUDA_DEVICE_MAX_CONNECTIONS). With fewer queues than
streams, a stream's wait at the head of a queue blocks later operations of other streams. If the chain of reductions or
moves of activations run beside computations, two threads of a rank launch in an order that differs from rank to rank.
One rank may have a reduction or a move first, another rank a computation's collective or transfer. Then they wait for
each other, and the rows do not show it.

Solution: `device_operations` lowers the rows to the operations that threads launch, and `device_queues` executes them
with tensor and data ranks. The meaning of one execution depends on the sharing of queues:

    a queue for each stream            "proved": one execution stands for all (see `device_queues`).
    fewer queues, and one thread at    "proved": the order of launches is fixed, so one execution with one queue stands
    a time launches on each rank       for all, and for every assignment of streams to more queues: in one queue an
    that shares                        operation waits for all earlier ones, in several queues only for some of them.
    fewer queues, and threads launch   a search: each rank's other threads launch as early or as late as possible. A
    beside one another                 deadlock that is found is real. Without one the verdict is "not proved".

The driver chooses which streams share a queue. So fewer queues than streams are treated as one queue.

**The message for a deadlock** names the circle of waits. The head of a hardware queue waits for an operation. Either
that operation is behind the head of another queue, of the same rank or of a rank that has not joined the collective; or
a thread has not launched it, because the thread waits on the host for an operation or for another thread. Each of these
waits leads to the next one, and the search ends at the first wait that was visited before.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from megatron.pipeline.check.compact import CompactProgram, ProgramError, compact
from megatron.pipeline.check.device_operations import (
    AWAIT,
    BEGIN,
    CHAIN,
    HOST_WAIT,
    LAUNCH,
    MAIN,
    MEET,
    MOVES,
    NONE,
    POST,
    THREADS,
    RankOperations,
    lower,
)
from megatron.pipeline.check.device_queues import IsEarly, QueueExecution, QueueingDevice, RankCoordinates
from megatron.pipeline.program.program import Program

PROVED, NOT_PROVED = "proved", "not proved"
_MOST_EXHAUSTIVE = 6  # ranks: 64 interleavings


@dataclass(frozen=True)
class HardwareQueuesReport:
    """The result of the proof for a program on devices with a given number of hardware queues.

    Attributes:
        verdict: "proved", or "not proved" if a search found no deadlock.
        num_streams: per pipeline rank, the number of its streams; with as many queues each stream has its own.
        num_interleavings: the number of executed relative orders of the ranks' threads.
    """

    verdict: str
    num_streams: tuple[int, ...]
    num_interleavings: int


def prove_hardware_queues(
    program: Program, *, tensor: int = 1, data: int = 1, num_queues: int, distributed_optimizer: bool = False
) -> HardwareQueuesReport:
    """Prove or refute that a job runs to its end on devices with few hardware queues.

    Args:
        program: a complete program that `check` has proved.
        tensor, data: the degrees; the job has tensor x data ranks for each rank of the program.
        num_queues: number of FIFO hardware queues of each device.
        distributed_optimizer: whether a STEP gathers the parameters over the replicas.

    Raises:
        ProgramError: for a deadlock; the message names the circle of waits.
        ValueError: for a degree or a number of queues below 1, and for a program whose launches are not modelled.
    """
    if num_queues < 1:
        raise ValueError(f"a device cannot have {num_queues} hardware queues; give 1 and more")
    job = _Job(program, tensor, data, distributed_optimizer)
    streams = tuple(each.num_streams for each in job.ranks)
    shares = [needed > num_queues for needed in streams]
    num_looked_at = 0
    for is_early in job.interleavings(shares):
        execution = job.execution(shares, is_early)
        num_looked_at += 1
        if not execution.run():
            raise _explain(job.compact, execution, _where(max(streams), num_queues))
    verdict = PROVED if job.has_fixed_order(shares) else NOT_PROVED
    return HardwareQueuesReport(verdict, streams, num_looked_at)


def _where(num_streams: int, num_queues: int) -> str:
    if num_queues >= num_streams:
        return f"even with a hardware queue for each of {num_streams} streams"
    if num_queues == 1:
        return f"with one hardware queue for {num_streams} streams"
    return f"with {num_queues} hardware queues for {num_streams} streams, any of which may share one"


def count_deadlocks(
    program: Program, *, tensor: int = 1, data: int = 1, num_queues: int, distributed_optimizer: bool = False
) -> tuple[int, int]:
    """The number of interleavings of `prove_hardware_queues` that deadlock, and the number of all interleavings."""
    job = _Job(program, tensor, data, distributed_optimizer)
    shares = [each.num_streams > num_queues for each in job.ranks]
    ends = [job.execution(shares, is_early).run() for is_early in job.interleavings(shares)]
    return ends.count(False), len(ends)


def num_streams(
    program: Program, *, tensor: int = 1, data: int = 1, distributed_optimizer: bool = False
) -> tuple[int, ...]:
    """The number of streams of each pipeline rank, which is the number of hardware queues with one for each stream."""
    return tuple(each.num_streams for each in _Job(program, tensor, data, distributed_optimizer).ranks)


def launches_beside(program: Program) -> bool:
    """Whether two threads of some rank may launch at the same time, so that their order matters in a shared queue.

    These are the chain of reductions, or moves of activations, beside computations.
    """
    return not all(_launches_alone(each) for each in _Job(program, 1, 1, False).ranks)


def may_deadlock(program: Program, *, tensor: int = 1, data: int = 1, distributed_optimizer: bool = False) -> bool:
    """Whether a deadlock is possible if streams share a queue, decided without a search.

    It is possible if several threads of a rank launch at the same time, and two of them launch collectives or
    transfers. If only one thread at a time launches, `prove_hardware_queues` gives the answer.
    """
    job = _Job(program, tensor, data, distributed_optimizer)
    return any(not _launches_alone(each) and _num_meeting_threads(each) > 1 for each in job.ranks)


class _Job:
    """A program at given tensor and data parallel degrees, with its lowered ranks."""

    def __init__(self, program: Program, tensor: int, data: int, distributed_optimizer: bool) -> None:
        for name, degree in (("tensor", tensor), ("data", data)):
            if degree < 1:
                raise ValueError(f"the {name} parallel degree cannot be {degree}; give 1 and more")
        if data > 1 and not program.data_parallel and not program.forward_only:
            raise ValueError(
                f"the program has no REDUCE_GRAD for {data} data parallel replicas; build it with data_parallel"
            )
        self.compact = compact(program)
        if program.residency is not None:
            raise ValueError("what lanes between device and host launch is not modelled; keep weights on the device")
        num_ranks = len(self.compact.codes)
        if num_ranks > 1 and not self.compact.communicates:
            raise ValueError("a compute-only program does not say what is launched; give one with SENDs and RECVs")
        options = {"tensor": tensor, "data": data, "distributed_optimizer": distributed_optimizer}
        self._degrees = min(tensor, 2), min(data, 2)
        self.ranks = [lower(self.compact, rank, **options) for rank in range(num_ranks)]

    def has_fixed_order(self, shares: list[bool]) -> bool:
        """Whether the order of launches is fixed or does not matter on every rank."""
        return not any(self._is_open(rank, shares) for rank in range(len(self.ranks)))

    def _is_open(self, rank: int, shares: list[bool]) -> bool:
        return shares[rank] and not _launches_alone(self.ranks[rank])

    def execution(self, shares: list[bool], is_early: IsEarly | None) -> QueueExecution:
        tensor, data = (1, 1) if is_early is None else self._degrees
        return QueueExecution(self.ranks, tensor=tensor, data=data, shares=shares, is_early=is_early)

    def interleavings(self, shares: list[bool]) -> Iterator[IsEarly | None]:
        """Yield the interleavings to execute: None if the order is fixed, all if they are few, else some patterns."""
        open_ranks = [rank for rank in range(len(self.ranks)) if self._is_open(rank, shares)]
        tensor, data = self._degrees
        if not open_ranks:
            yield None
        elif len(open_ranks) * tensor * data <= _MOST_EXHAUSTIVE:
            ranks = [RankCoordinates(rank, i, k) for rank in open_ranks for i in range(tensor) for k in range(data)]
            for choice in product((False, True), repeat=len(ranks)):
                early = dict(zip(ranks, choice, strict=True))
                yield lambda rank, early=early: early.get(rank, False)
        else:
            yield from _patterns(len(self.ranks), tensor, data)


def _patterns(num_ranks: int, tensor: int, data: int) -> Iterator[IsEarly]:
    """Yield each choice by tensor and data rank, the same on all stages or inverted on some of them."""
    corners = [(i, k) for i in range(tensor) for k in range(data)]
    turned = {
        tuple(turn(rank) for rank in range(num_ranks))
        for turn in (
            lambda rank: False,
            lambda rank: rank % 2 == 1,
            lambda rank: rank == 0,
            lambda rank: rank == num_ranks - 1,
            lambda rank: rank >= num_ranks // 2,
        )
    }
    seen = set()
    for turns in sorted(turned):
        for choice in product((False, True), repeat=len(corners)):
            early = dict(zip(corners, choice, strict=True))
            table = tuple(early[corner] != turn for turn in turns for corner in corners)
            if table not in seen:
                seen.add(table)
                yield lambda rank, early=early, turns=turns: early[rank[1:]] != turns[rank.pipeline]


def _launches_alone(operations: RankOperations) -> bool:
    """Whether at any time only one thread of the rank can launch."""
    busy, num_posted = None, {}
    for action, argument in operations.steps[MAIN]:
        if action == POST:
            num_posted[argument] = num_posted.get(argument, 0) + 1
            if busy not in (None, argument):
                return False
            busy = argument
        elif action == AWAIT and argument[0] == busy and argument[1] == num_posted[busy]:
            busy = None
        elif action == LAUNCH and busy is not None:
            return False
    return True


def _num_meeting_threads(operations: RankOperations) -> int:
    """The number of threads of a rank that launch collectives or transfers."""
    return sum(
        any(action == LAUNCH and operations.joint[argument] is not None for action, argument in steps)
        for steps in operations.steps
    )


# --- the message for a deadlock

_QUEUE, _THREAD = "queue", "thread"
_Node = tuple[str, QueueingDevice, int]  # the head of a queue, or a thread


def _explain(compact: CompactProgram, execution: QueueExecution, where: str) -> ProgramError:
    """The error that names the circle of queues and threads. `where`: a description of the devices."""
    story = _Story(compact, execution)
    path: list[_Node] = []
    sentences: list[str] = []
    node: _Node | None = story.first()
    while node is not None and node not in path:
        path.append(node)
        sentence, node = story.waits_for(node)
        sentences.append(sentence)
    start = 0 if node is None else path.index(node)
    device, position = story.where(path[start])
    reason = f"deadlock {where}: {'; '.join(sentences[start:])}"
    return compact.error(device.coordinates.pipeline, position, reason)


class _Story:
    """The description of an execution that is stuck, one wait at a time."""

    def __init__(self, compact: CompactProgram, execution: QueueExecution) -> None:
        self._rows = compact.program.rows
        self._execution = execution

    def first(self) -> _Node:
        """The node at which the search starts: a blocked queue, or else a waiting thread."""
        devices = self._execution.devices.values()
        for device in devices:
            for queue in range(len(device.queues)):
                if self._execution.blocked_by(device, queue) != NONE:
                    return _QUEUE, device, queue
        return next(
            (_THREAD, device, thread)
            for device in devices
            for thread in range(len(THREADS))
            if device.step[thread] < len(device.operations.steps[thread])
        )

    def where(self, node: _Node) -> tuple[QueueingDevice, int]:
        """The rank of a node, and the position of its instruction in the row."""
        what, device, index = node
        if what == _QUEUE:
            return device, device.operations.position[device.queues[index][device.head[index]]]
        steps = device.operations.steps[index]
        ahead = (argument for action, argument in steps[device.step[index] :] if action == LAUNCH)
        return device, device.operations.position[next(ahead, -1)]

    def waits_for(self, node: _Node) -> tuple[str, _Node | None]:
        """A sentence about the wait of a node, and the node that it waits for; None if there is no such node."""
        what, device, index = node
        return self._queue_waits_for(device, index) if what == _QUEUE else self._thread_waits_for(device, index)

    def _queue_waits_for(self, device: QueueingDevice, queue: int) -> tuple[str, _Node | None]:
        head = device.queues[queue][device.head[queue]]
        needed = self._execution.blocked_by(device, queue)
        sentence = (
            f"{_name(device)} has {self._word(device, head)} at the head of a queue, which waits for "
            f"{self._word(device, needed)}"
        )
        return self._until(device, needed, sentence)

    def _until(self, device: QueueingDevice, operation: int, sentence: str) -> tuple[str, _Node | None]:
        """The sentence about a wait for an operation, and who keeps it from being issued."""
        member = self._missing_member(device, operation)
        if member is None:
            return sentence, None
        if member is not device:
            sentence += f", which {_name(member)} has not joined"
        return sentence, self._holder(member, device, operation)

    def _missing_member(self, device: QueueingDevice, operation: int) -> QueueingDevice | None:
        """The rank that has not issued the operation: the rank itself, or a member of its collective."""
        execution, joint = self._execution, device.operations.joint[operation]
        if joint is None or device not in execution.joined(device, operation):
            return device
        joined = execution.joined(device, operation)
        for member in execution.devices.values():
            if member not in joined and self._counterpart(member, device, operation) is not None:
                return member
        return None

    def _counterpart(self, member: QueueingDevice, device: QueueingDevice, operation: int) -> int | None:
        """The operation with which a member takes part in the collective of another rank's operation."""
        key = self._execution.key(device, operation)
        parts = enumerate(member.operations.joint)
        return next((each for each, joint in parts if joint and self._execution.key(member, each) == key), None)

    def _holder(self, member: QueueingDevice, device: QueueingDevice, operation: int) -> _Node | None:
        """The queue in which a member's operation waits, or the thread that has not launched it."""
        own = operation if member is device else self._counterpart(member, device, operation)
        for queue, launched in enumerate(member.queues):
            if own in launched[member.head[queue] :]:
                return _QUEUE, member, queue
        for thread, steps in enumerate(member.operations.steps):
            if (LAUNCH, own) in steps:
                return _THREAD, member, thread
        raise AssertionError("every operation is launched by a thread")

    def _thread_waits_for(self, device: QueueingDevice, thread: int) -> tuple[str, _Node | None]:
        action, argument = device.operations.steps[thread][device.step[thread]]
        here = f"{_name(device)} has its {THREADS[thread]} thread wait"
        if action == HOST_WAIT:
            return self._until(device, argument, f"{here} for {self._word(device, argument)}")
        if action == AWAIT:
            awaited, _ = argument
            what = "chain of reductions" if awaited == CHAIN else f"{THREADS[awaited]} thread"
            return f"{here} for its {what}", (_THREAD, device, awaited)
        if action == BEGIN:
            return f"{here} until its main thread has posted more", (_THREAD, device, MAIN)
        assert action == MEET, "nothing else waits"
        partner = self._partner(device, argument)
        return f"{here} for the host of {_name(partner)}", (_THREAD, partner, thread)

    def _partner(self, device: QueueingDevice, meeting: tuple) -> QueueingDevice:
        """The other host of a meeting."""
        others = (
            other
            for other in self._execution.devices.values()
            if other is not device and other.coordinates[1:] == device.coordinates[1:]
        )
        return next(other for other in others if (MEET, meeting) in other.operations.steps[MOVES])

    def _word(self, device: QueueingDevice, operation: int) -> str:
        """The text of an operation, such as `0F4@1 (tensor group)`."""
        operations = device.operations
        instruction = self._rows[device.coordinates.pipeline][operations.position[operation]]
        return f"{instruction} ({operations.stream_names[operations.stream[operation]]})"


def _name(device: QueueingDevice) -> str:
    pipeline, tensor, data = device.coordinates
    return f"rank {pipeline} (tensor {tensor}, data {data})"
