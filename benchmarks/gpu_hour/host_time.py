"""The host's time under the executor, and how far the host is ahead of the device.

With layers so small that the device waits for the host, three things are measured. What a batch takes the host under
`flush`, `2bw` and a plain torch loop over the same module and optimizer. Of that the executor's own part: CPU time of
the thread that computes, without the calls of stage and update that it makes. How many of torch's calls that wait for
the device that thread makes, and from how many calls it has returned while a kernel still sleeps ahead of the batch.
With larger layers: how long the device still works when the host has returned from the last of some batches.

The backward of a module on a GPU is launched by a thread of torch's own, so the host's time of forwards and backwards
is of wall clock.

Row: host_time | what does the executor cost the host per instruction, and does the host run ahead? |
-m benchmarks.gpu_hour.host_time | limit 180, expected 60 | a GPU, and pytest's folder `tests`
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from statistics import median
from unittest import mock

from benchmarks.gpu_hour.process import main
from benchmarks.gpu_hour.result import Result
from megatron import backend
from megatron.backend.streams import streams_of

SMALL = {
    "layers": 1, "hidden_size": 128, "heads": 4, "seq_length": 64, "micro_batch_size": 1, "vocab_size": 512,
}  # fmt: skip
NAMES = ("flush", "2bw", "loop")
SLEEP_S = 1.0


def run(result: Result) -> None:
    from benchmarks.gpu_hour import one_device

    sizes, full = one_device.sizes(result), one_device.extent(result, rounds=7, num_batches=20)
    number = one_device.num_microbatches(result)
    with contenders_of(sizes["small"] if result.content["rehearsal"] else SMALL, number) as contenders:
        measure_batches(result, contenders, number, **full)
        for name in ("flush", "2bw"):
            measure_executor(result, contenders[name], number, full["num_batches"])
        for name in NAMES:
            count_waits(result, contenders[name], number)
        for name in NAMES:
            measure_lead_of_a_sleep(result, contenders[name])
    for size in [*sizes][1:]:
        with one_device.may_not_fit(result, f"{size} layers"), contenders_of(sizes[size], number) as contenders:
            measure_lead(result, size, contenders, number)


@contextmanager
def contenders_of(model: dict, num_microbatches: int) -> Iterator[dict]:
    """Name -> contender, each of which has trained three batches and is between batches."""
    from benchmarks.gpu_hour.one_device import Loop, engine

    with ExitStack() as made:
        contenders = {
            name: made.enter_context(closing((Loop if name == "loop" else engine)(name, model))) for name in NAMES
        }
        for contender in contenders.values():
            for _ in range(3):
                contender.run(num_microbatches)
        yield contenders
        for contender in contenders.values():
            contender.finish()


def measure_batches(result: Result, contenders: dict, num_microbatches: int, *, rounds: int, num_batches: int) -> None:
    """Until the host has returned from a batch, on the mean over some: wall clock, and CPU time of this thread."""
    from benchmarks.gpu_hour.one_device import orders, shown

    wall, cpu = ({name: [] for name in contenders} for _ in range(2))
    for order in orders(contenders, rounds):
        for name in order:
            backend.synchronize()
            started, started_cpu = time.perf_counter(), time.thread_time()
            for _ in range(num_batches):
                contenders[name].run(num_microbatches)
            wall[name].append((time.perf_counter() - started) / num_batches)
            cpu[name].append((time.thread_time() - started_cpu) / num_batches)
    for what, seconds in (("wall clock", wall), ("CPU time of the computing thread", cpu)):
        result.add(
            f"Host's ms of {num_microbatches} microbatches through one small layer, {what}: {shown(seconds, 2, 1e3)}",
            **{f"{name}_host_{what.split()[0].lower()}_seconds_per_batch": each for name, each in seconds.items()},
        )


@contextmanager
def noting(contender, note: Callable[[str, float, float], None]) -> Iterator[None]:
    """A block in which `note(name, wall seconds, CPU seconds)` follows each call that the executor makes."""

    def noted(name: str, call):
        def calls(*arguments, **options):
            started, started_cpu = time.perf_counter(), time.thread_time()
            found = call(*arguments, **options)
            note(name, time.perf_counter() - started, time.thread_time() - started_cpu)
            return found

        return calls

    with ExitStack() as patches:
        for owner, name in ((contender.stage, "forward"), (contender.stage, "backward"), (contender.update, "step")):
            patches.enter_context(mock.patch.object(owner, name, noted(name, getattr(owner, name))))
        yield


def measure_executor(result: Result, contender, num_microbatches: int, num_batches: int) -> None:
    """The executor's own CPU time per instruction, and the wall clock of the calls that it makes."""
    wall: dict[str, list[float]] = defaultdict(list)
    inside = []

    def note(name: str, seconds: float, cpu_seconds: float) -> None:
        wall[name].append(seconds)
        inside.append(cpu_seconds)

    backend.synchronize()
    before = contender.engine.num_instructions_executed
    with noting(contender, note):
        started = time.thread_time()
        for _ in range(num_batches):
            contender.run(num_microbatches)
        own = time.thread_time() - started - sum(inside)
    own /= contender.engine.num_instructions_executed - before
    calls = ", ".join(f"a {name} {1e6 * median(each):.0f}" for name, each in wall.items())
    result.add(
        f"Under {contender.name} the executor and its engine take {1e6 * own:.1f} us of CPU time per instruction; the "
        f"host has returned (us) from {calls}",
        **{f"{contender.name}_executor_seconds_per_instruction": own},
        **{f"{contender.name}_host_seconds_of_a_{name}": each for name, each in wall.items()},
    )


def count_waits(result: Result, contender, num_microbatches: int) -> None:
    """torch's calls that wait for the device, of the thread that computes; torch does not know those of events."""
    from tests.pipeline.runtime.cuda.host_cases import synchronizing_calls

    own = threading.current_thread().name
    with synchronizing_calls() if backend.is_cuda() else nullcontext([]) as waits:
        for _ in range(3):
            contender.run(num_microbatches)
    places = sorted({place for thread, place in waits if thread == own})
    count = sum(thread == own for thread, _ in waits)
    result.add(
        f"Calls that wait for the device in three batches of {contender.name}: {count} in the computing thread, "
        f"{len(waits) - count} in others" + (f" ({'; '.join(places)})" if places else ""),
        **{f"{contender.name}_waits_in_three_batches": count},
    )


def measure_lead_of_a_sleep(result: Result, contender) -> None:
    """Train a batch of two microbatches behind a kernel that sleeps. A GPU's queue holds about a thousand kernels, and
    who launches one more waits, so the batch is less than that."""
    from tests.pipeline.runtime.cuda.cuda_cases import begin, sleep

    device = begin(str(backend.device()))
    streams, ahead = streams_of(device), []
    contender.run(2)  # the batch before has its norm when the sleep begins
    backend.synchronize()
    sleep(SLEEP_S, device)
    asleep = streams.record()
    started = time.perf_counter()
    is_loop = contender.name == "loop"
    with nullcontext() if is_loop else noting(contender, lambda *call: ahead.append(not streams.is_done(asleep))):
        contender.run(2)
    seconds = time.perf_counter() - started
    is_ahead = not streams.is_done(asleep)
    backend.synchronize()
    of_calls = "" if is_loop else f", and was through {sum(ahead)} of {len(ahead)} calls while it slept"
    result.add(
        f"Behind a kernel of {SLEEP_S:g} s the host returned from a batch of {contender.name} after "
        f"{1e3 * seconds:.1f} ms, {'ahead of' if is_ahead else 'behind'} the device{of_calls}",
        **{f"{contender.name}_seconds_behind_a_sleep": seconds},
        **({} if is_loop else {f"{contender.name}_calls_ahead_of_a_sleep": [sum(ahead), len(ahead)]}),
    )


def measure_lead(result: Result, size: str, contenders: dict, num_microbatches: int) -> None:
    """How long the device works on when the host has returned from the last of three batches."""
    lead, whole = {}, {}
    for name, contender in contenders.items():
        backend.synchronize()
        started = time.perf_counter()
        for _ in range(3):
            contender.run(num_microbatches)
        returned = time.perf_counter()
        backend.synchronize()
        lead[name], whole[name] = time.perf_counter() - returned, time.perf_counter() - started
    words = ", ".join(f"{name} {1e3 * each:.1f} of {1e3 * whole[name]:.0f}" for name, each in lead.items())
    result.add(
        f"{size} layers: milliseconds of three batches for which the device still works when the host is done: {words}",
        **{f"{size}_{name}_lead_seconds": each for name, each in lead.items()},
        **{f"{size}_{name}_seconds_of_three_batches": each for name, each in whole.items()},
    )


if __name__ == "__main__":
    main(__doc__, run)
