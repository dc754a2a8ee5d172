"""Channels: where the transfers of a rank's stages go, and who is to blame when one does not come.

A channel is one link per directed edge of the pipeline and kind of traffic: activations from stage s to s+1, gradients
from s+1 to s. Stages on the same rank need none: the executor hands tensors over. Two paired ranks have one more link,
for saved activations (`move_link`), which the thread of the moves alone uses. Links are made in one order that every
rank computes alike, so that start-up cannot deadlock, and edges that share no rank are made at the same time (an edge
colouring), so that start-up does not grow with the pipeline.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store

from megatron.backend.streams import Event, streams_of
from megatron.pipeline.instruction import SENDS, Instruction, Kind
from megatron.pipeline.moves import partner_of_rank
from megatron.pipeline.runtime.links import LINKS, Link, Receive
from megatron.pipeline.runtime.move_links import MOVE_LINKS, MoveLink
from megatron.pipeline.runtime.stage import Stage, TensorSpec

_num_built: Counter[tuple[int, ...]] = (
    Counter()
)  # pipelines built in this process per list of ranks: part of the link names


class TransferError(RuntimeError):
    """A transfer broke or did not come in time. `peer_rank` is the global rank at its other end."""

    def __init__(self, message: str, *, peer_rank: int, timed_out: bool) -> None:
        super().__init__(message)
        self.peer_rank = peer_rank
        self.timed_out = timed_out


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A tensor that a stream waits for: when the host came there, and what for."""

    event: Event
    since: float
    kind: Kind
    stage: int
    microbatch: int
    during: Instruction


def edges_in_order(rank_of_stage: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """(letter, source stage, destination stage) of every edge, in the one order in which all ranks make their links.

    Edges between the same colour of rank pairs touch disjoint ranks: with one stage per rank, first the pairs (0, 1),
    (2, 3), ..., then (1, 2), (3, 4), ...
    """
    colours_at: dict[int, set[int]] = {}
    coloured = []
    for stage in range(len(rank_of_stage) - 1):
        ends = rank_of_stage[stage], rank_of_stage[stage + 1]
        taken = colours_at.setdefault(ends[0], set()) | colours_at.setdefault(ends[1], set())
        colour = next(colour for colour in range(len(taken) + 1) if colour not in taken)
        for end in ends:
            colours_at[end].add(colour)
        coloured.append((colour, stage))
    for _, stage in sorted(coloured):
        yield "F", stage, stage + 1
        yield "B", stage + 1, stage


class Channels:
    """The links of one rank of a pipeline.

    `ranks`: global ranks of the pipeline, by pipeline rank. `rank_of_stage`: stage -> pipeline rank. `stages`: the
    stages of this rank. `timeout`: how long a transfer may take. `backend`: "gloo" or "nccl". `store`: where ranks
    meet; needed when the pipeline has more than one rank. `moves_activations`: connect the pairs, too.
    """

    def __init__(
        self,
        *,
        ranks: Sequence[int],
        rank_of_stage: Sequence[int],
        rank: int,
        stages: Sequence[Stage],
        timeout: timedelta,
        backend: str,
        device: torch.device,
        store: Store | None,
        moves_activations: bool = False,
        on_error: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._ranks = tuple(ranks)
        self._rank_of_stage = tuple(rank_of_stage)
        self._timeout = timeout
        self._posted: dict[tuple[Kind, int, int], Receive] = {}
        self._streams = streams_of(device)
        self._arrivals = self._streams.make()  # waits for receives alone, in the order of the row
        self._arriving: deque[_Arrival] = deque()
        self._watcher: int | None = None  # the thread that asks what is overdue
        self._report = on_error
        self._error: TransferError | None = None
        self._links: dict[tuple[Kind, int], tuple[Link, TensorSpec]] = {}
        self._peers: dict[tuple[Kind, int], int] = {}
        self.waiting: tuple[Kind, int, int] | None = None
        own = {stage.index: stage for stage in stages}
        link_class = LINKS.get((backend, device.type))
        if link_class is None:
            raise ValueError(
                f"transfers of {device.type} tensors over {backend} are not possible; use gloo, or nccl with CUDA"
            )
        _num_built[self._ranks] += 1
        scope = f"pipeline/{'-'.join(map(str, self._ranks))}/{_num_built[self._ranks]}"
        self._store, self._end = store, f"{scope}/end"
        options = {"store": store, "timeout": timeout, "device": device}
        for letter, source, destination in edges_in_order(self._rank_of_stage):
            kinds = Kind(f"SEND_{letter}"), Kind(f"RECV_{letter}")
            own_stage = own.get(source) or own.get(destination)
            if own_stage is not None:
                outward = (letter == "F") == (own_stage.index == source)
                spec = own_stage.output_spec if outward else own_stage.input_spec
                self._connect(kinds, source, destination, spec, rank, f"{scope}/{letter}", link_class, options)
        self._ahead = [link for link, _ in self._links.values() if not link.host_waits]
        self.move_link: MoveLink | None = None  # None: no pair, or nothing is to move
        partner = partner_of_rank(self._rank_of_stage, rank) if moves_activations else rank
        if partner != rank:
            pair = sorted((rank, partner))
            name = f"{scope}/moves/{pair[0]}-{pair[1]}"
            self.move_link = MOVE_LINKS[backend, device.type](name, member=pair.index(rank), **options)

    def _connect(self, kinds, source, destination, spec, rank, name, link_class, options) -> None:
        sending, receiving = kinds
        sends, receives = (self._rank_of_stage[stage] == rank for stage in (source, destination))
        if sends == receives:
            return
        key = (sending, source) if sends else (receiving, destination)
        name = f"{name}/{source}-{destination}"
        link = link_class(name, sends=sends, on_error=lambda error: self._broken(key, error), **options)
        if sends:
            self._links[sending, source] = link, spec
            self._peers[sending, source] = destination
        if receives:
            self._links[receiving, destination] = link, spec
            self._peers[receiving, destination] = source

    def name_of(self, stage: int) -> str:
        """ "rank 6 (stage 2)": the global rank that runs a stage."""
        return f"rank {self.global_rank_of(stage)} (stage {stage})"

    def global_rank_of(self, stage: int) -> int:
        return self._ranks[self._rank_of_stage[stage]]

    def peer_of(self, kind: Kind, stage: int) -> int:
        """Global rank at the other end of a channel."""
        return self.global_rank_of(self._peers[kind, stage])

    def post_send(self, kind: Kind, stage: int, microbatch: int, tensor: Tensor) -> None:
        """Start sending; returns at once. `tensor` may be freed by its owner, but not written."""
        if self._error is not None:
            raise self._error
        link, spec = self._links[kind, stage]
        if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
            raise ValueError(
                f"stage {stage} sends {tuple(tensor.shape)} {tensor.dtype} where its specification says {spec.shape} "
                f"{spec.dtype}; every microbatch must have the same shape"
            )
        try:
            link.send(tensor if tensor.is_contiguous() else tensor.contiguous(), microbatch)
        except RuntimeError as error:
            raise self._transfer_error(kind, stage, f"{stage}{kind.value}{microbatch}", error) from error

    def post_receive(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Start receiving; returns at once."""
        for link in self._ahead:
            link.drop_read()
        link, spec = self._links[kind, stage]
        try:
            self._posted[kind, stage, microbatch] = link.receive(spec, microbatch)
        except RuntimeError as error:
            raise self._transfer_error(kind, stage, f"{stage}{kind.value}{microbatch}", error) from error

    def wait(self, kind: Kind, stage: int, microbatch: int, during: Instruction) -> Tensor:
        """The tensor of a posted receive. Raises TransferError when it does not come in time or the peer is gone."""
        receive = self._posted.pop((kind, stage, microbatch), None)
        if receive is None:
            raise RuntimeError(
                f"{during} needs {stage}{kind.value}{microbatch}, which the program has not posted before it"
            )
        self.waiting = kind, stage, microbatch
        start = time.monotonic()
        try:
            if self._links[kind, stage][0].host_waits:
                tensor = receive.wait(self._timeout)
            else:
                tensor = self._follow(receive, kind, stage, microbatch, during)
        except RuntimeError as error:
            timed_out = time.monotonic() - start >= 0.9 * self._timeout.total_seconds()
            raise self._wait_error(kind, stage, microbatch, during, None if timed_out else error) from error
        self.waiting = None
        return tensor

    def _follow(self, receive: Receive, kind: Kind, stage: int, microbatch: int, during: Instruction) -> Tensor:
        """The current stream waits for the tensor, and what has not arrived is known without holding it."""
        while self._arriving and self._streams.is_done(self._arriving[0].event):
            self._arriving.popleft()
        with self._streams.on(self._arrivals):
            tensor = receive.wait(self._timeout)
            event = self._streams.record()
        self._streams.wait(event)
        self._arriving.append(_Arrival(event, time.monotonic(), kind, stage, microbatch, during))
        return tensor

    def _meet_at_the_end(self, timeout: float) -> None:
        """Until all ranks are done with their transfers: a group that one end has left may fail the other."""
        deadline = time.monotonic() + timeout
        num_here = self._store.add(self._end, 1)
        while num_here < len(self._ranks) and time.monotonic() < deadline:
            time.sleep(0.01)
            num_here = self._store.add(self._end, 0)

    def _wait_error(self, kind, stage, microbatch, during, error: Exception | None) -> TransferError:
        peer = self._peers[kind, stage]
        who, whom, what = self.name_of(stage), self.name_of(peer), f"{stage}{kind.value}{microbatch}"
        if error is None:
            message = f"{who} waited {self._timeout.total_seconds():g} s in {during} for {what} from {whom}"
        else:
            message = f"{who} lost {whom} in {during} while it waited for {what}: {error}"
        return TransferError(message, peer_rank=self.peer_of(kind, stage), timed_out=error is None)

    def _transfer_error(self, kind: Kind, stage: int, what: str, error: Exception) -> TransferError:
        peer = self._peers[kind, stage]
        message = f"{self.name_of(stage)} lost {self.name_of(peer)} in {what}: {error}"
        return TransferError(message, peer_rank=self.peer_of(kind, stage), timed_out=False)

    def _broken(self, key: tuple[Kind, int], error: Exception) -> None:
        """A send could not be finished: seen on the link's thread, raised by the next send."""
        self._error = self._transfer_error(*key, f"a {key[0].value} of stage {key[1]} that was not read", error)
        self._report(self._error)

    def check_overdue(self) -> TransferError | None:
        """Where waiting blocks a stream and not the host (NCCL): the first receive that is overdue, else None.

        For the guard's thread, which only looks.
        """
        if self._watcher != threading.get_ident():
            self._watcher = threading.get_ident()
            self._streams.enter_thread()
        for each in list(self._arriving):
            try:
                is_here = self._streams.is_done(each.event)
            except RuntimeError:  # the device has failed, which the thread that computes will tell
                return None
            if not is_here:
                if time.monotonic() - each.since <= self._timeout.total_seconds():
                    return None
                return self._wait_error(each.kind, each.stage, each.microbatch, each.during, None)
        return None

    def num_unread_sends(self) -> int:
        """Sent tensors whose storage is still held because the peer has not read them."""
        return sum(link.num_unread() for (kind, _), (link, _) in self._links.items() if kind in SENDS)

    def close(self, timeout: float = 5.0) -> None:
        """Wait for unread sends, stop the threads, end the groups. Links cannot be used afterwards."""
        self._streams.finish(self._streams.record())
        if self._ahead:
            self._meet_at_the_end(timeout)
        for link, _ in self._links.values():
            link.close(timeout)
        self._links.clear()
        if self.move_link is not None:
            self.move_link.close()
            self.move_link = None
