"""Moves of saved activations between the two ranks of a pair: EVICT, ACCEPT, RETURN and LOAD on one rank.

Problem: a microbatch's saved activations go from a stage to its pair and back while both ranks compute (BPipe, section
3.2). Neither rank may hold more than the bound at any moment, whichever rank is faster. The evictor's backward must not
read its activations before they are back.

Solution: `program.lane_order` defines the meaning of the four instructions. Each only requests a move. A thread
executes the moves in order (`MoveQueue`), over one connection with the pair (`GlooMoveLink`):

    EVICT    packs the saved tensors into a buffer, frees them, sends the buffer
    ACCEPT   receives into a buffer
    RETURN   sends that buffer
    LOAD     receives into a buffer, from which the backward then reads

Computations wait for as many moves as `MoveOrder` says, and nothing else waits. The move thread also packs, while the
rank computes. That is safe for three reasons: from the request until the load the graph refuses to return the moved
tensors (`SavedTensors`), nothing writes to a saved tensor, and a tensor that a later forward also saves stays in place.

The evictor chooses the size of a stage's buffers and sends it before its first eviction. Buffers are made for the worst
timing that the row allows, so their number depends only on the program and not on which rank is faster.

`SavedMicrobatches` counts the microbatches that a rank saves at once. The compute thread counts forwards and backwards.
The move thread counts moves when they are posted and complete. The checker proves the highest possible count. A
microbatch with a split backward is saved until the end of its W. From the end of its I on, the stage keeps only the
tensors that the weight gradients need: the microbatch then counts as deferred as well, with the bytes of these tensors.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor

from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.program.lane_order import MoveOrder, Pairs
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.contract.stage import Microbatch, Stage
from megatron.pipeline.runtime.transport.channels import Channels, TransferError
from megatron.pipeline.runtime.transport.lane import MoveQueue


class DeferredBytes:
    """Counts the bytes that all stages of a rank together keep between I and W.

    Attributes:
        now: the bytes at present.
        peak: the most bytes so far.
    """

    def __init__(self) -> None:
        self.now = self.peak = self._recent_peak = 0

    def add(self, num_bytes: int) -> None:
        """Add `num_bytes`, which may be negative."""
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        self._recent_peak = max(self._recent_peak, self.now)

    def take_recent_peak(self) -> int:
        """Return the maximum since the last call, or since the start."""
        peak, self._recent_peak = self._recent_peak, self.now
        return peak


class SavedMicrobatches:
    """Counts saved microbatches, per stage and over all stages of the rank.

    Attributes:
        peaks: stage -> the most microbatches saved at once.
        peak_on_rank: the most microbatches saved at once, summed over all stages.
        deferred_peaks: stage -> the most microbatches between I and W at once.
        deferred_bytes: counter of the bytes saved between I and W.
    """

    def __init__(self, stages: Iterable[int], deferred_bytes: DeferredBytes | None = None) -> None:
        self.peaks = dict.fromkeys(stages, 0)
        self.peak_on_rank = 0
        self.deferred_peaks = dict.fromkeys(self.peaks, 0)
        self.deferred_bytes = deferred_bytes or DeferredBytes()
        self._counts = dict.fromkeys(self.peaks, 0)
        self._count = 0
        self._deferred: dict[tuple[int, int], int] = {}  # (stage, microbatch) -> bytes
        self._lock = threading.Lock()

    def add(self, stage: int) -> None:
        """Count one more microbatch: a forward starts, or a LOAD or ACCEPT is posted."""
        with self._lock:
            self._counts[stage] += 1
            self._count += 1
            self.peaks[stage] = max(self.peaks[stage], self._counts[stage])
            self.peak_on_rank = max(self.peak_on_rank, self._count)

    def remove(self, stage: int) -> None:
        """Count one microbatch less: a backward (if split, its W) has ended, or an EVICT or RETURN is complete."""
        with self._lock:
            self._counts[stage] -= 1
            self._count -= 1
            assert self._counts[stage] >= 0

    def defer(self, stage: int, microbatch: int, num_bytes: int) -> None:
        """Record the end of a microbatch's I, and the bytes saved for its W."""
        with self._lock:
            self._deferred[stage, microbatch] = num_bytes
            self.deferred_bytes.add(num_bytes)
            count = sum(each == stage for each, _ in self._deferred)
            self.deferred_peaks[stage] = max(self.deferred_peaks[stage], count)

    def end_deferred(self, stage: int, microbatch: int) -> None:
        """Record the end of a microbatch's W."""
        with self._lock:
            self.deferred_bytes.add(-self._deferred.pop((stage, microbatch)))

    def deferred_of(self, stage: int) -> list[int]:
        """Return the microbatches between I and W at a stage, ascending."""
        return sorted(microbatch for at, microbatch in self._deferred if at == stage)


_Key = tuple[int, int]  # stage, microbatch


@dataclass(slots=True)
class _ArrivingActivations:
    """The arriving activations of a microbatch. The buffer is taken when the move begins."""

    buffer: Tensor | None = None


class ActivationTransfers:
    """The moves of this rank's stages.

    Args:
        channels: the rank's links.
        memory: the activation memory with which the stages were built.
        saved: counter of the saved microbatches.
        queue: runs the moves in order.
        order: how many moves a computation waits for.
        pairs: which stages exchange activations.
        timeout: how long a computation waits for its moves.
    """

    def __init__(
        self,
        channels: Channels,
        memory: ActivationMemory,
        saved: SavedMicrobatches,
        queue: MoveQueue,
        *,
        order: MoveOrder,
        pairs: Pairs,
        timeout: timedelta,
    ) -> None:
        self._channels = channels
        self._link = channels.move_link
        self._memory = memory
        self._saved = saved
        self._queue = queue
        self._pairs = pairs
        self._timeout = timeout.total_seconds()
        self._order = order
        self._sizes: dict[int, int] = {}  # own stage -> bytes of its buffers
        self._lent_sizes: dict[int, int] = {}  # the same for stages of the pair; used only on the move thread
        self._lent: dict[_Key, _ArrivingActivations] = {}
        self._loading: dict[_Key, _ArrivingActivations] = {}
        self._loaded: dict[_Key, Tensor] = {}  # buffers of microbatches whose backward has not ended
        self._num_loaded: Counter[int] = Counter()  # size -> requested loads whose backward has not ended
        self.waiting: tuple[Instruction, int] | None = None
        """(the move for which a computation waits, the global rank at its other end); None if none waits."""

    @property
    def num_incomplete(self) -> int:
        return self._queue.num_incomplete

    @property
    def current(self) -> Instruction | None:
        """The move that this rank's queue executes now."""
        return self._queue.current

    # -- requests -----------------------------------------------------------------------------------------------------

    def evict(self, stage: Stage, microbatch: Microbatch, instruction: Instruction) -> None:
        eviction = stage.evict(microbatch)
        size = eviction.num_bytes
        is_first = instruction.stage not in self._sizes
        self._sizes[instruction.stage] = size
        self._memory.pool.reserve(self._num_loaded[size] + 1, size)

        def move() -> list[Tensor]:
            buffer = eviction.pack()
            if is_first:
                self._transfer(instruction, lambda: self._link.send_size(size))
            self._transfer(instruction, lambda: self._link.send(buffer, microbatch.index))
            self._saved.remove(instruction.stage)
            return eviction.held

        self._request(instruction, move)

    def accept(self, instruction: Instruction) -> None:
        key, evictor = _key(instruction), self._pairs.of_stage(instruction.stage)
        arrival = self._lent[key] = _ArrivingActivations()

        def move() -> None:
            self._saved.add(instruction.stage)
            if evictor not in self._lent_sizes:
                self._lent_sizes[evictor] = self._transfer(instruction, self._link.receive_size)
            arrival.buffer = self._memory.take_buffer(self._lent_sizes[evictor])
            self._transfer(instruction, lambda: self._link.receive(arrival.buffer, instruction.microbatch))

        self._request(instruction, move)

    def give_back(self, instruction: Instruction) -> None:
        arrival = self._lent.pop(_key(instruction), None)
        if arrival is None:
            raise _missing(instruction)

        def move() -> None:
            self._transfer(instruction, lambda: self._link.send(arrival.buffer, instruction.microbatch))
            arrival.buffer = None
            self._saved.remove(instruction.stage)

        self._request(instruction, move)

    def load(self, instruction: Instruction) -> None:
        if instruction.stage not in self._sizes:
            raise _missing(instruction)
        size = self._sizes[instruction.stage]
        self._num_loaded[size] += 1
        self._memory.pool.reserve(self._num_loaded[size], size)
        arrival = self._loading[_key(instruction)] = _ArrivingActivations()

        def move() -> None:
            self._saved.add(instruction.stage)
            arrival.buffer = self._memory.take_buffer(size)
            self._transfer(instruction, lambda: self._link.receive(arrival.buffer, instruction.microbatch))

        self._request(instruction, move)

    def _request(self, instruction: Instruction, move: Callable[[], list[Tensor] | None]) -> None:
        assert self._link is not None, f"{instruction} on a rank without a pair"
        self._order.awaited(instruction)
        self._queue.request(instruction, move)

    def _transfer(self, instruction: Instruction, call: Callable[[], int | None]) -> int | None:
        """Call the link on the move thread. An error of the link becomes a TransferError for a lost peer."""
        try:
            return call()
        except RuntimeError as error:
            own, peer = self._names(instruction)
            raise TransferError(
                f"{own} lost {peer} in {instruction}: {error}", peer_rank=self._peer_rank(instruction), timed_out=False
            ) from error

    # -- computations -------------------------------------------------------------------------------------------------

    def wait_for(self, computation: Instruction) -> bool:
        """Wait until the moves that `computation` needs are complete. Return whether there was anything to wait for.

        On CUDA the host waits until the moves are queued on the device, and the current stream waits until they are
        done. Raises TransferError after the timeout, or the error that a move raised.
        """
        needed = self._order.awaited(computation)
        if self._queue.num_complete >= needed:
            return self._queue.follow(needed)
        move = self._queue.incomplete_move(needed)
        if move is not None:
            self.waiting = move, self._peer_rank(move)
            if not self._queue.wait(needed, self._timeout):
                raise self._overdue(computation, move)
            self.waiting = None
        self._queue.follow(needed)
        return True

    def finish_load(self, stage: Stage, microbatch: Microbatch, computation: Instruction) -> None:
        """Give loaded activations, if any, to the stage. Called after `wait_for`, before a recompute or backward."""
        key = _key(computation)
        arrival = self._loading.pop(key, None)
        if arrival is not None:
            self._loaded[key] = arrival.buffer  # hold it until `mark_used`: kernels still read it
            stage.load(microbatch, arrival.buffer)

    def end_backward(self, stage: int, microbatch: int) -> None:
        """Drop the buffer that was loaded for the backward."""
        buffer = self._loaded.pop((stage, microbatch), None)
        if buffer is not None:
            self._num_loaded[self._sizes[stage]] -= 1
            self._memory.pool.mark_used(buffer)

    def settle(self) -> None:
        """Make the current stream wait for all moves, and drop their tensors. Called while drained."""
        self._queue.follow(self._queue.num_complete)

    def abandon(self, timeout: float) -> bool:
        """Stop the thread after the connections were broken, and drop its moves.

        Returns whether the thread has ended within `timeout` seconds.
        """
        has_ended = self._queue.abandon(timeout)
        self._link = None
        return has_ended

    def close(self, timeout: float = 5.0) -> None:
        self._queue.close(timeout)

    # -- names --------------------------------------------------------------------------------------------------------

    def _names(self, move: Instruction) -> tuple[str, str]:
        peer = self._pairs.of_stage(move.stage)
        return self._channels.name_of(move.stage), self._channels.name_of(peer)

    def _peer_rank(self, move: Instruction) -> int:
        return self._channels.global_rank_of(self._pairs.of_stage(move.stage))

    def _overdue(self, computation: Instruction, move: Instruction) -> TransferError:
        own, peer = self._names(move)
        direction = "to" if move.kind.row.saved < 0 else "from"
        current = self._queue.current
        behind = f", behind {current}" if current is not None and current != move else ""
        message = f"{own} waited {self._timeout:g} s in {computation} for {move} {direction} {peer}{behind}"
        return TransferError(message, peer_rank=self._peer_rank(move), timed_out=True)


def _key(instruction: Instruction) -> _Key:
    return instruction.stage, instruction.microbatch


def _missing(instruction: Instruction) -> RuntimeError:
    (awaited,) = instruction.kind.row.awaits
    missing = f"{instruction.stage}{awaited.value}{instruction.microbatch}"
    return RuntimeError(f"{instruction} needs {missing}, which the program has not posted before it")
