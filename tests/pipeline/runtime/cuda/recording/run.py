"""The stand-in in place of a CPU's side, for a block."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

from megatron.backend import streams
from megatron.pipeline.runtime.stages.megatron import groups, reduction
from megatron.pipeline.runtime.transport import lane, links, move_links
from tests.pipeline.runtime.cuda.recording.device import Recorder
from tests.pipeline.runtime.cuda.recording.groups import HostGroup
from tests.pipeline.runtime.cuda.recording.operations import Operations, Values
from tests.pipeline.runtime.cuda.recording.threads import watched_threads


@contextmanager
def recording(*, seed: int = 0, backend: str = "nccl"):
    """In this block the runtime works on a Recorder; the engine is built with the same `backend`."""
    recorder = Recorder(seed=seed)
    staged = {"nccl": (links.NcclLink, move_links.NcclMoveLink)}
    staged["gloo"] = (links.HostStagedLink, move_links.HostStagedMoveLink)
    link, move_link = staged[backend]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(streams.SIDES, {"cpu": lambda device: recorder}))
        stack.enter_context(mock.patch.dict(links.LINKS, {(backend, "cpu"): link}))
        stack.enter_context(mock.patch.dict(move_links.MOVE_LINKS, {(backend, "cpu"): move_link}))
        for module in (groups, reduction):
            stack.enter_context(mock.patch.object(module, "uses_nccl", lambda: backend == "nccl"))
        stack.enter_context(mock.patch.object(reduction, "_BYTES", (8, 4096)))
        stack.enter_context(watched_threads(recorder, (lane, links)))
        watched_pair = _watched(recorder, links.gloo_pair)
        for module in (links, move_links):
            stack.enter_context(mock.patch.object(module, "gloo_pair", watched_pair))
        stack.enter_context(Operations(recorder))
        stack.enter_context(Values(recorder))
        recorder.entered_by_the_caller()
        yield recorder


def _watched(recorder: Recorder, make):
    return lambda *args, **options: HostGroup(recorder, make(*args, **options))
