"""Execution of the operations of all ranks on devices whose hardware queues are FIFO.

The model. A stream belongs to a hardware queue. An operation is issued when all earlier operations of its queue have
been issued, the previous operation on its stream is complete, and the operation of another stream that it awaits is
complete. So a waiting operation at the head of a queue blocks all operations behind it, whatever their streams. A
kernel is complete once it is issued, a collective or a transfer once all its members have issued it. Queues are
unbounded, so a host never waits to launch.

With a queue for each stream the result does not depend on the speed of threads: the launches and waits of each thread
are fixed, an operation waits for fixed others, and no wait, once satisfied, becomes unsatisfied again. So one execution
stands for all. The same holds for a single queue if the order of launches is fixed, as it is if only one thread at a
time can launch.

If two threads of a rank share a queue, their relative order matters. An *interleaving* assigns one of two orders to
each rank: either its other threads launch as early as possible, and its main thread launches one operation at a time
when nothing else in the job can run; or its other threads launch as late as possible, when its main thread waits on the
host.

Ranks with the same launches may run in step. So if all tensor or data ranks of a collective have the same launches, one
of them stands for all; if even and odd ranks have different launches, two ranks of each degree are enough.

**The message for a deadlock** names the circle of waits. The head of a hardware queue waits for an operation. Either
that operation is behind the head of another queue, of the same rank or of a rank that has not joined the collective; or
a thread has not launched it, because the thread waits on the host for an operation or for another thread. Each of these
waits leads to the next one, and the search ends at the first wait that was visited before.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.pipeline.check.compact import CompactProgram, ProgramError
from megatron.pipeline.check.device_operations import (
    AWAIT,
    BEGIN,
    CHAIN,
    DATA,
    END,
    HOST_WAIT,
    LAUNCH,
    MAIN,
    MEET,
    MOVES,
    NONE,
    POST,
    SAME_PLACE,
    TENSOR,
    THREADS,
    RankOperations,
)


class RankCoordinates(NamedTuple):
    """The coordinates of a rank of the job in each parallel degree."""

    pipeline: int
    tensor: int
    data: int


IsEarly = Callable[[RankCoordinates], bool]


class QueueingDevice:
    """The state of one rank in an execution: the progress of its threads and of its device's queues."""

    def __init__(
        self, coordinates: RankCoordinates, operations: RankOperations, *, is_early: bool, shares: bool
    ) -> None:
        self.coordinates, self.operations, self.is_early = coordinates, operations, is_early
        self.complete = bytearray(len(operations.stream))
        self.queue_of_stream = [0 if shares else stream for stream in range(operations.num_streams)]
        self.queues: list[list[int]] = [[] for _ in range(1 if shares else operations.num_streams)]
        self.head = [0] * len(self.queues)
        self.step = [0] * len(THREADS)
        self.posted = [0] * len(THREADS)
        self.done = [0] * len(THREADS)
        self.waiting: dict[int, list[int]] = {}  # operation -> queues, and threads as ~thread, that wait for it
        self.waits_of_threads: list[tuple[int, int]] = []  # (thread awaited, thread that waits)


class QueueExecution:
    """One execution of the whole job under one interleaving."""

    def __init__(
        self,
        ranks: Sequence[RankOperations],
        *,
        tensor: int,
        data: int,
        shares: Sequence[bool],
        is_early: IsEarly | None,
    ) -> None:
        """Start the execution.

        Args:
            tensor, data: the numbers of tensor and data ranks to execute.
            shares: per pipeline rank, whether all its streams share one queue.
            is_early: the interleaving; None if the order of launches is fixed or does not matter.
        """
        self.degrees = tensor, data
        self.devices = {
            coordinates: QueueingDevice(
                coordinates, operations, is_early=is_early is not None and is_early(coordinates), shares=shares[rank]
            )
            for rank, operations in enumerate(ranks)
            for coordinates in (RankCoordinates(rank, i, k) for i in range(tensor) for k in range(data))
        }
        self._is_free = is_early is None
        self._joined: dict[tuple, list[tuple[QueueingDevice, int]]] = {}
        self._met: dict[tuple, list[QueueingDevice]] = {}
        self._issue: list[tuple[QueueingDevice, int]] = []
        self._soon: deque[tuple[QueueingDevice, int]] = deque()
        self._later: deque[tuple[QueueingDevice, int]] = deque()  # threads that launch late, other than main threads
        self._last: deque[tuple[QueueingDevice, int]] = deque()  # main threads of ranks whose other threads are early

    def run(self) -> bool:
        """Execute the job. Returns whether every thread reaches its end and every operation completes."""
        for device in self.devices.values():
            for thread in range(len(THREADS)):
                self._wake(device, thread)
        while True:
            if self._issue:
                self._advance(*self._issue.pop())
            elif self._soon:
                self._go_on(*self._soon.popleft(), one=False)
            elif self._later:
                self._go_on(*self._later.popleft(), one=True)
            elif self._last:
                self._go_on(*self._last.popleft(), one=True)
            else:
                return all(self._has_ended(device) for device in self.devices.values())

    def _has_ended(self, device: QueueingDevice) -> bool:
        steps = device.operations.steps
        return all(device.step[thread] == len(steps[thread]) for thread in range(len(THREADS))) and all(device.complete)

    # --- hosts

    def _wake(self, device: QueueingDevice, thread: int) -> None:
        if self._is_free or (thread == MAIN) != device.is_early:
            self._soon.append((device, thread))
        else:
            (self._last if thread == MAIN else self._later).append((device, thread))

    def _go_on(self, device: QueueingDevice, thread: int, *, one: bool) -> None:
        """Run a thread until it waits or ends; with `one`, by at most one step."""
        steps, position = device.operations.steps[thread], device.step[thread]
        while position < len(steps):
            action, argument = steps[position]
            if action == LAUNCH:
                self._launch(device, argument)
            elif not self._can_pass(device, thread, action, argument):
                break
            position += 1
            if one:
                self._wake(device, thread)
                break
        device.step[thread] = position

    def _can_pass(self, device: QueueingDevice, thread: int, action: int, argument) -> bool:
        """Perform an action of a thread if it need not wait. Returns False if it waits; it is then woken later."""
        if action == HOST_WAIT:
            if not device.complete[argument]:
                device.waiting.setdefault(argument, []).append(~thread)
                return False
        elif action == BEGIN:
            return device.posted[thread] >= argument
        elif action == POST:
            device.posted[argument] += 1
            self._wake(device, argument)
        elif action == END:
            device.done[thread] += 1
            waits, device.waits_of_threads = device.waits_of_threads, []
            for awaited, waiter in waits:
                if awaited == thread:
                    self._wake(device, waiter)
                else:
                    device.waits_of_threads.append((awaited, waiter))
        elif action == AWAIT:
            awaited, count = argument
            if device.done[awaited] < count:
                device.waits_of_threads.append((awaited, thread))
                return False
        elif action == MEET:
            return self._meet(device, thread, (*argument, *device.coordinates[1:]))
        return True

    def _meet(self, device: QueueingDevice, thread: int, key: tuple) -> bool:
        hosts = self._met.setdefault(key, [])
        if device not in hosts:
            hosts.append(device)
            if len(hosts) == 2:
                self._wake(hosts[0], thread)
        return len(hosts) == 2

    def _launch(self, device: QueueingDevice, operation: int) -> None:
        queue = device.queue_of_stream[device.operations.stream[operation]]
        device.queues[queue].append(operation)
        if device.head[queue] == len(device.queues[queue]) - 1:
            self._issue.append((device, queue))

    # --- devices

    def blocked_by(self, device: QueueingDevice, queue: int) -> int:
        """The operation that the head of a queue awaits; NONE if the queue is empty or its head can be issued."""
        if device.head[queue] == len(device.queues[queue]):
            return NONE
        operations, head = device.operations, device.queues[queue][device.head[queue]]
        for needed in (operations.before[head], operations.after[head]):
            if needed != NONE and not device.complete[needed]:
                return needed
        return NONE

    def _advance(self, device: QueueingDevice, queue: int) -> None:
        """Issue operations from the head of a queue until one of them has to wait."""
        launched, operations, complete = device.queues[queue], device.operations, device.complete
        before, after, joint = operations.before, operations.after, operations.joint
        while device.head[queue] < len(launched):
            operation = launched[device.head[queue]]
            for needed in (before[operation], after[operation]):
                if needed != NONE and not complete[needed]:
                    device.waiting.setdefault(needed, []).append(queue)
                    return
            device.head[queue] += 1
            if joint[operation] is None:
                self._complete(device, operation)
            else:
                self._join(device, operation)

    def _join(self, device: QueueingDevice, operation: int) -> None:
        members, _, num_ranks = device.operations.joint[operation]
        joined = self._joined.setdefault(self.key(device, operation), [])
        joined.append((device, operation))
        if len(joined) == self.num_members(members, num_ranks):
            for member, its_operation in joined:
                self._complete(member, its_operation)

    def key(self, device: QueueingDevice, operation: int) -> tuple:
        """The key of a collective: the same for all its members, and different from any other collective's."""
        members, which, _ = device.operations.joint[operation]
        _, i, k = device.coordinates
        if members == SAME_PLACE:
            return which, i, k
        return which, NONE if members != DATA else i, NONE if members != TENSOR else k

    def num_members(self, members: int, num_ranks: int) -> int:
        tensor, data = self.degrees
        if members == SAME_PLACE:
            return num_ranks
        return num_ranks * (1 if members == DATA else tensor) * (1 if members == TENSOR else data)

    def joined(self, device: QueueingDevice, operation: int) -> list[QueueingDevice]:
        """The ranks that have issued a collective so far."""
        return [member for member, _ in self._joined.get(self.key(device, operation), [])]

    def _complete(self, device: QueueingDevice, operation: int) -> None:
        device.complete[operation] = True
        for waiter in device.waiting.pop(operation, ()):
            if waiter < 0:
                self._wake(device, ~waiter)
            else:
                self._issue.append((device, waiter))


# --- the message for a deadlock

_QUEUE, _THREAD = "queue", "thread"
_Node = tuple[str, QueueingDevice, int]  # the head of a queue, or a thread


def explain(compact: CompactProgram, execution: QueueExecution, where: str) -> ProgramError:
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
