"""Links of a given bandwidth and latency between processes of one computer, for the benchmarks.

Problem: the loopback device is fast, and with many bytes a benchmark would measure the copies that two cores make for
eight processes instead of the schedule.

Solution: few bytes are really sent, and each transfer is delayed to the required time. All processes of a computer read
one clock. So the sender can compute when a transfer would have started (both ends have posted it and the link is free),
when it would leave the link, and when it would arrive; the receiver returns the tensor at that time. As long as the
real bytes travel faster, delays of the machine do not add up. `megatron.pipeline.simulate` models a channel in the same
way. Register the classes in `LINKS` and `MOVE_LINKS` under a backend's name for the engine to use them.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.stages.emulated import sleep_for
from megatron.pipeline.runtime.transport.links import FOREVER, NUM_TAGS, GlooLink, GlooReceive, Receive
from megatron.pipeline.runtime.transport.move_links import GlooMoveLink

_SENDER, _RECEIVER = 0, 1
_POSTED, _DUE = NUM_TAGS, 2 * NUM_TAGS  # offsets that are added to a microbatch's tag


class PacedLink(GlooLink):
    """A link between two stages with a given occupation and latency.

    `forward`, `backward`, `latency`: seconds by edge. `edges`: the two stages of each edge; None: those of a chain. The
    edge and the direction follow from the link's name, which ends in source and destination stage (`Channels`).
    """

    def __init__(
        self,
        name: str,
        store: dist.Store,
        *,
        forward: Sequence[float],
        backward: Sequence[float],
        latency: Sequence[float],
        edges: Sequence[tuple[int, int]] | None = None,
        **options: Any,
    ) -> None:
        source, destination = map(int, name.rsplit("/", 1)[1].split("-"))
        low, high = sorted((source, destination))
        edge = low if edges is None else edges.index((low, high))
        self._occupation = (forward if source == low else backward)[edge]
        self._latency = latency[edge]
        self._free_at = 0.0
        super().__init__(name, store, **options)

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        self._worker.put((tensor.detach(), tag % NUM_TAGS, time.monotonic()))

    def _finish_send(self, item: tuple[torch.Tensor, int, float]) -> None:
        alias, tag, posted = item
        posted_there = torch.empty(1, dtype=torch.float64)
        self._group.recv([posted_there], _RECEIVER, tag + _POSTED).wait(FOREVER)
        self._free_at = max(posted, posted_there.item(), self._free_at) + self._occupation
        due = torch.tensor([self._free_at + self._latency], dtype=torch.float64)
        sends = [self._group.send([due], _RECEIVER, tag + _DUE), self._group.send([alias], _RECEIVER, tag)]
        for send in sends:
            send.wait(self._timeout)

    def receive(self, spec: TensorSpec, tag: int) -> Receive:
        receive = _PacedReceive(self._group, lambda: torch.empty(spec.shape, dtype=spec.dtype), tag)
        self._worker.put(receive)
        return receive


class _PacedReceive(GlooReceive):
    __slots__ = ("_due", "_due_work", "_time", "_told")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._time = torch.tensor([time.monotonic()], dtype=torch.float64)
        self._due = torch.empty(1, dtype=torch.float64)

    def _post(self) -> None:
        try:
            self._told = self._group.send([self._time], _SENDER, self._tag + _POSTED)
            self._due_work = self._group.recv([self._due], _SENDER, self._tag + _DUE)
        except RuntimeError as error:
            self._error = error
        else:
            super()._post()

    def wait(self, timeout: timedelta) -> torch.Tensor:
        tensor = super().wait(timeout)
        self._due_work.wait(timeout)
        self._told.wait(timeout)
        sleep_for(self._due.item() - time.monotonic())
        return tensor


class PacedMoveLink(GlooMoveLink):
    """A link for moves that sends at once, and holds the connection until `seconds` after both ends have begun."""

    def __init__(self, name: str, store: dist.Store, *, seconds: float, **options: Any) -> None:
        super().__init__(name, store, **options)
        self._seconds = seconds

    def send(self, buffer: torch.Tensor, tag: int) -> None:
        super().send(torch.empty(1), tag)  # returns when both ends have begun the move
        start = time.monotonic()
        super().send(buffer, tag)
        self._hold(start)

    def receive(self, buffer: torch.Tensor, tag: int) -> None:
        super().receive(torch.empty(1), tag)
        start = time.monotonic()
        super().receive(buffer, tag)
        self._hold(start)

    def _hold(self, start: float) -> None:
        time.sleep(max(0.0, start + self._seconds - time.monotonic()))
