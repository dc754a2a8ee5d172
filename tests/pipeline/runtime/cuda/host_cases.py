"""Whether the thread that computes waits for the device: a single rank over NCCL, in the processes of `tests.workers`.

torch's own watch (`torch.cuda.set_sync_debug_mode`) is of the whole process, and other threads wait for the device all
the time, as they should: the chain's for the norm. So it is set to warn, and each warning is noted with its thread.
It does not know all calls (none of events), so there is a second measure: how far the host comes while a kernel sleeps.
"""

from __future__ import annotations

import sys
import threading
import warnings
from contextlib import contextmanager, nullcontext

import torch

from megatron.backend.streams import streams_of
from tests.pipeline.runtime.cuda.cuda_cases import begin, over_nccl, settle, sleep
from tests.pipeline.runtime.stages.megatron import megatron_cases
from tests.pipeline.runtime.stages.megatron.megatron_model import SEQUENCE, Case, causal_mask, parallel

Wait = tuple[str, str]
"""(thread, innermost line of this project)."""

_SMALL = {"batches": (2,) * 8, "layers": 1}
"""A GPU's queues hold about a thousand kernels, and who launches one more waits: a batch has to be less than that."""


def waits_by_thread(**options) -> list[Wait]:
    """What waits for the device in three batches, after three others."""
    with _single_rank(Case(**_SMALL, **options), "cuda:0") as (engine, _, _):
        for _ in range(3):
            engine.run_batch(2, 4)
        with synchronizing_calls() as waits:
            for _ in range(3):
                engine.run_batch(2, 4)
        engine.drain()
        return waits


def calls_ahead_of_a_sleep(place: str = "cuda:0", **options) -> list[tuple[str, bool]]:
    """(forward, backward or step; the host returned from it before the device came to it) of a batch ahead of which a
    kernel sleeps for two seconds.
    """
    with _single_rank(Case(**_SMALL, **options), place) as (engine, stage, update):
        for _ in range(3):
            engine.run_batch(2, 4)
        device = torch.device(place)
        streams, calls = streams_of(device), []

        def noting(name, call):
            def noted(*arguments):
                result = call(*arguments)
                calls.append((name, not streams.is_done(asleep)))
                return result

            return noted

        settle(device)
        sleep(2.0, device)
        asleep = streams.record()
        stage.forward, stage.backward = noting("forward", stage.forward), noting("backward", stage.backward)
        update.step = noting("step", update.step)
        engine.run_batch(2, 4)
        ahead = list(calls)
        engine.drain()
        return ahead


@contextmanager
def _single_rank(case: Case, place: str):
    """(engine, stage, update) of a GPT on one rank, whose data lie on the device."""
    device = begin(place)
    is_cuda = device.type == "cuda"
    with over_nccl() if is_cuda else nullcontext(), parallel(case):
        [stage], update = megatron_cases.build(case)
        stage._forward_step = _step(device)
        data = [{name: each[name].to(device) for name in ("tokens", "labels")} for each in stage.data_iterator]
        stage.data_iterator = iter(data)
        backend = "nccl" if is_cuda else "gloo"
        engine = megatron_cases.engine_of(case, [stage], update, device=device, backend=backend)
        yield engine, stage, update
        engine.close()
        update.close()


def _step(device: torch.device):
    """A forward step that needs nothing of the host."""
    mask, positions = causal_mask().to(device), torch.arange(SEQUENCE, device=device)

    def step(data_iterator, model):
        data = next(data_iterator)

        def loss_function(losses):
            loss = losses.float().mean()
            return loss, {"lm loss": loss.detach().clone()}

        position_ids = positions.expand_as(data["tokens"])
        return model(data["tokens"], position_ids, mask, labels=data["labels"]), loss_function

    return step


@contextmanager
def synchronizing_calls():
    """A list that grows by a `Wait` with every call of torch that waits for the device, of any thread."""
    waits: list[Wait] = []

    def note(message, *place, **options) -> None:
        if "synchronizing CUDA operation" in str(message):
            waits.append((threading.current_thread().name, _own_line()))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _own_line() -> str:
    frame, lines = sys._getframe(1), []
    while frame is not None:
        path = frame.f_code.co_filename
        if "/megatron/" in path and __file__ != path:
            lines.append(f"{path.rsplit('/megatron/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    own = [line for line in lines if line.startswith(("pipeline/", "backend/", "trainer/"))]
    return " under ".join(dict.fromkeys((*lines[:1], *own[:1]))) or "outside of the project"
