"""Channels: the links of a rank's stages, and the errors of late or broken transfers.

Each edge of the pipeline has a link for activations, from source to target, and a link for gradients, from target to
source. Stages on the same rank need no link: `Exchange` passes their tensors on. Two paired ranks have one more link
for saved activations (`move_link`), which only the move thread uses. All ranks make their links in the same order, so
that start-up cannot deadlock. Links of edges that share no rank are made at the same time (by an edge colouring), so
that the time of start-up does not grow with the pipeline.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor
from torch.distributed import Store

from megatron.backend.streams import Event, streams_of
from megatron.pipeline.program.copies import Copy, pair_stages_of
from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.program.instruction import SENDS, Instruction, Kind
from megatron.pipeline.program.lane_order import Pairs
from megatron.pipeline.runtime.contract.meetings import fresh_name, meets
from megatron.pipeline.runtime.contract.stage import GraphStage, Stage
from megatron.pipeline.runtime.contract.tensors import TensorSpec, as_memory
from megatron.pipeline.runtime.transport.links import LINKS, Link, Receive
from megatron.pipeline.runtime.transport.move_links import MOVE_LINKS, GlooMoveLink

_LOOK_EVERY = 0.0005  # polling interval in seconds, while a frozen stage is too far ahead

_Awaited = tuple[Kind, int, int, None, int | None]  # the arguments of an Instruction


class TransferError(RuntimeError):
    """A transfer broke or timed out. `peer_rank` is the global rank at its other end."""

    def __init__(self, message: str, *, peer_rank: int, timed_out: bool) -> None:
        super().__init__(message)
        self.peer_rank = peer_rank
        self.timed_out = timed_out


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A tensor for which a stream waits.

    Attributes:
        event: done when the tensor has arrived.
        since: the host's time at the start of the wait.
        awaited: the receive.
        during: the instruction that waits.
    """

    event: Event
    since: float
    awaited: _Awaited
    during: Instruction


def edges_in_order(rank_of_stage: Sequence[int], edges: Sequence[Edge] = ()) -> Iterator[tuple[str, int, int]]:
    """Yield (letter, sending stage, receiving stage) of every link, in the order in which all ranks make their links.

    Without `edges` the stages are a chain. Edges of one colour touch disjoint ranks. With one stage per rank, first
    come the pairs (0, 1), (2, 3), ..., then (1, 2), (3, 4), ...
    """
    colours_at: dict[int, set[int]] = {}
    coloured = []
    for edge in StageGraph.of(len(rank_of_stage), edges).edges:
        ends = rank_of_stage[edge.source], rank_of_stage[edge.target]
        taken = colours_at.setdefault(ends[0], set()) | colours_at.setdefault(ends[1], set())
        colour = next(colour for colour in range(len(taken) + 1) if colour not in taken)
        for end in ends:
            colours_at[end].add(colour)
        coloured.append((colour, edge))
    for _, edge in sorted(coloured):
        yield "F", edge.source, edge.target
        if edge.gradient:
            yield "B", edge.target, edge.source


_Key = tuple[Kind, int, int | None]  # of a link: kind, own stage, other stage (None if the kind has only one)


class Channels:
    """The links of one rank of a pipeline.

    Args:
        ranks: global ranks of the pipeline, by pipeline rank.
        rank_of_stage: stage -> pipeline rank.
        edges: the edges between stages; empty: a chain.
        copies: for each stage, the copy of a model's stage that it is, for names and pairs; empty: there are no copies.
        rank: the pipeline rank of this process.
        stages: the stages of this rank, by their numbers in the program.
        timeout: how long a transfer may take.
        backend: "gloo" or "nccl".
        device: the device of the tensors.
        store: the store through which ranks connect. Needed when the pipeline has more than one rank.
        moves_activations: connect paired ranks, too.
        on_error: called when a send fails on a link's thread.

    Attributes:
        bytes_sent: bytes sent to other ranks so far.
        move_link: the link to the paired rank; None if there is no pair or nothing to move.

    Raises:
        ValueError: `backend` cannot transfer tensors of `device`.
    """

    def __init__(
        self,
        *,
        ranks: Sequence[int],
        rank_of_stage: Sequence[int],
        edges: Sequence[Edge] = (),
        copies: Sequence[Copy] = (),
        rank: int,
        stages: Mapping[int, Stage],
        timeout: timedelta,
        backend: str,
        device: torch.device,
        store: Store | None,
        moves_activations: bool = False,
        on_error: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._ranks = tuple(ranks)
        self._rank_of_stage = tuple(rank_of_stage)
        self._copies = tuple(copies)
        self._timeout = timeout
        self._graph = StageGraph.of(len(self._rank_of_stage), edges)
        self._posted: dict[tuple[Kind, int, int | None, int], Receive] = {}
        self._streams = streams_of(device)
        self._arrivals = self._streams.make()  # a stream that only waits for receives, in the order of the row
        self._arriving: deque[_Arrival] = deque()
        self._watcher: int | None = None  # the thread that calls `check_overdue`
        self._report = on_error
        self._error: TransferError | None = None
        self.bytes_sent = 0
        self._links: dict[_Key, tuple[Link, TensorSpec | None]] = {}
        self._peers: dict[_Key, int] = {}
        self._waiting: _Awaited | None = None
        link_class = LINKS.get((backend, device.type))
        if link_class is None:
            raise ValueError(
                f"transfers of {device.type} tensors over {backend} are not possible; use gloo, or nccl with CUDA"
            )
        scope = fresh_name("pipeline", self._ranks)
        self._store, self._end = store, f"{scope}/end"
        options = {"store": store, "timeout": timeout, "device": device}
        for letter, source, destination in edges_in_order(self._rank_of_stage, self._graph.edges):
            sends = source in stages
            if sends == (destination in stages):
                continue  # both stages are on this rank, or none
            own, peer = (source, destination) if sends else (destination, source)
            kind, stage = Kind(f"{'SEND' if sends else 'RECV'}_{letter}"), stages[own]
            key = kind, own, self._graph.named_peer(Instruction(kind, own), peer)
            name = f"{scope}/{letter}/{source}-{destination}"
            link = link_class(name, sends=sends, on_error=partial(self._broken, key), **options)
            spec = None  # a stage of a graph gives one with each transfer
            if not isinstance(stage, GraphStage):
                spec = stage.output_spec if peer > own else stage.input_spec
            self._links[key], self._peers[key] = (link, spec), peer
        self._ahead = [link for link, _ in self._links.values() if not link.host_waits]
        self.move_link: GlooMoveLink | None = None
        pairs = Pairs(self._rank_of_stage, self._graph.num_frozen, pair_stages_of(self._copies))
        partner = pairs.of_rank(rank) if moves_activations else rank
        if partner != rank:
            pair = sorted((rank, partner))
            name = f"{scope}/moves/{pair[0]}-{pair[1]}"
            self.move_link = MOVE_LINKS[backend, device.type](name, member=pair.index(rank), **options)

    @property
    def waiting(self) -> Instruction | None:
        """The receive for which this rank waits, or the send that waits until earlier sends have been read."""
        waiting = self._waiting
        return None if waiting is None else Instruction(*waiting)

    def name_of(self, stage: int) -> str:
        """Return the name of a stage with its global rank, such as "rank 6 (stage 2)".

        A copy has the name of the stage of the model, too, since instructions name the stage of the program.
        """
        of_model = f" of the program, {self._copies[stage].stage} of the model" if self._copies else ""
        return f"rank {self.global_rank_of(stage)} (stage {stage}{of_model})"

    def global_rank_of(self, stage: int) -> int:
        return self._ranks[self._rank_of_stage[stage]]

    def peer_of(self, transfer: Instruction) -> int:
        """Return the global rank at the other end of a transfer."""
        return self.global_rank_of(self._peers[transfer.kind, transfer.stage, transfer.peer])

    def post_send(
        self,
        kind: Kind,
        stage: int,
        microbatch: int,
        tensor: Tensor,
        peer: int | None = None,
        spec: TensorSpec | None = None,
    ) -> None:
        """Start a send and return at once. The caller may then free `tensor`, but not write to it.

        `peer`: the other stage where the kind has several, else None. `spec`: the spec of this transfer; None: the spec
        of a chain's stage. Raises ValueError if `tensor` does not fit the spec, TransferError if a send has failed.
        """
        if self._error is not None:
            raise self._error
        link, usual = self._links[kind, stage, peer]
        spec = spec or usual
        if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
            raise ValueError(
                f"stage {stage} sends {tuple(tensor.shape)} {tensor.dtype} where its specification says {spec.shape} "
                f"{spec.dtype}; every microbatch must have the same shape"
            )
        self.bytes_sent += spec.num_bytes
        try:
            link.send(as_memory(tensor), microbatch)
        except RuntimeError as error:
            raise self._transfer_error((kind, stage, peer), str(Instruction(kind, stage, microbatch, peer=peer)),
                                       error) from None  # fmt: skip

    def wait_until_read(self, send: Instruction, most: int) -> None:
        """Wait until at most `most` of the tensors sent before `send` over the same link are unread.

        Raises TransferError if they are not read in time or a send has failed.
        """
        link, _ = self._links[send.kind, send.stage, send.peer]
        if link.num_unread() <= most:
            return
        self._waiting = send.kind, send.stage, send.microbatch, None, send.peer
        deadline = time.monotonic() + self._timeout.total_seconds()
        while link.num_unread() > most:
            if self._error is not None:
                raise self._error
            if time.monotonic() > deadline:
                who, whom = self.name_of(send.stage), self.name_of(self._peers[send.kind, send.stage, send.peer])
                message = f"{who} waited {self._timeout.total_seconds():g} s in {send} for {whom} to read what was sent"
                raise TransferError(message, peer_rank=self.peer_of(send), timed_out=True)
            time.sleep(_LOOK_EVERY)
        self._waiting = None

    def post_receive(
        self, kind: Kind, stage: int, microbatch: int, peer: int | None = None, spec: TensorSpec | None = None
    ) -> None:
        """Start a receive and return at once. `peer` and `spec`: as for `post_send`."""
        for link in self._ahead:
            link.drop_read()
        link, usual = self._links[kind, stage, peer]
        try:
            self._posted[kind, stage, peer, microbatch] = link.receive(spec or usual, microbatch)
        except RuntimeError as error:
            raise self._transfer_error((kind, stage, peer), str(Instruction(kind, stage, microbatch, peer=peer)),
                                       error) from None  # fmt: skip

    def wait(self, kind: Kind, stage: int, microbatch: int, during: Instruction, peer: int | None = None) -> Tensor:
        """Wait for a posted receive and return its tensor. `during`: the instruction that needs it.

        Over NCCL the current stream waits, not the host. Raises TransferError if the tensor is late or the peer is
        gone, RuntimeError if the receive was not posted.
        """
        receive = self._posted.pop((kind, stage, peer, microbatch), None)
        awaited = kind, stage, microbatch, None, peer
        if receive is None:
            raise RuntimeError(f"{during} needs {Instruction(*awaited)}, which the program has not posted before it")
        self._waiting = awaited
        start = time.monotonic()
        try:
            if self._links[kind, stage, peer][0].host_waits:
                tensor = receive.wait(self._timeout)
            else:
                tensor = self._follow(receive, awaited, during)
        except RuntimeError as error:
            timed_out = time.monotonic() - start >= 0.9 * self._timeout.total_seconds()
            raise self._wait_error(Instruction(*awaited), during, None if timed_out else error) from None
        self._waiting = None
        return tensor

    def take_posted(self, during: Instruction) -> None:
        """Wait for all posted receives, and drop their tensors. Raises as `wait`."""
        for kind, stage, peer, microbatch in list(self._posted):
            self.wait(kind, stage, microbatch, during, peer)

    def _follow(self, receive: Receive, awaited: _Awaited, during: Instruction) -> Tensor:
        """Make the current stream wait for the tensor and return it.

        An event lets `check_overdue` notice a late arrival without holding the tensor.
        """
        while self._arriving and self._streams.is_done(self._arriving[0].event):
            self._arriving.popleft()
        with self._streams.on(self._arrivals):
            tensor = receive.wait(self._timeout)
            event = self._streams.record()
        self._streams.wait(event)
        self._arriving.append(_Arrival(event, time.monotonic(), awaited, during))
        return tensor

    def _wait_error(self, what: Instruction, during: Instruction, error: Exception | None) -> TransferError:
        who, whom = self.name_of(what.stage), self.name_of(self._peers[what.kind, what.stage, what.peer])
        if error is None:
            message = f"{who} waited {self._timeout.total_seconds():g} s in {during} for {what} from {whom}"
        else:
            message = f"{who} lost {whom} in {during} while it waited for {what}: {error}"
        return TransferError(message, peer_rank=self.peer_of(what), timed_out=error is None)

    def _transfer_error(self, key: _Key, what: str, error: Exception) -> TransferError:
        peer = self._peers[key]
        message = f"{self.name_of(key[1])} lost {self.name_of(peer)} in {what}: {error}"
        return TransferError(message, peer_rank=self.global_rank_of(peer), timed_out=False)

    def _broken(self, key: _Key, error: Exception) -> None:
        """Keep and report the error of a failed send, found on the link's thread. The next send raises it."""
        self._error = self._transfer_error(key, f"a {key[0].value} of stage {key[1]} that was not read", error)
        self._report(self._error)

    def check_overdue(self) -> TransferError | None:
        """Return the error of the first overdue receive, or None.

        For links whose waits block a stream and not the host (NCCL). The failure guard's thread calls it.
        """
        if self._watcher != threading.get_ident():
            self._watcher = threading.get_ident()
            self._streams.enter_thread()
        for each in list(self._arriving):
            try:
                is_here = self._streams.is_done(each.event)
            except RuntimeError:  # the device has failed; the compute thread will raise it
                return None
            if not is_here:
                if time.monotonic() - each.since <= self._timeout.total_seconds():
                    return None
                return self._wait_error(Instruction(*each.awaited), each.during, None)
        return None

    def num_unread_sends(self) -> int:
        """Return the number of sent tensors whose storage this rank still holds, because the peer has not read them."""
        return sum(link.num_unread() for key, (link, _) in self._links.items() if key[0] in SENDS)

    def abandon(self, timeout: float) -> None:
        """Stop the threads and end the groups after the connections were broken, without waiting for other ranks."""
        self._posted.clear()
        self._close_links(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Wait for unread sends, at most `timeout` seconds per link. Stop the threads and end the groups.

        The links cannot be used afterwards.
        """
        self._streams.finish(self._streams.record())
        if self._ahead:
            meets(self._store, self._end, len(self._ranks), timeout)  # a rank that leaves a group may fail its peer
        self._close_links(timeout)

    def _close_links(self, timeout: float) -> None:
        for link, _ in self._links.values():
            link.close(timeout)
        self._links.clear()
        if self.move_link is not None:
            self.move_link.close()
            self.move_link = None
