"""What the runtime does for CUDA's sake, taken back: each entry leaves out one wait, or one hold, for a block.

By these the tests know that the stand-in for CUDA finds what it is there for.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import torch

from megatron.backend.streams import Milestone
from megatron.pipeline.runtime.activations.saved_activations import CapturedActivations
from megatron.pipeline.runtime.activations.transfers import ActivationTransfers
from megatron.pipeline.runtime.relay.input_stash import InputStash
from megatron.pipeline.runtime.relay.lanes import Lanes
from megatron.pipeline.runtime.relay.resident_weights import ResidentWeights
from megatron.pipeline.runtime.stages.megatron import relay_update, update
from megatron.pipeline.runtime.stages.megatron.reduction import GradientReduction
from megatron.pipeline.runtime.transport.channels import Channels
from megatron.pipeline.runtime.transport.lane import Chain, MoveQueue
from megatron.pipeline.runtime.transport.links import HostStagedLink, NcclLink
from megatron.pipeline.runtime.transport.move_links import GlooMoveLink, HostStagedMoveLink
from megatron.pipeline.runtime.update import loss_scales
from tests.pipeline.runtime.cuda.recording import Recorder


def early_gradients():
    """A milestone holds up the host alone."""
    return mock.patch.object(Milestone, "wait", lambda self, timeout: self._reached.wait(timeout))


def loaded_buffers():
    """Only the address of what was loaded is kept."""
    finish = ActivationTransfers.finish_load

    def finish_load(self, stage, microbatch, computation):
        finish(self, stage, microbatch, computation)
        key = computation.stage, computation.microbatch
        if key in self._loaded:
            address = self._loaded[key].data_ptr()
            self._loaded[key] = SimpleNamespace(data_ptr=lambda: address)

    return mock.patch.object(ActivationTransfers, "finish_load", finish_load)


def received_tensors():
    """Receives are remembered with their tensors, until somebody polls."""
    follow = Channels._follow

    def remembering(self, receive, *place):
        work, tensor = receive._work, receive._tensor
        self.__dict__.setdefault("remembered", []).append((work, tensor))
        return follow(self, receive, *place)

    return mock.patch.object(Channels, "_follow", remembering)


def posted_reductions():
    """A reduction does not wait for the backwards before it."""
    run = Chain._carry_out
    return mock.patch.object(
        Chain, "_carry_out", lambda self, instruction, call, ready, traced: run(self, instruction, call, None, traced)
    )


def awaited_reductions():
    """A step waits for the host of the chain alone."""
    wait = Chain.wait_for

    def deaf(self, version):
        with self._streams.deaf():
            wait(self, version)

    return mock.patch.object(Chain, "wait_for", deaf)


def host_scale():
    """The loss scale lies on the device."""
    return mock.patch.object(loss_scales, "_to_host", lambda scaler: None)


def host_norm():
    """The norm is read where it is computed."""
    norm = GradientReduction.local_norm_squared
    return mock.patch.object(
        GradientReduction,
        "local_norm_squared",
        lambda self, slot: torch.tensor(norm(self, slot).item(), dtype=torch.float64),
    )


def warm_up():
    """Communicators are connected when they are needed."""
    return mock.patch.object(update, "warm_up", lambda *args, **options: None)


def relay_warm_up():
    """The same where stages come from the host."""
    return mock.patch.object(relay_update.MegatronRelayUpdate, "_warm_up", lambda *args: None)


def gather_warm_up():
    """The same of what fetches gather."""
    return mock.patch.object(ResidentWeights, "_warm_up", lambda *args: None)


def arrivals():
    """The computation does not wait for what it receives."""

    def follow(self, receive, awaited, during):
        with self._streams.on(self._arrivals):
            return receive.wait(self._timeout)

    return mock.patch.object(Channels, "_follow", follow)


def unread_sends():
    """A link forgets what it has posted."""
    return mock.patch.object(NcclLink, "drop_read", lambda self: self._unread.clear())


def staged_copies():
    """The copy to the host does not wait for what it copies."""
    send = HostStagedLink.send

    def early(self, tensor, tag):
        with self._streams.deaf():
            send(self, tensor, tag)

    return mock.patch.object(HostStagedLink, "send", early)


def staged_sends():
    """A move goes out of host memory that the copy may not have reached."""

    def send(self, buffer, tag):
        host = self._staging(len(buffer)).copy_(buffer, non_blocking=True)
        GlooMoveLink.send(self, host, tag)

    return mock.patch.object(HostStagedMoveLink, "send", send)


def staged_receives():
    """A move comes into host memory that the copy before may still read."""

    def receive(self, buffer, tag):
        host = self._staging(len(buffer))
        GlooMoveLink.receive(self, host, tag)
        buffer.copy_(host, non_blocking=True)

    return mock.patch.object(HostStagedMoveLink, "receive", receive)


def watched_thread():
    """The guard's thread does not say on which device it asks."""
    return mock.patch.object(Recorder, "enter_thread", lambda self: None)


def followed_moves():
    """A computation waits for the host of its moves alone."""
    return mock.patch.object(MoveQueue, "follow", lambda self, count: None)


def words_after_the_row():
    """A word of a lane does not wait for what the row gave the device before it."""
    request = Lanes.request

    def early(self, instruction, call):
        streams = self._streams
        self._streams = SimpleNamespace(record=lambda: None, wait=streams.wait, finish=streams.finish)
        try:
            request(self, instruction, call)
        finally:
            self._streams = streams

    return mock.patch.object(Lanes, "request", early)


def followed_lanes():
    """Who waits for a word waits for its host alone."""
    join = Lanes._join

    def deaf(self, awaited, **options):
        with self._streams.deaf():
            join(self, awaited, **options)

    return mock.patch.object(Lanes, "_join", deaf)


def stored_gradients():
    """The host's optimizer does not wait until its gradients have been copied."""
    join = Lanes._join
    return mock.patch.object(
        Lanes, "_join", lambda self, awaited, **options: join(self, awaited, **options | {"on_host": False})
    )


def held_inputs():
    """An input that leaves is let go of when its copy has been given to the device."""
    offload = InputStash.offload

    def letting_go(self, stage, microbatch):
        call = offload(self, stage, microbatch)
        _, place = self._leaving[-1]
        return lambda: (call(), place.clear())

    return mock.patch.object(InputStash, "offload", letting_go)


def held_evictions():
    """What was packed is let go of at once."""
    evict = CapturedActivations.evict

    def letting_go(self, microbatch):
        eviction = evict(self, microbatch)
        pack = eviction.pack

        def packed(*given):
            buffer = pack(*given)
            eviction.held.clear()
            return buffer

        return type(eviction)(eviction.num_bytes, packed, eviction.held)

    return mock.patch.object(CapturedActivations, "evict", letting_go)


def packed_activations():
    """What leaves is packed though its forward may not have ended."""
    evict = CapturedActivations.evict

    def early(self, microbatch):
        streams, self._streams = self._streams, SimpleNamespace(record=lambda: None)
        try:
            eviction = evict(self, microbatch)
        finally:
            self._streams = streams
        return eviction

    return mock.patch.object(CapturedActivations, "evict", early)


def taken_back(name: str | None):
    """A context in which `name` is taken back; None: nothing is."""
    return nullcontext() if name is None else globals()[name]()
