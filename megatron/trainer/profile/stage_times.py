"""Times a stage alone: forward and backward of microbatches, whole or in halves, and what a batch's update takes.

The calls are those of the executor, in the order of its instructions (contract/stage.py), batch by batch, so a forward
meets caches that a backward and an optimizer step have left. A batch counts with the mean over its microbatches: an
iteration takes their sum, and where some are interrupted now and then, the median of single ones falls short of it. On
CUDA marks are events on the compute stream: what is timed is the device's work in the order in which training gives it,
without a wait between.
"""

from collections import defaultdict
from collections.abc import Callable
from statistics import fmean

from megatron import backend
from megatron.pipeline.runtime.contract.stage import BatchInfo, Microbatch
from megatron.pipeline.runtime.contract.trace import CudaClock, HostClock
from megatron.trainer.profile.lone_stage import LoneStage

Samples = dict[str, list[float]]
"""What was timed -> seconds in each batch: forward, backward (of a microbatch, the mean), zero, norm, step; with halves
also backward_input and backward_weight."""


def time_stage(
    lone: LoneStage,
    *,
    num_microbatches: int,
    num_batches: int,
    num_warmup: int,
    start: Callable[[], None],
    halves: bool = False,
) -> Samples:
    """Run batches of `num_microbatches` and time the last `num_batches` of them.

    Args:
        num_warmup: batches before those that count.
        start: called before the first; where others are to work at the same time, it waits for them.
        halves: behind each batch comes one more whose backwards are in halves, each W behind its I, of which these are
            timed. So both meet the same machine. Sets `deferred_bytes` of `lone`.
    """
    clock = CudaClock() if backend.is_cuda() else HostClock()
    if halves:
        lone.stage.split_backward()
    start()
    batches = []
    for batch in range(num_warmup + num_batches):
        if halves:
            whole = _run_batch(lone, 2 * batch, num_microbatches, clock.now)
            split = _run_batch(lone, 2 * batch + 1, num_microbatches, clock.now, split=True)
            batches.append([*whole, *(mark for mark in split if mark[0] in _HALVES)])
        else:
            batches.append(_run_batch(lone, batch, num_microbatches, clock.now))
    seconds_at = clock.reader()
    samples: Samples = defaultdict(list)
    for marks in batches[num_warmup:]:
        times = defaultdict(list)
        for name, first, last in marks:
            times[name].append(seconds_at(last) - seconds_at(first))
        for name, seconds in times.items():
            samples[name].append(fmean(seconds))
    return dict(samples)


_HALVES = ("backward_input", "backward_weight")


def _run_batch(
    lone: LoneStage, batch: int, num_microbatches: int, now: Callable, *, split: bool = False
) -> list[tuple]:
    """What was done, and the clock's marks before and after."""
    marks = []
    stage, update = lone.stage, lone.update
    info = BatchInfo(batch, num_microbatches, num_microbatches)
    version = max(batch - (update.weights.delay or 0), 0)
    update.begin_batch(info)
    for position in range(num_microbatches):
        microbatch = Microbatch(batch * num_microbatches + position, batch, position, num_microbatches)
        begin = now()
        stage.load_version(version)
        stage.forward(microbatch, lone.input)
        stage.free_output(microbatch)
        marks.append(("forward", begin, now()))
        if position == 0:
            begin = now()
            update.begin_backward(info)
            marks.append(("zero", begin, now()))
        begin = now()
        stage.load_version(version)
        if split:
            stage.backward_input(microbatch, lone.output_grad)
            marks.append(("backward_input", begin, now()))
            lone.deferred_bytes = stage.deferred_bytes(microbatch)
            begin = now()
            stage.load_version(version)
            stage.backward_weights(microbatch)
            marks.append(("backward_weight", begin, now()))
        else:
            stage.backward(microbatch, lone.output_grad)
            marks.append(("backward", begin, now()))
    begin = now()
    update.reduce_norm(batch + 1, 0, stage.take_losses(batch))
    middle = now()
    update.step(batch + 1)
    return [*marks, ("norm", begin, middle), ("step", middle, now())]
