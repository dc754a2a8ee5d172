"""What `l2l` measures: contenders in turns, a trace, the device's peak, and the largest model. Each is a task."""

from __future__ import annotations

import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.gpu_hour.l2l_contenders import FSDP2, FSDP2_AT_ONCE, L2L, NAMES, RELAY, make
from benchmarks.gpu_hour.meters import meter_of_device
from benchmarks.gpu_hour.process import free
from benchmarks.gpu_hour.trained import Size, first_line, is_out_of_memory
from megatron import backend
from megatron.pipeline.program.instruction import COMPUTATIONS, Lane

GIB = 2**30


ENOUGH = 150.0
"""Seconds after which `compare` begins no further round: a task that is ended at its limit returns nothing."""


def compare(
    size: Size, rounds: int, batches: int, *, store: Any, start: Callable[[], None], enough: float = ENOUGH
) -> dict:
    """Train all contenders in turns. Returns name -> seconds of a batch in each round and losses, or why it failed.

    A contender that fails is left out from then on: the others go on. There is one round at least, and at most
    `rounds`: none begins `enough` seconds after the call.
    """
    called = time.monotonic()
    start()
    found: dict[str, dict] = {}
    contenders: dict[str, Any] = {}
    for name in NAMES:
        if name == FSDP2_AT_ONCE and size.microbatches == 1:
            continue
        found[name] = {"losses": [], "seconds": []}
        with _left_out_if_failed(name, contenders, found):
            contenders[name] = make(name, size, store)
            found[name]["losses"] += contenders[name].train(1)
    order = random.Random(0)
    for number in range(rounds):
        if number and time.monotonic() - called > enough:
            break
        for name in order.sample(list(contenders), len(contenders)):
            with _left_out_if_failed(name, contenders, found):
                backend.synchronize()
                began = time.perf_counter()
                found[name]["losses"] += contenders[name].train(batches)
                found[name]["seconds"].append((time.perf_counter() - began) / batches)
    for contender in contenders.values():
        contender.close()
    return found


@contextmanager
def _left_out_if_failed(name: str, contenders: dict[str, Any], found: dict[str, dict]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        contenders.pop(name, None)
        found[name] = {"failed": first_line(error), "out_of_memory": is_out_of_memory(error)}
    if name not in contenders:
        free()


def overlap(size: Size, batches: int, trace_file: str, *, store: Any, start: Callable[[], None]) -> dict:
    """Train with l2l and a tracer. Returns lane -> seconds in it, the share beside computation, and in all: the seconds
    of computation, of waiting and from the first span to the last."""
    from megatron.pipeline.runtime.contract.trace import write_chrome_trace

    start()
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--pipeline-timeline", folder, "--pipeline-timeline-iterations", str(batches))
        run = make(L2L, size, store, *flags)
        run.train(1)  # memory, moments
        run.train(batches)
        trace = run.engine.trace()
        write_chrome_trace([trace], trace_file)
        run.close()
    return shares([span for span in trace.spans if _is_of_last(span, trace, batches)])


def _is_of_last(span: Any, trace: Any, batches: int) -> bool:
    """Whether a span is of the last batches. Version v is fetched for batch v, and made from gradients of v - 1."""
    extent, instruction = trace.batches[-batches], span.instruction
    if instruction.microbatch is not None:
        return instruction.microbatch >= extent.first_microbatch
    return instruction.version >= extent.batch + (instruction.kind.row.lane is not Lane.H2D)


LANES = {"to_device": Lane.H2D, "from_device": Lane.D2H, "host_optimizer": Lane.HOST}


def shares(spans: Iterable[Any]) -> dict:
    """Of spans: by name in `LANES` the seconds and the share that lies within computations."""
    from megatron.pipeline.runtime.contract.trace import COMPUTE, WAIT

    spans = list(spans)
    busy = [(span.start, span.end) for span in spans if span.track == COMPUTE and span.instruction.kind in COMPUTATIONS]
    lanes = {}
    for name, lane in LANES.items():
        own = [(span.start, span.end) for span in spans if span.track == lane.value]
        total = sum(end - begin for begin, end in own)
        if total > 0:
            hidden = sum(_common(each, busy) for each in own)
            lanes[name] = {"seconds": total, "hidden_ratio": hidden / total}
    return {
        "lanes": lanes,
        "computing_seconds": sum(end - begin for begin, end in busy),
        "waiting_seconds": sum(span.end - span.start for span in spans if span.track == WAIT),
        "seconds": max(span.end for span in spans) - min(span.start for span in spans),
    }


def _common(interval: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    """The length that an interval shares with others, which do not overlap each other."""
    return sum(max(0.0, min(interval[1], end) - max(interval[0], begin)) for begin, end in others)


def device_bytes(name: str, size: Size, *, store: Any, start: Callable[[], None]) -> dict:
    """Train two batches of a contender alone. Returns the peak of the device in the second one, and the losses."""
    start()
    free()
    meter = meter_of_device()
    try:
        with ExitStack() as stack:
            if name != FSDP2:  # of FSDP2 a CPU's meter can count only what a later batch makes
                stack.enter_context(meter)
            contender = make(name, size, store)
            losses = contender.train(1)  # moments; the host maps buffers
            if name == FSDP2:
                stack.enter_context(meter)
            meter.take()
            losses += contender.train(1)
            peak = meter.take()
            contender.close()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"failed": first_line(error), "out_of_memory": True}
    return {"peak_bytes": peak, "reserved_bytes": meter.reserved, "losses": losses}


def host(size: Size, *, store: Any, start: Callable[[], None]) -> dict:
    """What the host has, and the deepest model of `size` for it (planner, with inputs on the host)."""
    from megatron.trainer.arguments import parse_args
    from megatron.trainer.dry_run.dry_run import check_job

    start()
    available = backend.available_host_bytes() / GIB
    asked = ("--dry-run", "1", "--dry-run-gpu", "H200", "--dry-run-host-memory", f"{available:.3f}")
    dry = check_job(parse_args(size.argv(*RELAY, *asked, "--assume-packages", "none")))
    largest = dry.hosted.largest
    rank = dry.memory[0]
    return {
        "available_gib": available, "planned_device_bytes": rank.total, "planned_host_bytes": rank.host.total,
        "planned_iteration_seconds": dry.hosted.seconds,
        "largest_layers": None if largest is None else largest.num_layers,
        "largest_parameters": None if largest is None else largest.num_parameters,
    }  # fmt: skip
