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
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.pipeline.check.device_operations import (
    AWAIT,
    BEGIN,
    DATA,
    END,
    HOST_WAIT,
    LAUNCH,
    MAIN,
    MEET,
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
