"""The message for a deadlock of devices: sentences that name the circle of waits.

The head of a hardware queue waits for an operation. Either that operation is behind the head of another queue, of the
same rank or of a rank that has not joined the collective; or a thread has not launched it, because the thread waits on
the host for an operation or for another thread. Each of these waits leads to the next one, and the search ends at the
first wait that was visited before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    THREADS,
)

if TYPE_CHECKING:
    from megatron.pipeline.check.compact import CompactProgram, ProgramError
    from megatron.pipeline.check.device_queues import QueueExecution, QueueingDevice

_QUEUE, _THREAD = "queue", "thread"
_Node = tuple[str, "QueueingDevice", int]  # the head of a queue, or a thread


def explain_queue_deadlock(compact: CompactProgram, execution: QueueExecution, where: str) -> ProgramError:
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
        member = self._missing_member(device, needed)
        if member is None:
            return sentence, None
        if member is not device:
            sentence += f", which {_name(member)} has not joined"
        return sentence, self._holder(member, device, needed)

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
            sentence = f"{here} for {self._word(device, argument)}"
            member = self._missing_member(device, argument)
            if member is None:
                return sentence, None
            if member is not device:
                sentence += f", which {_name(member)} has not joined"
            return sentence, self._holder(member, device, argument)
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
